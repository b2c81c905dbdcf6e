"""Clients' keys: who may ask, for what, and how much: at once, per minute, per day.

Keys are kept and compared as SHA-256 digests, so that every comparison has the same length, and each
presented key is compared with all known ones in constant time. Nothing here logs, and no error repeats the
presented key. The processes of a gateway count together; several gateways do not, so their limits add up.
Keys may come, change and go: a name keeps what it has used.
"""

import asyncio
import hashlib
import hmac
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import monotonic, time

from gateway.errors import AuthenticationError, PermissionDeniedError, QuotaError, RateLimitError
from gateway.limits.counters import Named, Numbers, SharedCounters
from gateway.settings import ConfigurationError, Settings
from gateway.settings.values import KEYS_LIMIT, TOKENS_PER_DAY_LIMIT, ApiKey, Scope

_MINUTE_S = 60.0
_DAY_S = 86_400
_DAY_SHIFT = TOKENS_PER_DAY_LIMIT.bit_length()
_NAMES_MOST = 2 * KEYS_LIMIT
"""Names that a keys file may have had since the start; each takes some 60 bytes per process."""
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Known:
    name: str
    digest: bytes
    scopes: frozenset[Scope]


class Keyring:
    """The known keys. Without any, every caller may do everything; the settings guard against that."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self.apply(keys)

    def apply(self, keys: Iterable[ApiKey]) -> None:
        """Know these keys and no others from now on."""
        keys = tuple(keys)
        self._known = tuple(_Known(key.name, each, key.scopes) for key in keys for each in key.digests())
        self._models = {key.name: frozenset(key.models) for key in keys}

    def may_use(self, name: str | None, model: Iterable[str]) -> bool:
        """Whether the owner of that key may use the model with these names; None: a caller without a key."""
        models = self._models.get(name) if name is not None else None
        return not models or not models.isdisjoint(model)

    def authorize(self, headers: Mapping[str, str], scope: Scope) -> str | None:
        """Check the key that a request presents and return its name; None when no keys are configured.

        It is a bearer token or, without one, `x-api-key`, as Anthropic's clients send it.

        Args:
            headers: by lower-case names, their bytes read as Latin-1 as ASGI does.
            scope: the one the route needs.

        Raises:
            AuthenticationError: no key, or an unknown one.
            PermissionDeniedError: a known key without `scope`.
        """
        if not self._known:
            return None
        scheme, _, presented = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            presented = headers.get("x-api-key", "")
        presented = presented.strip(" \t")
        if not presented:
            raise AuthenticationError(
                "An API key is needed: send the header Authorization: Bearer KEY, or x-api-key: KEY.",
                reason="no_key",
            )
        digest = hashlib.sha256(presented.encode("latin-1")).digest()
        found: _Known | None = None
        for known in self._known:  # no early exit: timing must not reveal which key matched
            if hmac.compare_digest(known.digest, digest):
                found = known
        if found is None:
            raise AuthenticationError("The API key is not known.", reason="unknown_key")
        if scope not in found.scopes:
            denied = PermissionDeniedError(f"This API key does not have the scope {scope}.")
            denied.key_name = found.name
            raise denied
        return found.name


class KeyLimits:
    """The limits of all keys. Belongs to one event loop."""

    def __init__(self, keys: Iterable[ApiKey], shared: SharedCounters) -> None:
        self._shared = shared
        self._uses: dict[str, KeyUse] = {}
        self.apply(keys)

    @staticmethod
    def room(settings: Settings) -> Named:
        """Return the room in the table: the same in each process, whatever its keys file says meanwhile."""
        names = _NAMES_MOST if settings.keys_file else len(settings.api_keys)
        return Named(names, KeyUse.GAUGES, KeyUse.COUNTERS)

    def apply(self, keys: Iterable[ApiKey]) -> None:
        """Limit these keys from now on as they say; what was used stays used.

        Raises:
            ConfigurationError: there were too many names; nothing has changed.
        """
        keys = tuple(keys)
        new = {key.name: self._shared.named(key.name) for key in keys if key.name not in self._uses}
        if None in new.values():
            raise ConfigurationError("api_keys: too many names have come and gone: restart the gateway")
        self._uses |= {key.name: KeyUse(key, room) for key in keys if (room := new.get(key.name))}
        for key in keys:
            self._uses[key.name].limit(key)

    def use_of(self, name: str | None) -> "KeyUse | None":
        """Return what the key of that owner uses; None for None, as when no keys are configured."""
        return None if name is None else self._uses[name]

    def headers(self, name: str | None) -> dict[str, str]:
        """Return what that owner's key has left of its limits per minute, as OpenAI tells its clients."""
        use = self.use_of(name)
        return {} if use is None else use.requests.headers() | use.tokens.headers()

    async def follow(self) -> None:
        """Follow what the other processes let in, until cancelled: also for keys that are not used here."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            for use in self._uses.values():
                use.look()


class KeyUse:
    """How much of its limits one key uses at present.

    Uses `GAUGES` gauges and `COUNTERS` counters of `shared`.
    """

    GAUGES = 3
    COUNTERS = 3

    def __init__(self, key: ApiKey, shared: Numbers) -> None:
        self._max_in_flight = key.max_in_flight
        self._in_flight = shared.gauge()
        self.requests = _Bucket("requests", key.requests_per_minute, shared)
        self.tokens = _Bucket("tokens", key.tokens_per_minute, shared)
        self._day = _Day(key.tokens_per_day, shared)

    def limit(self, key: ApiKey) -> None:
        """Hold to the limits of `key` from now on."""
        self._max_in_flight = key.max_in_flight
        self.requests.limit(key.requests_per_minute)
        self.tokens.limit(key.tokens_per_minute)
        self._day.most = key.tokens_per_day

    def check(self) -> None:
        """Check that one more request may begin, as things are now; nothing is counted.

        Raises:
            RateLimitError: a limit is reached.
        """
        self._day.check()
        self.tokens.check()
        self.requests.check()
        if self._max_in_flight is not None and self._in_flight.total() >= self._max_in_flight:
            raise self._busy(self._max_in_flight)

    def begin(self, answers: int) -> int:
        """Count a request that asks for `answers` answers, whatever becomes of it (divergence 15).

        As in `gateway.limits.admission`, a request for more answers than the limit takes the whole limit.

        Returns:
            The number of answers that it counts as, to be passed to `end`.

        Raises:
            RateLimitError: a limit is reached; nothing was counted.
        """
        self.check()
        most = self._max_in_flight
        taken = answers if most is None else min(answers, most)
        if most is None:
            self._in_flight.own += taken
        elif not self._in_flight.add_within(taken, most):
            raise self._busy(most)
        self.requests.take(1)
        return taken

    def refused(self) -> None:
        """Count a request that the gateway refused before it could begin (divergence 15)."""
        self.requests.take(1)

    def look(self) -> None:
        """Take note of what the other processes let in."""
        self.requests.look()
        self.tokens.look()

    def end(self, taken: int, tokens: int) -> None:
        """Release what `begin` returned, and count the tokens of prompt and answers.

        These are known only now, so the last request within the limit may exceed it; the next request then
        has to wait longer.
        """
        self._in_flight.own -= taken
        self.tokens.take(tokens)
        self._day.take(tokens)

    def _busy(self, most: int) -> RateLimitError:
        return RateLimitError(
            f"This API key has {self._in_flight.total()} answers at work or waiting, of {most} that it may"
            " have."
        )


class _Day:
    """Tokens of one day (UTC), of all processes together; forgotten when the gateway ends.

    Each process has one word, the day and what it took on that day, so that nobody reads one without the
    other.
    """

    def __init__(self, most: int | None, shared: Numbers) -> None:
        self.most = most
        self._word = shared.counter()

    def check(self) -> None:
        """Check that something is left.

        Raises:
            QuotaError: nothing is; the error says when there will be.
        """
        now = int(time())
        if self.most is None or self._used(now // _DAY_S) < self.most:
            return
        raise QuotaError(
            f"This API key has used its {self.most} tokens of this day, which ends at midnight UTC.",
            retry_after_s=_DAY_S - now % _DAY_S,
        )

    def take(self, tokens: int) -> None:
        """Take `tokens`, even if fewer are left."""
        today = int(time()) // _DAY_S
        before = _of_day(self._word.own, today)
        self._word.own = today << _DAY_SHIFT | min(before + tokens, TOKENS_PER_DAY_LIMIT)

    def _used(self, today: int) -> int:
        return sum(_of_day(word, today) for word in (self._word.own, *self._word.of_others()))


def _of_day(word: int, day: int) -> int:
    return word & TOKENS_PER_DAY_LIMIT if word >> _DAY_SHIFT == day else 0


class _Bucket:
    """A bucket of one minute's worth, refilled steadily; without a limit it is never empty.

    Every process keeps its own view of it, and a new one begins with another one's: with a full bucket it
    alone would go on letting requests in while the others refuse them. What the others took since it last
    looked counts as if they had taken it evenly since then.
    """

    def __init__(self, what: str, per_minute: int | None, shared: Numbers) -> None:
        self._what = what
        self._per_minute = _rate(per_minute)
        self._missing = shared.gauge()
        """How much a full one has more than this one, for those that begin later."""
        self._taken = shared.counter()
        self._level = self._per_minute - max(self._missing.of_others(), default=0)
        self._at = monotonic()
        self._by_others = sum(self._taken.of_others())

    def limit(self, per_minute: int | None) -> None:
        """Refill it at this rate from now on; what is missing stays missing."""
        self.look()
        before, self._per_minute = self._per_minute, _rate(per_minute)
        missing = 0.0 if math.isinf(before) else before - self._level
        self._level, self._at = self._per_minute - missing, monotonic()
        self._by_others = sum(self._taken.of_others())
        self._tell()

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

    def headers(self) -> dict[str, str]:
        """Return the limit, what is left, and when the bucket is full; nothing without a limit."""
        if math.isinf(self._per_minute):
            return {}
        self.look()
        full_s = (self._per_minute - self._level) * _MINUTE_S / self._per_minute
        said = {"limit": self._per_minute, "remaining": max(self._level, 0), "reset": math.ceil(full_s)}
        return {
            f"x-ratelimit-{name}-{self._what}": f"{int(value)}{'s' if name == 'reset' else ''}"
            for name, value in said.items()
        }

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


def _rate(per_minute: int | None) -> float:
    return math.inf if per_minute is None else float(per_minute)
