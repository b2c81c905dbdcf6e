"""Turns a raw answer, piece by piece, into the text and the calls that a client sees.

Clients of OpenAI's API and legacy clients of the KServe door are shown the same text (divergences 6 and 9 in
ARCHITECTURE.md). The result never depends on how the answer was cut into deltas.

The answer consists of one or more segments; a role token opens each further segment, and the wire reports it
separately from the text. If no tools are offered, everything is text. A segment's first line, where ChatGLM3
writes a tool's name, is then usually empty; if it is not, it stays in the text, so that nothing is lost. As
in the models' own code, white space around a segment is stripped and the placeholder for the training date is
replaced (`process_response` of the published `modeling_chatglm.py`). Segments are joined by newlines; blank
ones add nothing. Text that may turn out to be trailing white space or the placeholder is held back;
everything else is passed on at once.

If tools may be called, a segment is a call if its first line is the name of an offered tool and the rest is a
call in the format's notation (`gateway.chat.calls`). Everything else is text: also a call of a tool that was
not offered, and a malformed one. Neither text nor a call can be taken back once it was sent, so text that may
still be a call is held back until it cannot be one.
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence

from gateway.chat.calls import CallReader, OnPart, Verdict
from gateway.chat.conversation import answer_metadata, call_rules, callable_names, chat_form
from gateway.chat.styles import possible_beginning
from gateway.core.events import CallPart, FinishReason, Piece, joined_pieces
from gateway.core.request import Conversation, Generation, Turns
from wire.meta import Segment

PLACEHOLDER = "[[训练时间]]"
TRAINING_DATE = "2023年"
_SEPARATOR = "\n"


class ChoiceReader:
    """Reads one raw choice of an answer to `generation`. Not thread-safe."""

    def __init__(self, generation: Generation, chat_format: str | None) -> None:
        self._text: AnswerText | RawText = AnswerText()
        self._tools: ToolText | None = None
        prompt, grammar = generation.prompt, generation.grammar
        if not isinstance(prompt, Conversation):
            self._text = RawText(segments=isinstance(prompt, Turns))
        elif grammar is not None and (prompt.offer is None or prompt.offer.choice == "none"):
            self._text = RawText()
        elif prompt.offer is not None and (form := chat_form(chat_format).tools) is not None:
            rules = call_rules(prompt.offer, grammar)
            self._tools = ToolText(
                callable_names(prompt.offer),
                form.read if rules is None else form.read_enforced,
                metadata=answer_metadata(prompt.offer),
                constrained=rules is not None and rules.text is not None,
            )

    def push(self, text: str, segments: Sequence[Segment] = ()) -> tuple[Piece, ...]:
        """Take one delta and the segments that begin in it; return what can be shown.

        Raises:
            ValueError: a segment begins outside `text`, before the one ahead of it, or where there are none.
        """
        if self._tools is not None:
            return self._tools.push(text, segments)
        shown = self._text.push(text, segments)
        return (shown,) if shown else ()

    def finish(self) -> tuple[Piece, ...]:
        """Return what was held back; the choice is over."""
        if self._tools is not None:
            return self._tools.finish()
        shown = self._text.finish()
        return (shown,) if shown else ()

    @property
    def hidden(self) -> list[tuple[int, int]]:
        """Where in the raw answer calls are, from its beginning on, in characters."""
        return [] if self._tools is None else self._tools.hidden

    def reason(self, reason: FinishReason | None) -> FinishReason | None:
        """Return why it ended, given why the model did; call it after `finish`.

        If a stop of the request's own ended it within a call, the reason is not `tool_calls`.
        """
        tools = self._tools
        called = tools is not None and tools.called and not tools.cut
        return "tool_calls" if reason == "stop" and called else reason


def by_segment(text: str, segments: Sequence[Segment]) -> Iterator[tuple[Segment | None, str]]:
    """Split one delta of a raw answer: yield each segment that begins in it with its part of `text`.

    The first item is None with the part that continues the segment that was open before; it may be empty.

    Raises:
        ValueError: a segment begins outside `text`, or before the one ahead of it.
    """
    opened: Segment | None = None
    start = 0
    for segment in segments:
        if not start <= segment.at <= len(text):
            raise ValueError("a segment begins outside the text")
        yield opened, text[start : segment.at]
        opened, start = segment, segment.at
    yield opened, text[start:]


class AnswerText:
    """The text of one answer (one choice), from its first delta to its last. Not thread-safe."""

    def __init__(self) -> None:
        self._held = ""
        self._any_text = False
        self._segment_has_text = False

    def push(self, text: str, segments: Sequence[Segment] = ()) -> str:
        """Take one delta of the raw answer and the segments that begin in it; return what may be shown.

        Raises:
            ValueError: a segment begins outside `text`, or before the one ahead of it.
        """
        if not (segments or self._held or not self._segment_has_text or "[" in text or text[-1:].isspace()):
            return text  # the common case: nothing to strip, fill in or wait for
        shown = []
        for segment, part in by_segment(text, segments):
            if segment is not None:
                shown.append(self._end_segment())
            shown.append(self._push_within_segment(part))
        return "".join(shown)

    def finish(self) -> str:
        """Return what was held back and turned out to be text; the answer is over."""
        return self._end_segment()

    def _push_within_segment(self, text: str) -> str:
        text = (self._held + text).replace(PLACEHOLDER, TRAINING_DATE)
        if not self._segment_has_text:
            text = text.lstrip()
        safe = len(text) - possible_beginning(text, PLACEHOLDER)
        if safe == len(text):
            safe = len(text.rstrip())
        self._held = text[safe:]
        return self._show(text[:safe])

    def _end_segment(self) -> str:
        shown = self._show(self._held.rstrip())
        self._held = ""
        self._segment_has_text = False
        return shown

    def _show(self, text: str) -> str:
        if not text:
            return ""
        opens_later_segment = self._any_text and not self._segment_has_text
        self._any_text = self._segment_has_text = True
        return _SEPARATOR + text if opens_later_segment else text


class RawText:
    """The text of an answer that is shown exactly as the model wrote it, and which may have `segments`."""

    def __init__(self, *, segments: bool = False) -> None:
        self._segments = segments

    def push(self, text: str, segments: Sequence[Segment] = ()) -> str:
        """Take one delta of the answer; return all of it.

        Raises:
            ValueError: a segment begins outside `text`, before the one ahead of it, or where there are none.
        """
        if segments and not self._segments:
            raise ValueError("a segment in a raw answer")
        for _ in by_segment(text, segments):
            pass
        return text

    def finish(self) -> str:
        """Return what was held back: nothing."""
        return ""


class _Within(enum.Enum):
    """The current position within a segment."""

    NAME = enum.auto()
    """In its first line, which may be a tool's name."""
    CALL = enum.auto()
    """After a tool's name, in what may be a call."""
    TEXT = enum.auto()
    CUT_CALL = enum.auto()
    """In the beginning of a call that was cut short, where the text follows a grammar."""


