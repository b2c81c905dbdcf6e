"""Limits per client key: answers in progress, and requests and tokens per minute.

The processes of a gateway count together; several gateways do not, so their limits add up. Knows nothing of
HTTP, and of a key only its owner's name.
"""

import asyncio
import math
from collections.abc import Iterable
from time import monotonic

from gateway.errors import RateLimitError
from gateway.setting_types import ApiKey
from gateway.tally import Tally

_MINUTE_S = 60.0
_RETRY_AFTER_S = 1
_LOOK_EVERY_S = 1.0


class KeyLimits:
    """The limits of all keys. Belongs to one event loop."""

    def __init__(self, keys: Iterable[ApiKey], tally: Tally) -> None:
        self._uses = {key.name: KeyUse(key, tally) for key in keys}

    def use_of(self, name: str | None) -> "KeyUse | None":
        """Return what the key of that owner uses; None for None, as when no keys are configured."""
        return None if name is None else self._uses[name]

    async def follow(self) -> None:
        """Follow what the other processes let in, until cancelled: also for keys that are not used here."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            for use in self._uses.values():
                use.look()


class KeyUse:
    """How much of its limits one key uses at present.

    Uses `GAUGES` gauges and `COUNTERS` counters of `tally`.
    """

    GAUGES = 3
    COUNTERS = 2

    def __init__(self, key: ApiKey, tally: Tally) -> None:
        self._max_in_flight = key.max_in_flight
        self._in_flight = tally.gauge()
        self._requests = _Bucket("requests", key.requests_per_minute, tally)
        self._tokens = _Bucket("tokens", key.tokens_per_minute, tally)

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
        self._tokens.check()
        self._requests.check()
        if most is None:
            self._in_flight.own += taken
        elif not self._in_flight.add_within(taken, most):
            at_work = self._in_flight.total()
            raise RateLimitError(
                f"This API key has {at_work} answers at work or waiting, of {most} that it may have.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._requests.take(1)
        return taken

    def look(self) -> None:
        """Take note of what the other processes let in."""
        self._requests.look()
        self._tokens.look()

    def end(self, taken: int, tokens: int) -> None:
        """Release what `begin` returned, and count the tokens of prompt and answers.

        These are known only now, so the last request within the limit may exceed it; the next request then
        has to wait longer.
        """
        self._in_flight.own -= taken
        self._tokens.take(tokens)


class _Bucket:
    """A bucket of one minute's worth, refilled steadily; without a limit it is never empty.

    Every process keeps its own view of it, and a new one begins with another one's: with a full bucket it
    alone would go on letting requests in while the others refuse them. What the others took since it last
    looked counts as if they had taken it evenly since then.
    """

    def __init__(self, what: str, per_minute: int | None, tally: Tally) -> None:
        self._what = what
        self._per_minute = math.inf if per_minute is None else float(per_minute)
        self._missing = tally.gauge()
        """How much a full one has more than this one, for those that begin later."""
        self._taken = tally.counter()
        self._level = self._per_minute - max(self._missing.of_others(), default=0)
        self._at = monotonic()
        self._by_others = sum(self._taken.of_others())

    def check(self) -> None:
        """Check that the bucket holds at least one.

        Raises:
            RateLimitError: it does not; the error says when it will.
        """
        self.look()
        if self._level < 1:
            raise RateLimitError(
                f"This API key has used its {self._per_minute:.0f} {self._what} a minute.",
                retry_after_s=math.ceil((1 - self._level) * _MINUTE_S / self._per_minute),
            )

    def take(self, count: int) -> None:
        """Take `count`, even if the bucket holds fewer."""
        self.look()  # first: a full one gains nothing, however long ago it was looked at
        self._level -= count
        self._taken.own += count
        self._tell()

    def look(self) -> None:
        """Refill it, and take out what the other processes let in."""
        if math.isinf(self._per_minute):
            return
        now, by_others = monotonic(), sum(self._taken.of_others())
        gained = (now - self._at) * self._per_minute / _MINUTE_S - (by_others - self._by_others)
        self._level, self._at = min(self._level + gained, self._per_minute), now
        self._by_others = by_others
        self._tell()

    def _tell(self) -> None:
        if not math.isinf(self._per_minute):
            self._missing.own = math.ceil(self._per_minute - self._level)
