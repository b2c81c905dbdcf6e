"""Guesses at a sequence's next tokens: answers often repeat what was written before, or follow a grammar.

Many guesses cost one step if they are right, since a step takes about as long for a few rows more
(Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", 2023). Here they
come from no second model but from a place where the newest tokens stood already ("prompt lookup decoding",
Saxena, 2023), which is followed over changes, since a text that is edited goes on behind them as it was; or
from the token mask, where it knows the text that follows. The engine draws at each guess's place as it would
without guesses, and keeps the guesses that it would have drawn: random numbers are keyed by position, so the
tokens are the same.
"""

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice, takewhile
from typing import NamedTuple, TypeVar

from triton_models.engine.sampling import TokenMask
from triton_models.errors import panics_are_errors

log = logging.getLogger(__name__)

T = TypeVar("T")

MATCHED = 3
"""How many tokens must have stood together before: fewer match by accident."""

_WIDTH = array("i").itemsize
_PLACES, _COMPARED = 8, 16
"""The newest tokens may have stood in many places. Of the last `_PLACES`, the one is taken in front of which
most tokens, of up to `_COMPARED`, are the same as in front of them."""
_CHANGED, _NEAR = 8, 16
"""A copied text is given up after more than `_CHANGED` tokens without `MATCHED` that agree. Until then, it is
found again where the newest token stands within `_NEAR` tokens of where it was left."""
_AT_FIRST = 0.5
"""How likely a guess is said to be right before any was seen."""
_FIRST_SEEN, _SEEN = 3, 20
"""How likely a guess is follows about the last `_SEEN` that were seen. The first counts for one in
`_FIRST_SEEN`, since little is known before."""


