"""Separates a raw answer in which tools may be called into text and calls.

A segment is a call if its first line is the name of an offered tool and the rest is a call in the format's
notation (`gateway.chatglm.call_readers`). Everything else is text, as described in
`gateway.chatglm.answer_text`: also a call of a tool that was not offered, and a malformed one. Nothing of an
answer is lost.

Neither text nor a call can be taken back once it was sent. So text that may still be a call is held back, and
passed on as soon as it cannot be one. The result does not depend on how the answer was cut into deltas. The
tokens of the text, if they are known, are told beside it; those of calls are not.
"""

import enum
from collections.abc import Callable, Iterable, Sequence

from gateway.chatglm.answer_text import AnswerText, by_segment
from gateway.chatglm.call_readers import CallReader, OnPart, Verdict
from gateway.chatglm.constrained_text import ConstrainedText
from gateway.chatglm.text_tokens import TextTokens, Told
from gateway.generation import TokenLogprob
from wire.meta import Segment


class _At(enum.Enum):
    """The current position within a segment."""

    NAME = enum.auto()
    """In its first line, which may be a tool's name."""
    CALL = enum.auto()
    """After a tool's name, in what may be a call."""
    TEXT = enum.auto()


class ToolText:
    """The text and the calls of one answer (one choice). Not thread-safe.

    Args:
        offered: names of the tools that may be called.
        reader: makes a reader for a call of the named tool.
        metadata: the first line of the answer, if it was part of the prompt.
        text: selects what is shown of segments that are not calls.
    """

    def __init__(
        self,
        offered: Iterable[str],
        reader: Callable[[str, OnPart], CallReader],
        *,
        metadata: str | None = None,
        text: AnswerText | ConstrainedText | None = None,
    ) -> None:
        self._offered = frozenset(offered)
        self._new_reader = reader
        self._told: list[Told] = []
        """Determined, but not returned yet."""
        self._tokens = TextTokens()
        self._text = AnswerText() if text is None else text
        self.cut = False
        """Whether the answer ended in the middle of a call that was reported; known at its end."""
        self._begin_segment()
        if metadata is not None:
            self._at = _At.TEXT
            if metadata in self._offered:
                self._begin_call(metadata)

    def push(
        self, text: str, segments: Sequence[Segment] = (), tokens: Iterable[TokenLogprob] = ()
    ) -> tuple[Told, ...]:
        """Take one delta of the raw answer, the segments that begin in it and its tokens, if they are known.

        Returns:
            What is determined now; each token after some of the text that it is of, and before any call that
            follows.

        Raises:
            ValueError: a segment begins outside `text`, or before the one ahead of it.
        """
        self._tokens.push(tokens)
        for segment, part in by_segment(text, segments):
            if segment is not None:
                self._end_segment()
                self._show(self._text.push("", (Segment(0, segment.role),)))
                self._told += self._tokens.next_segment()
                self._begin_segment()
            self._push_within_segment(part)
        return self._take()

    def finish(self) -> tuple[Told, ...]:
        """The answer is over: return what was held back, as text or call."""
        in_call = self._at is _At.CALL
        self._end_segment()
        self.cut = in_call and self._at is _At.CALL and not self._reader.whole
        self._show(self._text.finish())
        self._told += self._tokens.finish()
        return self._take()

    def _take(self) -> tuple[Told, ...]:
        told = tuple(self._told)
        self._told.clear()
        return told

    def _show(self, text: str) -> None:
        if text:
            self._told.append(text)
            self._told += self._tokens.show()

    def _begin_segment(self) -> None:
        self._at = _At.NAME
        self._held = ""
        """The whole segment, while it may be a call."""

    def _begin_call(self, name: str) -> None:
        self._at = _At.CALL
        self._reader = self._new_reader(name, self._told.append)
        self._call_over = False

    def _push_within_segment(self, text: str) -> None:
        self._tokens.read(text)
        if self._at is _At.TEXT:
            self._show(self._text.push(text))
            return
        self._held += text
        if self._at is _At.NAME:
            first, newline, text = self._held.partition("\n")
            name = first.strip()
            if not newline:
                if not any(each.startswith(name) for each in self._offered):
                    self._release()
                return
            if name not in self._offered:
                self._release()
                return
            self._begin_call(name)
        self._judge(self._reader.push(text))

    def _judge(self, verdict: Verdict) -> None:
        """Act on what is known now of a segment with a tool's name."""
        match verdict:
            case Verdict.PENDING:
                pass
            case Verdict.CALL:
                self._held = ""
                rest = self._reader.take_rest()
                if not self._call_over:
                    self._tokens.call(len(rest))
                    self._call_over = self._reader.whole
                self._show(self._text.push(rest))
            case Verdict.NO_CALL:
                self._release()

    def _end_segment(self) -> None:
        if self._at is _At.CALL:
            self._judge(self._reader.end())
        else:
            self._release()

    def _release(self) -> None:
        """Treat the segment as text: what came so far, and the rest."""
        self._at = _At.TEXT
        held, self._held = self._held, ""
        if held.strip():
            self._tokens.leave_out()
        self._show(self._text.push(held))