class ToolText:
    """The text and the calls of one answer (one choice). Not thread-safe.

    Text that follows a grammar is shown unchanged, white space included. The beginning of a call that was cut
    short is left out then: as text, it would violate the grammar.

    Args:
        offered: names of the tools that may be called.
        reader: makes a reader for a call of the named tool.
        metadata: the first line of the answer, if it was part of the prompt.
        constrained: whether the text follows a grammar.
    """

    def __init__(
        self,
        offered: Iterable[str],
        reader: Callable[[str, OnPart], CallReader],
        *,
        metadata: str | None = None,
        constrained: bool = False,
    ) -> None:
        self._offered = frozenset(offered)
        self._new_reader = reader
        self._parts: list[Piece] = []
        """Determined, but not returned yet."""
        self._taken = 0
        """How many characters came."""
        self._text = None if constrained else AnswerText()
        self.called = False
        """Whether any call was reported."""
        self.cut = False
        """Whether the answer ended in the middle of a call that was reported; known at its end."""
        self.hidden: list[tuple[int, int]] = []
        """Where in the answer calls are, from its beginning on, in characters."""
        self._begin_segment()
        if metadata is not None:
            self._at = _Within.TEXT
            if metadata in self._offered:
                self._begin_call(metadata)

    def push(self, text: str, segments: Sequence[Segment] = ()) -> tuple[Piece, ...]:
        """Take one delta of the raw answer and the segments that begin in it; return what is determined now.

        Raises:
            ValueError: a segment begins outside `text`, or before the one ahead of it.
        """
        for segment, part in by_segment(text, segments):
            if segment is not None:
                self._end_segment()
                if self._text is not None:
                    self._show(self._text.push("", (Segment(0, segment.role),)))
                self._begin_segment()
            self._push_within_segment(part)
        return self._take()

    def finish(self) -> tuple[Piece, ...]:
        """The answer is over: return what was held back, as text or call."""
        in_call = self._at is _Within.CALL
        self._end_segment()
        self.cut = in_call and self._at is _Within.CALL and not self._reader.complete
        if self._text is not None:
            self._show(self._text.finish())
        return self._take()

    def _take(self) -> tuple[Piece, ...]:
        parts = joined_pieces(self._parts)
        self._parts.clear()
        return parts

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(text)

    def _push_text(self, text: str) -> None:
        self._show(text if self._text is None else self._text.push(text))

    def _begin_segment(self) -> None:
        self._at = _Within.NAME
        self._begun_at = self._taken
        self._held = ""
        """All of the segment, while it may be a call."""

    def _begin_call(self, name: str) -> None:
        self._at = _Within.CALL
        self._reader = self._new_reader(name, self._parts.append)
        self._call_over = False

    def _push_within_segment(self, text: str) -> None:
        self._taken += len(text)
        if self._at is _Within.TEXT:
            self._push_text(text)
            return
        if self._at is _Within.CUT_CALL:
            self._hide(self._taken)
            return
        self._held += text
        if self._at is _Within.NAME:
            first, newline, text = self._held.partition("\n")
            name = first.strip()
            if not newline and any(each.startswith(name) for each in self._offered):
                return
            if not newline or name not in self._offered:
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
                self.called = True
                self._held = ""
                rest = self._reader.take_rest()
                if not self._call_over:
                    self._hide(self._taken - len(rest))
                    self._call_over = self._reader.complete
                if self._text is not None:  # A grammar has nothing behind a call.
                    self._push_text(rest)
            case Verdict.NO_CALL:
                self._release()

    def _end_segment(self) -> None:
        if self._at is _Within.CALL:
            self._judge(self._reader.end())
        else:
            self._release()

    def _release(self) -> None:
        """Treat the segment as text: what came so far, and the rest."""
        held, self._held = self._held, ""
        if self._text is None and self._at is not _Within.TEXT:
            first, newline, held = held.partition("\n")
            self._at = _Within.TEXT if newline and not first.strip() else _Within.CUT_CALL
        else:
            self._at = _Within.TEXT
        if self._at is _Within.TEXT:
            self._push_text(held)
        else:
            self._hide(self._taken)

    def _hide(self, end: int) -> None:
        """Note that the segment is a call, or the beginning of one that is left out, as far as `end`."""
        if self.hidden and self.hidden[-1][0] == self._begun_at:
            self.hidden.pop()
        self.hidden.append((self._begun_at, end))


def in_runs(pieces: Iterable[Piece]) -> Iterator[tuple[Piece, ...]]:
    """Divide pieces so that in each run the calls come last: its text is one, which the calls follow.

    There is at least one run.
    """
    run: list[Piece] = []
    for each in pieces:
        if run and isinstance(run[-1], CallPart) and not isinstance(each, CallPart):
            yield joined_pieces(run)
            run = []
        run.append(each)
    yield joined_pieces(run)