class Allowance(NamedTuple):
    """What a sequence may have in a step."""

    most: int
    """Guesses."""
    row: float
    """What the row of one takes, as a share of what the step takes for the sequence without guesses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """What guesses may cost; it depends on the device."""

    rows: int = 32
    """Rows of a step, of one token each, up to which guesses are made."""
    wait_s: float = 0.0
    """Seconds that a step with guesses takes longer than its rows do: for them the host has more to do, and
    where it works ahead of the device, this idles, since what follows depends on the results."""
    wait_more_s: float = 0.0
    """What each decoding sequence adds to that: the more there are, the longer the host takes."""
    mask_s: float = 0.0
    """What a token mask adds: it is told, asked what must come and filled while the device idles."""
    step_s: float = 0.02
    """Seconds of a step of one row; the warm-up measures it, and what one row more adds."""
    row_s: float = 0.001

    def allowance(self, most: int, sequences: int) -> Allowance:
        """Return what each of so many decoding sequences may have, of up to `most` guesses."""
        return Allowance(most, self.row_s * sequences / self._step(sequences))

    def worthwhile(self, right: float, guesses: float, sequences: int, masks: int = 0) -> bool:
        """Whether so many guesses, of which some are right, are worth their time.

        `sequences`: how many decode; `masks`: how many of these have a token mask.
        """
        wait = self.wait_s + self.wait_more_s * sequences + self.mask_s * masks
        return right > sequences * (wait + self.row_s * guesses) / self._step(sequences)

    def _step(self, sequences: int) -> float:
        return self.step_s + self.row_s * (sequences - 1)


@lru_cache(maxsize=4096)
def best(percent: int, allowance: Allowance) -> tuple[int, float]:
    """Return how many guesses at once give the most tokens for their time, and how many will be right.

    `percent`: how likely each is to be right if those before it were.
    """
    likely = percent / 100
    chance, right, length = 1.0, 0.0, 0
    while length < allowance.most:
        chance *= likely
        if chance * (1 + allowance.row * length) <= allowance.row * (1 + right):
            break
        right += chance
        length += 1
    return length, right


class _Trust:
    """How likely guesses of one kind are right. What could have been guessed counts as well as what was.

    Attributes:
        likely: each, if those before it are right.
    """

    def __init__(self, likely: float = _AT_FIRST) -> None:
        self.likely = likely
        self._seen = _FIRST_SEEN

    def note(self, *, right: bool) -> None:
        """Note whether the next token was the one that was to be guessed."""
        self.likely += (right - self.likely) / self._seen
        self._seen = min(_SEEN, self._seen + 1)

    def guesses(self, allowance: Allowance) -> tuple[int, float]:
        """Return how many guesses to make, and how many of them will be right."""
        return best(round(100 * self.likely), allowance)


class _Original:
    """The text that a sequence's newest tokens copy, somewhere among those before them.

    Tokens are searched as bytes, which takes microseconds for thousands of them; an index would take more
    time to keep than that, and a hundred times the memory.

    Attributes:
        place: that of the token which should come next; None: nothing is copied.
        trust: in that token: as in others of a copy, or as in others after a change, where the newest tokens
            are none of the text, which may go on from `place` all the same.
    """

    def __init__(self) -> None:
        self.place: int | None = None
        self.trust = self._copied = _Trust()
        self._changed = _Trust()
        self._known = bytearray()
        self._agreed = self._others = 0

    def follow(self, tokens: Sequence[int]) -> None:
        """Go on with the tokens that are new since the last call."""
        before, count = len(self._known) // _WIDTH, len(tokens)
        if count == before:
            return
        place = self.place
        if place is not None:
            for at in range(before, count):
                agrees = tokens[place] == tokens[at]
                (self._copied if self._agreed >= MATCHED else self._changed).note(right=agrees)
                self._agreed = self._agreed + 1 if agrees else 0
                place += 1
        self._known += array("i", tokens[before:]).tobytes()
        if place is None or self._agreed < MATCHED:
            found = self._search(tokens)
            if found is not None:
                place, self._agreed = found, MATCHED
            elif place is not None:
                self._others += count - before
                place = self._near(place) if self._others <= _CHANGED else None
        if self._agreed >= MATCHED:
            self._others = 0
        self.trust = self._copied if self._agreed >= MATCHED else self._changed
        self.place = place

    def _search(self, tokens: Sequence[int]) -> int | None:
        """Return what follows the place where most of the newest tokens stood together before."""
        newest, end, count = self._known[-MATCHED * _WIDTH :], len(self._known) - _WIDTH, len(tokens)
        found, longest, places = None, 0, 0
        while places < _PLACES and (at := self._known.rfind(newest, 0, end)) >= 0:
            place, beside = divmod(at, _WIDTH)
            end = at + len(newest) - 1
            if beside:
                continue  # The bytes of two tokens that stand side by side, not a token's.
            places += 1
            place += MATCHED
            agreed = MATCHED
            most = min(_COMPARED, place)
            while agreed < most and tokens[place - agreed - 1] == tokens[count - agreed - 1]:
                agreed += 1
            if agreed > longest:
                found, longest = place, agreed
        return found

    def _near(self, place: int) -> int:
        """Return what follows the newest token where it stands nearest to `place`; otherwise, `place`."""
        if self._agreed:
            return place
        newest = self._known[-_WIDTH:]
        end = min(len(self._known) - _WIDTH, (place + _NEAR) * _WIDTH)
        at, found = max(0, place - _NEAR) * _WIDTH, []
        while (at := self._known.find(newest, at, end)) >= 0:
            if at % _WIDTH == 0:
                found.append(at // _WIDTH + 1)
            at += _WIDTH - at % _WIDTH
        if not found:
            return place
        self._agreed = 1
        return min(found, key=lambda each: abs(each - place))


class Drafter:
    """Makes the guesses for one sequence, whose token mask has been told all known tokens.

    Args:
        mask: the sequence's token mask, if it has one.
        stop_ids: nothing follows these.
    """

    def __init__(self, mask: TokenMask | None = None, stop_ids: frozenset[int] = frozenset()) -> None:
        self._mask = mask
        self._stop_ids = stop_ids
        self._failed = False
        self._original = _Original()
        self._text: Sequence[int] = ()
        """What had to follow the first `_text_at` tokens."""
        self._text_at = 0
        self._forced = _Trust(likely=1.0)

    def expects(
        self, tokens: Sequence[int], allowance: Allowance, *, flying: bool = False
    ) -> tuple[float, int]:
        """Return how many guesses at what follows `tokens` would be right, and how many would be made.

        Args:
            tokens: the known ones.
            allowance: what guesses may cost.
            flying: another is in flight, and must be known first.
        """
        expected = 0.0, 0
        if forced := max(0, len(self._forced_after(tokens)) - flying):
            guesses, right = self._forced.guesses(allowance)
            expected = min(right, forced), min(guesses, forced)
        if self._copies(tokens):
            trust = self._original.trust
            guesses, right = trust.guesses(allowance)
            # The text must go on with what is in flight.
            expected = max(expected, (right * trust.likely if flying else right, guesses))
        return expected

    def draft(self, tokens: Sequence[int], allowance: Allowance) -> tuple[int, ...]:
        """Return guesses at what follows `tokens`, all of the sequence's known tokens.

        Its mask takes each of them after those before.
        """
        forced = self._taken(self._forced_after(tokens)[: self._forced.guesses(allowance)[0]])
        if len(forced) == allowance.most or not self._copies(tokens):
            return forced
        copied = self._taken(self._copied_after(tokens, self._original.trust.guesses(allowance)[0]))
        return copied if len(copied) > len(forced) else forced

    def _forced_after(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the next tokens of a text that must come, if the mask knows one."""
        if self._mask is None:
            return ()
        if self._text_at != len(tokens):
            for guess, token in zip(self._text, tokens[self._text_at :], strict=False):
                self._forced.note(right=guess == token)
                if guess != token:
                    break
            nothing: Sequence[int] = ()
            self._text, self._text_at = self._ask(self._mask.forced, nothing), len(tokens)
        return self._text

    def _copies(self, tokens: Sequence[int]) -> bool:
        """Whether the newest tokens copy others."""
        if self._failed:
            return False
        self._original.follow(tokens)
        return self._original.place is not None

    def _copied_after(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return the tokens that come next in the text that is copied."""
        place = self._original.place
        # Where the two places overlap, the text repeats itself; it may go on so.
        return tuple(islice(cycle(tokens[place : place + most]), most)) if place is not None else ()

    def _taken(self, guesses: Sequence[int]) -> tuple[int, ...]:
        """Return as many of `guesses` as the mask takes, before the first that ends the answer."""
        going_on = tuple(takewhile(lambda token_id: token_id not in self._stop_ids, guesses))
        mask = self._mask
        if mask is None or not going_on:
            return going_on
        return going_on[: self._ask(lambda: mask.takes(going_on), 0)]

    def _ask(self, call: Callable[[], T], otherwise: T) -> T:
        """Return what the mask answers; a fault in it ends the guesses, not the request."""
        if self._failed:
            return otherwise
        try:
            with panics_are_errors("a token mask"):
                return call()
        except Exception:
            # Masks are foreign code. If it is broken for more than guesses, the engine will see when it
            # fills the next row.
            log.exception("a token mask cannot look ahead")
            self._failed = True
            return otherwise
