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
still be a call is held back until it cannot be one. The tokens of the text, if they are known, come beside
it; those of calls do not.
"""

import codecs
import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from gateway.chat.calls import CallReader, OnPart, Verdict
from gateway.chat.conversation import answer_metadata, call_rules, callable_names, chat_form
from gateway.core.events import CallPart, FinishReason, Piece, TokenLogprob, joined_pieces
from gateway.core.request import Conversation, Generation, Turns
from wire.meta import Segment

AnswerPart = Piece | TokenLogprob
"""Part of an answer: a piece, or a token of its text."""

_PLACEHOLDER = "[[训练时间]]"
_TRAINING_DATE = "2023年"
_SEPARATOR = "\n"

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class ChoiceReader:
    """Reads one raw choice of an answer. Not thread-safe.

    Args:
        generation: what is answered.
        chat_format: the name of the model's chat format.
    """

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

    def push_text(self, text: str) -> tuple[Piece, ...]:
        """Take one delta of text only; return what can be shown."""
        if self._tools is not None:
            return pieces_of(self._tools.push(text))
        shown = self._text.push(text)
        return (shown,) if shown else ()

    def push(
        self, text: str, segments: Sequence[Segment], tokens: Sequence[TokenLogprob]
    ) -> tuple[AnswerPart, ...]:
        """Take one delta, the segments that begin in it and its tokens; return what can be shown.

        Raises:
            ValueError: a segment begins outside `text`, before the one ahead of it, or where there are none.
        """
        if self._tools is not None:
            return self._tools.push(text, segments, tokens)
        shown = self._text.push(text, segments)
        return (shown, *tokens) if shown else tuple(tokens)

    def finish(self) -> tuple[AnswerPart, ...]:
        """Return what was held back; the choice is over."""
        if self._tools is not None:
            return self._tools.finish()
        shown = self._text.finish()
        return (shown,) if shown else ()

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
        text = (self._held + text).replace(_PLACEHOLDER, _TRAINING_DATE)
        if not self._segment_has_text:
            text = text.lstrip()
        safe = len(text) - _placeholder_begun(text)
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


def _placeholder_begun(text: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of the placeholder."""
    return next(
        (length for length in range(len(_PLACEHOLDER) - 1, 0, -1) if text.endswith(_PLACEHOLDER[:length])), 0
    )


class RawText:
    """The text of an answer that is shown exactly as the model wrote it.

    Args:
        segments: whether it may have any.
    """

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
        self._parts: list[AnswerPart] = []
        """Determined, but not returned yet."""
        self._tokens = TextTokens()
        self._text = None if constrained else AnswerText()
        self.called = False
        """Whether any call was reported."""
        self.cut = False
        """Whether the answer ended in the middle of a call that was reported; known at its end."""
        self._begin_segment()
        if metadata is not None:
            self._at = _Within.TEXT
            if metadata in self._offered:
                self._begin_call(metadata)

    def push(
        self, text: str, segments: Sequence[Segment] = (), tokens: Iterable[TokenLogprob] = ()
    ) -> tuple[AnswerPart, ...]:
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
                if self._text is not None:
                    self._show(self._text.push("", (Segment(0, segment.role),)))
                self._parts += self._tokens.next_segment()
                self._begin_segment()
            self._push_within_segment(part)
        return self._take()

    def finish(self) -> tuple[AnswerPart, ...]:
        """The answer is over: return what was held back, as text or call."""
        in_call = self._at is _Within.CALL
        self._end_segment()
        self.cut = in_call and self._at is _Within.CALL and not self._reader.complete
        if self._text is not None:
            self._show(self._text.finish())
        self._parts += self._tokens.finish()
        return self._take()

    def _take(self) -> tuple[AnswerPart, ...]:
        parts = tuple(self._parts)
        self._parts.clear()
        return parts

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self._parts += self._tokens.show()

    def _push_text(self, text: str) -> None:
        self._show(text if self._text is None else self._text.push(text))

    def _begin_segment(self) -> None:
        self._at = _Within.NAME
        self._held = ""
        """All of the segment, while it may be a call."""

    def _begin_call(self, name: str) -> None:
        self._at = _Within.CALL
        self._reader = self._new_reader(name, self._parts.append)
        self._call_over = False

    def _push_within_segment(self, text: str) -> None:
        self._tokens.read(text)
        if self._at is _Within.TEXT:
            self._push_text(text)
        if self._at in (_Within.TEXT, _Within.CUT_CALL):
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
                    self._tokens.call(len(rest))
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
        if held.strip():
            self._tokens.leave_out()
        if self._text is None and self._at is not _Within.TEXT:
            first, newline, held = held.partition("\n")
            self._at = _Within.TEXT if newline and not first.strip() else _Within.CUT_CALL
        else:
            self._at = _Within.TEXT
        if self._at is _Within.TEXT:
            self._push_text(held)


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
    """Tells the tokens of an answer's (one choice's) text from those of its calls. Not thread-safe.

    The log-probabilities of an answer list its tokens, and the answer's own text says what became of them. A
    token's bytes say how long it is, so both can be measured: a segment's text is what its tokens' bytes
    decode to. It differs in two places only. A space that a segment begins with may be missing, so both are
    measured from the first character that is none. And at the very end, text may be cut off at a stop string.
    A role token has no bytes and opens the next segment. Tokens come with their text or before it.

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


def pieces_of(parts: Iterable[AnswerPart]) -> tuple[Piece, ...]:
    """Return the pieces alone, as few as possible."""
    return joined_pieces(each for each in parts if not isinstance(each, TokenLogprob))


def in_runs(
    parts: Iterable[AnswerPart],
) -> Iterator[tuple[tuple[Piece, ...], tuple[TokenLogprob, ...]]]:
    """Divide part of an answer so that in each run the calls come last: yield its pieces and its tokens.

    The tokens of a run are therefore those of one text, which the calls follow. There is at least one run.
    """
    run: list[AnswerPart] = []
    for each in parts:
        if run and isinstance(run[-1], CallPart) and not isinstance(each, CallPart):
            yield pieces_of(run), _tokens_of(run)
            run = []
        run.append(each)
    yield pieces_of(run), _tokens_of(run)


def _tokens_of(parts: Iterable[AnswerPart]) -> tuple[TokenLogprob, ...]:
    return tuple(each for each in parts if isinstance(each, TokenLogprob))
