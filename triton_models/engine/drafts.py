"""Guesses at a sequence's next tokens, made from its own: answers often repeat what was written before.

Many guesses cost one step if they are right, since a step takes about as long for a few rows more
(Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", 2023). Here they
come from no second model but from the last place where the newest tokens stood already ("prompt lookup
decoding", Saxena, 2023). The engine draws at each guess's place as it would without guesses, and keeps the
guesses that it would have drawn: random numbers are keyed by position, so the tokens are the same.
"""

from array import array
from collections.abc import Sequence
from itertools import cycle, islice

MATCHED = 3
"""How many tokens must have stood together before: fewer match by accident."""

_WIDTH = array("i").itemsize
_LONGEST = 64
_LONGEST_PAUSE = 64


class Drafter:
    """Makes the guesses for one sequence, and more or fewer of them as they turn out right or wrong.

    The known tokens are searched as bytes, which takes microseconds for thousands of tokens; an index of
    them would take more time to keep than that, and a hundred times the memory.
    """

    def __init__(self) -> None:
        self._known = bytearray()
        self._length = 2
        self._pause = 0
        """Tokens for which nothing is guessed after the next wrong guess."""
        self._resumes_at = 0
        self._expecting = False

    def expects(self, tokens: Sequence[int]) -> bool:
        """Whether to wait for the token in flight, to guess what follows it: `tokens` may go on as before."""
        self._expecting = self._find(tokens) is not None
        return self._expecting

    def draft(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Return up to `most` guesses at what follows `tokens`, all of the sequence's known tokens."""
        place = self._find(tokens)
        if place is None and self._expecting:
            self.learn(1, 0, len(tokens))
        self._expecting = False
        if place is None:
            return ()
        most = min(most, self._length)
        # Where the two places overlap, the text repeats itself; it may go on so.
        return tuple(islice(cycle(tokens[place : place + most]), most))

    def learn(self, guessed: int, right: int, length: int) -> None:
        """Note how many of the last guesses were right; `length`: how many tokens are known now."""
        self._length = min(2 * self._length, _LONGEST) if right == guessed else right + 1
        if right:
            self._pause = 0
        else:
            self._pause = min(2 * self._pause + 1, _LONGEST_PAUSE)
            self._resumes_at = length + self._pause

    def _find(self, tokens: Sequence[int]) -> int | None:
        """Return the place of the token that followed when the newest tokens stood together last."""
        if len(tokens) < self._resumes_at:
            return None
        self._known += array("i", tokens[len(self._known) // _WIDTH :]).tobytes()
        newest, end = self._known[-MATCHED * _WIDTH :], len(self._known) - _WIDTH
        while (at := self._known.rfind(newest, 0, end)) >= 0:
            place, beside = divmod(at, _WIDTH)
            if not beside:
                return place + MATCHED
            end = at + len(newest) - 1  # The bytes of two tokens that stand side by side, not a token's.
        return None
