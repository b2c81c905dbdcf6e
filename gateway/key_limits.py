"""Limits per client key: answers in progress, and requests and tokens per minute.

Each process counts by itself, so the limits of several gateways or workers add up. Knows nothing of HTTP, and
of a key only its owner's name.
"""

import math
from collections.abc import Iterable
from time import monotonic

from gateway.errors import RateLimitError
from gateway.setting_types import ApiKey

_MINUTE_S = 60.0
_RETRY_AFTER_S = 1


class KeyLimits:
    """The limits of all keys. Belongs to one event loop."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._uses = {key.name: KeyUse(key) for key in keys}

    def use_of(self, name: str | None) -> "KeyUse | None":
        """Return what the key of that owner uses; None for None, as when no keys are configured."""
        return None if name is None else self._uses[name]


class KeyUse:
    """How much of its limits one key uses at present."""

    def __init__(self, key: ApiKey) -> None:
        self._max_in_flight = key.max_in_flight
        self._in_flight = 0
        self._requests = _Bucket("requests", key.requests_per_minute)
        self._tokens = _Bucket("tokens", key.tokens_per_minute)

    def begin(self, answers: int) -> int:
        """Count a request that asks for `answers` answers, whatever becomes of it (divergence 15).

        As in `gateway.admission`, a request for more answers than the limit takes the whole limit.

        Returns:
            The number of answers that it counts as, to be passed to `end`.

        Raises:
            RateLimitError: a limit is reached; nothing was counted.
        """
        most = self._max_in_flight
        taken = answers if most is None else min(answers, most)
        if most is not None and self._in_flight + taken > most:
            raise RateLimitError(
                f"This API key has {self._in_flight} answers at work or waiting, of {most} that it may have.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._tokens.check()
        self._requests.check()
        self._requests.take(1)
        self._in_flight += taken
        return taken

    def end(self, taken: int, tokens: int) -> None:
        """Release what `begin` returned, and count the tokens of prompt and answers.

        These are known only now, so the last request within the limit may exceed it; the next request then
        has to wait longer.
        """
        self._in_flight -= taken
        self._tokens.take(tokens)


class _Bucket:
    """A bucket of one minute's worth, refilled steadily; without a limit it is never empty."""

    def __init__(self, what: str, per_minute: int | None) -> None:
        self._what = what
        self._per_minute = math.inf if per_minute is None else float(per_minute)
        self._level = self._per_minute
        self._at = monotonic()

    def check(self) -> None:
        """Check that the bucket holds at least one.

        Raises:
            RateLimitError: it does not; the error says when it will.
        """
        self._refill()
        if self._level < 1:
            raise RateLimitError(
                f"This API key has used its {self._per_minute:.0f} {self._what} a minute.",
                retry_after_s=math.ceil((1 - self._level) * _MINUTE_S / self._per_minute),
            )

    def take(self, count: int) -> None:
        """Take `count`, even if the bucket holds fewer."""
        self._refill()  # first: a full one gains nothing, however long ago it was looked at
        self._level -= count

    def _refill(self) -> None:
        if math.isinf(self._per_minute):
            return
        now = monotonic()
        gained = (now - self._at) * self._per_minute / _MINUTE_S
        self._level, self._at = min(self._level + gained, self._per_minute), now
