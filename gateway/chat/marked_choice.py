"""Reads one raw choice of a model whose conversations a template writes: text, reasoning, calls, tokens."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from gateway.chat.answers import AnswerPart
from gateway.chat.marked import MarkedText
from gateway.core.events import FinishReason, Piece, TokenLogprob, joined_pieces
from wire.meta import Segment


class VisibleTokens:
    """Finds out which tokens of an answer are of its text, and not of its reasoning or calls.

    Args:
        marks: what reads the answer.
    """

    def __init__(self, marks: MarkedText) -> None:
        self._marks = marks
        self._length = 0
        """Of the answer so far, in characters."""
        self._coming: deque[tuple[int, TokenLogprob]] = deque()
        """Tokens that are not known to be text yet, and where they begin."""

    def expect(self, text: str, tokens: Sequence[TokenLogprob]) -> None:
        """Note where the tokens of more text begin; a token's text may be longer than what is new."""
        end = self._length + len(text)
        for token in tokens:
            self._coming.append((min(self._length, end), token))
            self._length += len(token.token)
        self._length = end

    def shown(self, *, over: bool) -> Iterator[TokenLogprob]:
        """Take the tokens of which it is known whose they are; yield those of text."""
        hidden = self._marks.hidden
        while self._coming and (over or self._coming[0][0] < self._marks.decided):
            at, token = self._coming.popleft()
            while hidden and hidden[0][1] <= at:
                hidden.pop(0)
            if not hidden or at < hidden[0][0]:
                yield token


class MarkedChoice:
    """One choice, with the interface of `ChoiceReader`. White space before its text is dropped.

    Not thread-safe.

    Args:
        marks: what reads the answer.
    """

    def __init__(self, marks: MarkedText) -> None:
        self._marks = marks
        self._tokens = VisibleTokens(marks)
        self._said = False
        """Whether there was text."""

    def push_text(self, text: str) -> tuple[Piece, ...]:
        """Take one delta of text only; return what can be shown."""
        self._tokens.expect(text, ())
        return joined_pieces(self._shown(self._marks.push(text)))

    def push(
        self, text: str, segments: Sequence[Segment], tokens: Sequence[TokenLogprob]
    ) -> tuple[AnswerPart, ...]:
        """Take one delta and its tokens; return what can be shown.

        Raises:
            ValueError: there are segments, which such an answer has none of.
        """
        if segments:
            raise ValueError("a segment in an answer without any")
        self._tokens.expect(text, tokens)
        return (*self._shown(self._marks.push(text)), *self._tokens.shown(over=False))

    def finish(self) -> tuple[AnswerPart, ...]:
        """Return what was held back; the choice is over."""
        return (*self._shown(self._marks.end()), *self._tokens.shown(over=True))

    def _shown(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if self._said or not isinstance(piece, str):
                yield piece
            elif text := piece.lstrip():
                self._said = True
                yield text

    def reason(self, reason: FinishReason | None) -> FinishReason | None:
        """Return why it ended, given why the model did; call it after `finish`."""
        called = self._marks.called and not self._marks.cut
        return "tool_calls" if reason == "stop" and called else reason
