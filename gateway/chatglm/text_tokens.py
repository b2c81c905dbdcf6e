"""Tells the tokens of an answer's text from those of its calls, by where each token begins.

The log-probabilities of an answer list its tokens, and the answer's own text says what became of them. A
token's bytes say how long it is, so both can be measured: a segment's text is what its tokens' bytes decode
to. It differs in two places only. A space that a segment begins with may be missing, so both are measured
from the first character that is none. And at the very end, text may be cut off at a stop string.

A role token has no bytes and opens the next segment. Tokens come with their text or before it.
"""

import codecs
import enum
from collections import deque
from collections.abc import Iterable, Iterator

from gateway.generation import TokenLogprob
from gateway.pieces import CallPart, Piece, joined_pieces

Told = Piece | TokenLogprob
"""Part of an answer: a piece, or a token of its text."""

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class _Whose(enum.Enum):
    """What is known of a segment, or of what follows a call in it."""

    UNKNOWN = enum.auto()
    """Nothing of it was shown or reported yet."""
    TEXT = enum.auto()
    CALL = enum.auto()


class _Length:
    """Characters of a segment so far, without the spaces that it begins with."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, text: str) -> None:
        self.value += len(text if self.value else text.lstrip(" "))


class TextTokens:
    """The tokens of one answer (one choice). Not thread-safe.

    Tokens whose characters are neither shown as text nor reported as a call, such as those of a blank line,
    belong to what comes next; at the end of the answer, to what came last. If nothing did, they are text.
    """

    def __init__(self) -> None:
        self._coming: deque[TokenLogprob] = deque()
        """Those that begin after everything that was decided."""
        self._undecided: list[TokenLogprob] = []
        self._last = _Whose.TEXT
        self._begin_segment()

    def push(self, tokens: Iterable[TokenLogprob]) -> None:
        """Take the next tokens."""
        self._coming.extend(tokens)

    def read(self, text: str) -> None:
        """Take more of the segment's raw text."""
        self._read.add(text)

    def show(self) -> list[TokenLogprob]:
        """All that was read and is not a call's is text, some of which was shown: return its new tokens."""
        self._whose = self._last = _Whose.TEXT
        self._reach(self._read.value)
        return self._take()

    def call(self, rest: int = 0) -> None:
        """All that was read but `rest` characters is a call's."""
        self._whose = self._last = _Whose.CALL
        self._reach(self._read.value - rest)
        self._undecided.clear()

    def leave_out(self) -> None:
        """What was read is not shown unless `show` says so: it is the beginning of a call."""
        self._last = _Whose.CALL

    def next_segment(self) -> list[TokenLogprob]:
        """A role token opens the next segment: return the tokens of the text before it."""
        while self._coming and (self._coming[0].utf8 or self._next_begins() < self._read.value):
            self._advance()
        whose = self._whose
        self._begin_segment()
        if whose is _Whose.UNKNOWN:
            return []
        taken = self._take()
        return taken if whose is _Whose.TEXT else []

    def finish(self) -> list[TokenLogprob]:
        """The answer is over: return the tokens of its text that were not returned before."""
        self._undecided += self._coming
        self._coming.clear()
        taken = self._take()
        return taken if self._last is _Whose.TEXT else []

    def _begin_segment(self) -> None:
        self._whose = _Whose.UNKNOWN
        self._read = _Length()
        self._place = _Length()
        """Of the text of the tokens so far, but for a character that is not complete."""
        # Each byte that is not part of a character is one, as it is in the text.
        self._utf8 = _new_utf8_decoder("surrogateescape")

    def _reach(self, end: int) -> None:
        while self._coming and self._next_begins() < end:
            self._advance()

    def _next_begins(self) -> int:
        """Return where the first of the coming tokens begins; within a character, where that does."""
        if not self._coming[0].utf8:  # It is not text, and ends a character, complete or not.
            self._place.add(self._utf8.decode(b"", final=True))
        return self._place.value

    def _advance(self) -> None:
        token = self._coming.popleft()
        self._place.add(self._utf8.decode(token.utf8))
        self._undecided.append(token)

    def _take(self) -> list[TokenLogprob]:
        taken, self._undecided = self._undecided, []
        return taken


def pieces_of(told: Iterable[Told]) -> tuple[Piece, ...]:
    """Return the pieces alone, as few as possible."""
    return joined_pieces(each for each in told if not isinstance(each, TokenLogprob))


def in_runs(told: Iterable[Told]) -> Iterator[tuple[tuple[Piece, ...], tuple[TokenLogprob, ...]]]:
    """Divide part of an answer so that in each run the calls come last: yield its pieces and its tokens.

    The tokens of a run are therefore those of one text, which the calls follow. There is at least one run.
    """
    run: list[Told] = []
    for each in told:
        if run and isinstance(run[-1], CallPart) and not isinstance(each, CallPart):
            yield pieces_of(run), _tokens_of(run)
            run = []
        run.append(each)
    yield pieces_of(run), _tokens_of(run)


def _tokens_of(told: Iterable[Told]) -> tuple[TokenLogprob, ...]:
    return tuple(each for each in told if isinstance(each, TokenLogprob))
