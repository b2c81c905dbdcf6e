"""Guesses at a sequence's next tokens, made from its own: answers often repeat what was written before.

Many guesses cost one step if they are right, since a step takes about as long for a few rows more
(Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", 2023). Here they
come from no second model but from the last place where the newest tokens stood already ("prompt lookup
decoding", Saxena, 2023). The engine draws at each guess's place as it would without guesses, and keeps the
guesses that it would have drawn: random numbers are keyed by position, so the tokens are the same.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

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
    """Right guesses for each decoding sequence that are worth a wait for the tokens in flight. Meanwhile the
    device idles; where nothing is in flight when a step is scheduled, there is nothing to wait for."""


class Drafter:
    """Makes the guesses for one sequence, and more or fewer of them as they turn out right or wrong.

    The known tokens are searched as bytes, which takes microseconds for thousands of tokens; an index of
    them would take more time to keep than that, and a hundred times the memory.
    """

    def __init__(self) -> None:
        self._known = bytearray()
        self._length = 2
        self._right = 1.0
        """How many of the next guesses will be right, going by the last ones."""
        self._pause = 0
        """Tokens for which nothing is guessed after the next wrong guess."""
        self._resumes_at = 0
        self._place: int | None = None
        self._expecting = False

    def expects(self, tokens: Sequence[int], *, waited: bool = False) -> float:
        """Return how many guesses at what follows `tokens` would be right; 0: there is nothing to go by.

        `tokens`: the known ones; another may be in flight. `waited`: one was, and the last answer was
        believed; if there is nothing to go by now, that was as bad as a wrong guess.
        """
        expecting = self._find(tokens) is not None
        if waited and self._expecting and not expecting:
            self.learn(1, 0, len(tokens))
        self._expecting = expecting
        return max(self._right, _HOPED) if expecting else 0.0

    def draft(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Return up to `most` guesses at what follows `tokens`, all of the sequence's known tokens."""
        place = self._find(tokens)
        if place is None:
            return ()
        most = min(most, self._length)
        # Where the two places overlap, the text repeats itself; it may go on so.
        return tuple(islice(cycle(tokens[place : place + most]), most))

    def learn(self, guessed: int, right: int, length: int) -> None:
        """Note how many of the last guesses were right; `length`: how many tokens are known now."""
        self._length = min(2 * self._length, _LONGEST) if right == guessed else right + 1
        self._right = (self._right + right) / 2
        if right:
            self._pause = 0
        else:
            self._pause = min(2 * self._pause + 1, _LONGEST_PAUSE)
            self._resumes_at = length + self._pause

    def _find(self, tokens: Sequence[int]) -> int | None:
        """Return the place of the token that followed when the newest tokens stood together last."""
        if len(tokens) < self._resumes_at:
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
