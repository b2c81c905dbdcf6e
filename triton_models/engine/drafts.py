"""Guesses at a sequence's next tokens: answers often repeat what was written before, or follow a grammar.

Many guesses cost one step if they are right, since a step takes about as long for a few rows more
(Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", 2023). Here they
come from no second model but from the last place where the newest tokens stood already ("prompt lookup
decoding", Saxena, 2023), or from the token mask, where it knows the text that follows. The engine draws at
each guess's place as it would without guesses, and keeps the guesses that it would have drawn: random numbers
are keyed by position, so the tokens are the same.
"""

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, takewhile
from typing import TypeVar

from triton_models.engine.sampling import TokenMask
from triton_models.errors import panics_are_errors

log = logging.getLogger(__name__)

T = TypeVar("T")

MATCHED = 3
"""How many tokens must have stood together before: fewer match by accident."""

_WIDTH = array("i").itemsize
_LONGEST = 64
_LONGEST_PAUSE = 64
_HOPED = 0.5
"""How many right guesses are expected at least after a pause: else none would be tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """What guesses may cost; it depends on the device."""

    rows: int = 32
    """Rows of a step, of one token each, up to which guesses are made."""
    worth: float = 0.0
    """Right guesses for each decoding sequence that are worth a wait for the tokens in flight, where there is
    one; meanwhile the device idles. Where a step is scheduled with none in flight, nothing is lost."""
    worth_more: float = 0.0
    """What each decoding sequence adds to that: the more there are, the longer the host takes."""

    def worthwhile(self, right: float, sequences: int) -> bool:
        """Whether to guess where so many guesses of so many decoding sequences should be right."""
        return right > 0 and right >= sequences * (self.worth + self.worth_more * sequences)


class _Trust:
    """How many guesses of one kind are made at once: more or fewer as they turn out right or wrong."""

    def __init__(self, length: int, right: float) -> None:
        self.length = length
        self._right = right
        """How many of the next ones will be right, going by the last ones."""
        self._pause = 0
        """Tokens for which nothing is guessed after the next wrong guess."""
        self._resumes_at = 0

    @property
    def right(self) -> float:
        """How many of the next guesses will be right."""
        return max(self._right, _HOPED)

    def pauses(self, known: int) -> bool:
        """Whether none are made while so many tokens are known."""
        return known < self._resumes_at

    def learn(self, guessed: int, right: int, known: int) -> None:
        """Note how many of the last guesses were right."""
        self.length = min(2 * self.length, _LONGEST) if right == guessed else right + 1
        self._right = (self._right + right) / 2
        if right:
            self._pause = 0
        else:
            self._pause = min(2 * self._pause + 1, _LONGEST_PAUSE)
            self._resumes_at = known + self._pause


class Drafter:
    """Makes the guesses for one sequence, whose token mask has been told all known tokens.

    The known tokens are searched as bytes, which takes microseconds for thousands of tokens; an index of
    them would take more time to keep than that, and a hundred times the memory.

    Args:
        mask: the sequence's token mask, if it has one.
        stop_ids: nothing follows these.
    """

    def __init__(self, mask: TokenMask | None = None, stop_ids: frozenset[int] = frozenset()) -> None:
        self._mask = mask
        self._stop_ids = stop_ids
        self._failed = False
        self._known = bytearray()
        self._place: int | None = None
        self._text: Sequence[int] = ()
        self._text_at = -1
        self._copied, self._forced = _Trust(2, 1.0), _Trust(_LONGEST, _LONGEST)
        self._last = self._copied
        """The kind of the last guesses."""
        self._expected: _Trust | None = None
        """The kind of guesses that were expected last."""

    def expects(self, tokens: Sequence[int], *, flying: bool = False, waited: bool = False) -> float:
        """Return how many guesses at what follows `tokens` would be right; 0: there is nothing to go by.

        Args:
            tokens: the known ones.
            flying: another is in flight, and must be known first.
            waited: one was, and the last answer was believed; if there is nothing to go by now, that was as
                bad as a wrong guess.
        """
        before, self._expected = self._expected, None
        right = 0.0
        forced = len(self._forced_after(tokens)) - flying
        if forced > 0:
            self._expected, right = self._forced, min(forced, self._forced.right)
        if self._find(tokens) is not None and self._copied.right > right:
            self._expected, right = self._copied, self._copied.right
        if waited and before is not None and self._expected is None:
            before.learn(1, 0, len(tokens))
        return right

    def draft(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Return up to `most` guesses at what follows `tokens`, all of the sequence's known tokens.

        Its mask takes each of them after those before.
        """
        forced = self._taken(self._forced_after(tokens)[:most])
        copied = self._taken(self._copied_after(tokens, most)) if len(forced) < most else ()
        guesses, self._last = (copied, self._copied) if len(copied) > len(forced) else (forced, self._forced)
        return guesses

    def learn(self, guessed: int, right: int, known: int) -> None:
        """Note how many of the last guesses were right; `known`: how many tokens are known now."""
        self._last.learn(guessed, right, known)

    def _forced_after(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the next tokens of a text that must come, if the mask knows one."""
        if self._mask is None or self._forced.pauses(len(tokens)):
            return ()
        if self._text_at != len(tokens):
            nothing: Sequence[int] = ()
            self._text, self._text_at = self._ask(self._mask.forced, nothing), len(tokens)
        return self._text[: self._forced.length]

    def _copied_after(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return the tokens that followed when the newest tokens stood together last."""
        place = self._find(tokens)
        if place is None:
            return ()
        most = min(most, self._copied.length)
        # Where the two places overlap, the text repeats itself; it may go on so.
        return tuple(islice(cycle(tokens[place : place + most]), most))

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

    def _find(self, tokens: Sequence[int]) -> int | None:
        """Return the place of the token that followed when the newest tokens stood together last."""
        if self._failed or self._copied.pauses(len(tokens)):
            return None
        if len(tokens) * _WIDTH != len(self._known):
            self._known += array("i", tokens[len(self._known) // _WIDTH :]).tobytes()
            self._place = self._search()
        return self._place

    def _search(self) -> int | None:
        newest, end = self._known[-MATCHED * _WIDTH :], len(self._known) - _WIDTH
        while (at := self._known.rfind(newest, 0, end)) >= 0:
            place, beside = divmod(at, _WIDTH)
            if not beside:
                return place + MATCHED
            end = at + len(newest) - 1  # The bytes of two tokens that stand side by side, not a token's.
        return None
