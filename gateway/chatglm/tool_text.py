"""A raw ChatGLM3 answer in which tools may be called: text to show, and calls.

A segment whose first line is the name of a tool that was offered is a call of it if the rest is a fenced
`tool_call(...)` of literals (`wire.calls`). Whatever else there is, is text and read as `wire.answer` says:
also a call of a tool that was not offered, one that is cut short, and one that is not well formed. Nothing of
an answer is lost.

Text cannot be taken back once it is shown, nor can a call. So what may yet be a call is held back until its
segment ends, and as soon as it can be none it is passed on. What is shown does not depend on how the answer
was cut into deltas.
"""

import enum
import json
from collections.abc import Callable, Iterable, Sequence

from gateway.generation import Call
from wire.answer import AnswerText
from wire.calls import OPENING, read_call
from wire.meta import Segment


class _At(enum.Enum):
    """How far a segment was read."""

    NAME = enum.auto()
    """In its first line, which may be a tool's name."""
    OPENING = enum.auto()
    """After a name, where a call begins."""
    CALL = enum.auto()
    TEXT = enum.auto()


class ToolText:
    """The text and the calls of one answer (one choice). Not thread-safe.

    Args:
        offered: names of the tools that may be called.
        on_call: told of each call, in order, within the `push` or `finish` that completed it.
        metadata: the first line of the answer, where it was part of the prompt.
    """

    def __init__(
        self, offered: Iterable[str], on_call: Callable[[Call], None], *, metadata: str | None = None
    ) -> None:
        self._offered = frozenset(offered)
        self._on_call = on_call
        self._text = AnswerText()
        self._begin_segment()
        if metadata is not None:
            self._name = metadata
            self._at = _At.OPENING if metadata in self._offered else _At.TEXT

    def push(self, text: str, segments: Sequence[Segment] = ()) -> str:
        """Take one delta of the raw answer and the segments that begin in it; return what may be shown.

        Raises:
            ValueError: a segment begins outside `text`, or before the one ahead of it.
        """
        if self._at is _At.TEXT and not segments:
            return self._text.push(text)
        shown = []
        start = 0
        for segment in segments:
            if not start <= segment.at <= len(text):
                raise ValueError("a segment begins outside the text")
            shown.append(self._push_within_segment(text[start : segment.at]))
            shown.append(self._end_segment())
            shown.append(self._text.push("", (Segment(0, segment.role),)))
            self._begin_segment()
            start = segment.at
        shown.append(self._push_within_segment(text[start:]))
        return "".join(shown)

    def finish(self) -> str:
        """Return what was held back and turned out to be text; the answer is over."""
        return self._end_segment() + self._text.finish()

    def _begin_segment(self) -> None:
        self._at = _At.NAME
        self._name = ""
        self._held: list[str] = []
        """All of the segment, while it may be a call."""
        self._beginning = ""
        """Of the part that is being read: the name, or the call's opening."""

    def _push_within_segment(self, text: str) -> str:
        if self._at is _At.TEXT:
            return self._text.push(text)
        self._held.append(text)
        if self._at is _At.CALL:
            return ""
        self._beginning += text
        if self._at is _At.NAME:
            name, newline, rest = self._beginning.partition("\n")
            self._name = name.strip()
            if not newline:
                may_be_one = any(each.startswith(self._name) for each in self._offered)
                return "" if may_be_one else self._release()
            if self._name not in self._offered:
                return self._release()
            self._at, self._beginning = _At.OPENING, rest
        begun = self._beginning.lstrip()
        if begun.startswith(OPENING):
            self._at = _At.CALL
        elif not OPENING.startswith(begun):
            return self._release()
        return ""

    def _end_segment(self) -> str:
        if self._at is not _At.CALL:
            return self._release()
        content = "".join(self._held)
        arguments = read_call(content[content.index(OPENING) :])
        if arguments is None:
            return self._release()
        self._on_call(Call(self._name, json.dumps(arguments, ensure_ascii=False)))
        self._held = []
        return ""

    def _release(self) -> str:
        """Return the segment so far as text, which it is from here."""
        self._at = _At.TEXT
        held, self._held = "".join(self._held), []
        return self._text.push(held)
