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
from itertools import cycle, islice, takewhile
from typing import TypeVar

from triton_models.engine.sampling import AheadMask
from triton_models.errors import panics_are_errors

log = logging.getLogger(__name__)

T = TypeVar("T")

MATCHED = 3
"""How many tokens must have stood together before: fewer match by accident."""

WORTH_WAITING = 3
"""Tokens of a text that is known, of which the first is in flight: to wait for it and then compute the others
together takes two steps."""

_WIDTH = array("i").itemsize
_LONGEST = 64
_LONGEST_PAUSE = 64


class _Trust:
    """How many guesses of one kind are made at once: more or fewer as they turn out right or wrong."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._pause = 0
        """Tokens for which nothing is guessed after the next wrong guess."""
        self._resumes_at = 0

    def pauses(self, known: int) -> bool:
        """Whether none are made while so many tokens are known."""
        return known < self._resumes_at

    def learn(self, guessed: int, right: int, known: int) -> None:
        """Note how many of the last guesses were right."""
        self.length = min(2 * self.length, _LONGEST) if right == guessed else right + 1
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

    def __init__(self, mask: AheadMask | None = None, stop_ids: frozenset[int] = frozenset()) -> None:
        self._mask = mask
        self._stop_ids = stop_ids
        self._failed = False
        self._known = bytearray()
        self._copied, self._forced = _Trust(2), _Trust(_LONGEST)
        self._last = self._copied
        """The kind of the last guesses."""
        self._expected: _Trust | None = None
        """The kind of guesses for which the sequence waits."""

    def expects(self, tokens: Sequence[int]) -> bool:
        """Whether to wait for the token in flight, to guess what follows it: `tokens` may go on as before."""
        self._expected = None
        if len(self._forced_after(tokens)) >= WORTH_WAITING:
            self._expected = self._forced
        elif self._find(tokens) is not None:
            self._expected = self._copied
        return self._expected is not None

    def draft(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Return up to `most` guesses at what follows `tokens`, all of the sequence's known tokens.

        Its mask takes each of them after those before.
        """
        expected, self._expected = self._expected, None
        forced = self._taken(self._forced_after(tokens)[:most])
        copied = self._taken(self._copied_after(tokens, most)) if len(forced) < most else ()
        guesses, self._last = (copied, self._copied) if len(copied) > len(forced) else (forced, self._forced)
        if expected is not None and not guesses:
            expected.learn(1, 0, len(tokens))
        return guesses

    def learn(self, guessed: int, right: int, known: int) -> None:
        """Note how many of the last guesses were right; `known`: how many tokens are known now."""
        self._last.learn(guessed, right, known)

    def _forced_after(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the next tokens of a text that must come, if the mask knows one."""
        if self._mask is None or self._forced.pauses(len(tokens)):
            return ()
        nothing: Sequence[int] = ()
        return self._ask(self._mask.forced, nothing)[: self._forced.length]

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
        self._known += array("i", tokens[len(self._known) // _WIDTH :]).tobytes()
        newest, end = self._known[-MATCHED * _WIDTH :], len(self._known) - _WIDTH
        while (at := self._known.rfind(newest, 0, end)) >= 0:
            place, beside = divmod(at, _WIDTH)
            if not beside:
                return place + MATCHED
            end = at + len(newest) - 1  # The bytes of two tokens that stand side by side, not a token's.
        return None
