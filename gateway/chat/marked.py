"""Tool calls and reasoning in the text of models other than ChatGLM, where text of its own marks them.

Reasoning is what stands between `<think>` and `</think>`, or Mistral's marks; a template may have written the
first already, and the end of the answer may stand for the second. Calls are written in one of the styles of
`gateway.chat.styles`.

A call counts if its tool was offered. It is certain, and reported as it is written, once its name and the
beginning of its arguments were read. What was reported cannot be taken back: arguments that break off, or
that their closing mark interrupts, stay as the model wrote them, and what follows is text. Where values have
no quotes, one that the answer's end cuts is a string that breaks off. Everything else is text, too: nothing
of an answer is lost but marks, also one that the answer's end cuts, and white space around them. What may
still become a mark is held back, and the result does not depend on how the text was cut.
"""

import enum
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, cast

from gateway.chat.calls import JsonEnd
from gateway.chat.styles import Arguments, CallStyle, Wrapping, possible_beginning
from gateway.core.events import CallPart, FinishReason, Piece, Reasoning, joined_pieces
from wire.meta import Segment

THINK: Final = "<think>"
THOUGHT: Final = "</think>"
MARKS: Final = ((THINK, THOUGHT), ("[THINK]", "[/THINK]"))
"""Those before and behind reasoning: of most families, and of Mistral's."""

_LONGEST_REST: Final = 1024
"""Of the object around a call's arguments, in characters: its other fields, which are not used."""


class _State(enum.Enum):
    START = enum.auto()
    """Nothing but white space came since the answer began."""
    THINKING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()
    """Behind an opening mark, or in what may be a call without one."""
    ARGUMENTS = enum.auto()
    """In the arguments of a call that was reported."""
    CALLED = enum.auto()
    """Behind them."""
    OVER = enum.auto()
    """Behind the only call that the answer may have: nothing of it is read."""


_OF_CALLS: Final = frozenset({_State.CALL, _State.ARGUMENTS, _State.CALLED})


class MarkedText:
    """Reads one answer, piece by piece.

    Args:
        style: of its calls; None: it has none.
        tools: names of the tools on offer.
        single: the answer ends with its first call.
        thinks: the model may write its reasoning first.
        thinking: the prompt ended within the reasoning.
        marks: before and behind the reasoning.
        strings: by tool, its parameters that are strings (`PairArguments`).
    """

    def __init__(
        self,
        style: CallStyle | None,
        tools: Collection[str] = (),
        *,
        single: bool = False,
        thinks: bool = False,
        thinking: bool = False,
        marks: tuple[str, str] = MARKS[0],
        strings: Mapping[str, Mapping[str, bool]] = MappingProxyType({}),
    ) -> None:
        self._think_mark, self._thought_mark = marks
        self._strings = strings
        self._single = single
        self._style = style if tools else None
        self._tools = frozenset(tools)
        self._openings = self._style.openings if self._style is not None else ()
        self._first = self._openings[0][:1] if self._openings else "\0"
        """What no piece of text has that may hold a mark."""
        self._thinks = thinks or thinking
        self._thought = self._reasoned = False
        self._state = _State.THINKING if thinking else _State.START
        self._taken = 0
        self._unread = ""
        self._opened = ""
        """The mark or separator before what may be a call, as it stood in the text."""
        self._blank = ""
        """White space before a call or reasoning, which is text only if neither comes."""
        self._said_since = True
        """Whether there was text since the last call."""
        self._name: str | None = None
        """Of the call that was found, until it is reported."""
        self._arguments: Arguments | None = None
        self._ends: list[str] = []
        """The marks that may still come behind them, in their order."""
        self._wrapping = Wrapping.NONE
        self.called = False
        """Whether a call was reported."""
        self.cut = False
        """Whether the answer ended within the arguments of one; known at its end."""
        self.hidden: list[tuple[int, int]] = []
        """Where in the answer reasoning and calls are, from its beginning on, in characters."""
        self.thoughts: list[str] = []
        """The reasoning so far, for counting."""

    @property
    def over(self) -> bool:
        """Whether the answer has ended with its only call."""
        return self._state is _State.OVER

    @property
    def decided(self) -> int:
        """How many characters of the answer are known to be text or not."""
        undecided = self._opened if self._state is _State.CALL else ""
        return self._taken - len(self._unread) - len(self._blank + undecided)

    def push(self, text: str) -> list[Piece]:
        """Take more of the answer, and return what is certain now."""
        if self.over:
            return []
        self._taken += len(text)
        waits = self._state is not _State.TEXT or self._unread or self._blank
        if text and not (waits or self._first in text or text[-1].isspace()):  # the common case
            self._said_since = True
            return [text]
        more_blanks = self._state is _State.CALL and text.isspace() and self._unread[-1:].isspace()
        self._unread += text
        return [] if more_blanks else self._read(over=False)  # they tell nothing, and may be thousands

    def end(self) -> list[Piece]:
        """Return the rest: the answer is over."""
        return self._read(over=True)

    def _read(self, *, over: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            before = (self._state, self._unread)
            at = self._taken - len(self._unread)
            match self._state:
                case _State.START:
                    self._start(over=over)
                case _State.THINKING:
                    self._think(pieces, over=over)
                case _State.TEXT:
                    self._text(pieces, over=over)
                case _State.CALL:
                    at -= len(self._blank + self._opened)
                    self._call(pieces, over=over)
                case _State.ARGUMENTS:
                    self._read_arguments(pieces, over=over)
                case _State.CALLED:
                    self._close_call(over=over)
            if before == (self._state, self._unread):
                return pieces
            called = before[0] in _OF_CALLS and not self._said_since
            if called or _State.THINKING in (before[0], self._state):
                self._hide(at, self.decided)

    def _hide(self, begin: int, end: int) -> None:
        if self.hidden and self.hidden[-1][1] >= begin:
            begin = self.hidden.pop()[0]
        self.hidden.append((begin, end))

    def _start(self, *, over: bool) -> None:
        if self._thought:
            self._unread = self._unread.lstrip("\n")  # between reasoning and answer
        said = self._unread.lstrip()
        style = self._style
        if self._thinks and said.startswith(self._think_mark):
            self._unread = said.removeprefix(self._think_mark)
            self._state = _State.THINKING
        elif not over and (not said or (self._thinks and self._think_mark.startswith(said))):
            return
        elif said.startswith(self._openings):
            self._state = _State.TEXT
        elif not over and any(opening.startswith(said) for opening in self._openings):
            return
        elif style is not None and style.unmarked and said:
            self._opened = ""
            self._state = _State.CALL
        else:
            self._state = _State.TEXT

    def _think(self, pieces: list[Piece], *, over: bool) -> None:
        thought, found, rest = self._unread.partition(self._thought_mark)
        if found:
            self._state, self._unread, self._thinks, self._thought = _State.START, rest, False, True
        else:
            kept = 0 if over else possible_beginning(self._unread, self._thought_mark)
            thought, unread = _parted(self._unread, kept)
            if not (thought.strip() or self._reasoned or over):
                return
            self._unread = unread
        if thought and (thought.strip() or self._reasoned):  # white space alone is none
            self._reasoned = True
            self.thoughts.append(thought)
            pieces.append(Reasoning(thought))

    def _text(self, pieces: list[Piece], *, over: bool) -> None:
        places = [(at, opening) for opening in self._openings if (at := self._unread.find(opening)) >= 0]
        if places:
            at, self._opened = min(places)
            self._say(pieces, self._unread[:at])
            self._state, self._unread = _State.CALL, self._unread[at + len(self._opened) :]
            return
        begun = (possible_beginning(self._unread, opening) for opening in self._openings)
        kept = 0 if over else max(begun, default=0)
        text, self._unread = _parted(self._unread, kept)
        self._say(pieces, text)
        if over and self._blank:
            if self._said_since:
                pieces.append(self._blank)
            self._blank = ""

    def _call(self, pieces: list[Piece], *, over: bool) -> None:
        """Find out whether it is a call, by what stands before its closing mark."""
        style = cast("CallStyle", self._style)
        written, found, rest = (
            self._unread.partition(style.closing) if style.closing else (self._unread, "", "")
        )
        begins = style.begins(written.lstrip())
        head = style.head(written) if begins else None
        if head is not None and head.at is not None and head.name in self._tools:
            self._report()
            self._name, self._wrapping = head.name, head.wrapping
            self._arguments = style.arguments(
                style.closing or next(iter(self._openings), ""), self._strings.get(head.name, {})
            )
            self._ends = [mark for mark in (style.fence, style.closing, style.ending) if mark]
            self._unread = self._unread[head.at :]
            self._state = _State.ARGUMENTS
            return
        if head is not None and head.name not in self._tools:
            begins = False
        if begins and not (found or over):
            return
        calls = style.read(written) if begins else None
        if calls is not None and all(call.name in self._tools for call in calls):
            self._report()
            pieces.extend(calls[:1] if self._single else calls)
            self._unread = rest
            if self._single:
                self._state, self._unread = _State.OVER, ""
                return
        elif not (over and self.called and not self._said_since and not written.strip() and not found):
            self._say(pieces, self._opened)
        self._opened = ""
        self._state = _State.TEXT

    def _report(self) -> None:
        self._blank = ""
        self.called = True
        self._said_since = False

    def _read_arguments(self, pieces: list[Piece], *, over: bool) -> None:
        arguments = cast("Arguments", self._arguments)
        written, self._unread = arguments.take(self._unread, over=over)
        if arguments.complete or arguments.broken:
            self._state = _State.CALLED
            if arguments.broken:
                self._wrapping = Wrapping.NONE
            if self._single:
                self._state, self._unread = _State.OVER, ""
        elif over:
            self.cut = True
        if written:
            pieces.append(CallPart(self._name, written))
            self._name = None

    def _close_call(self, *, over: bool) -> None:
        """Take what belongs to a call behind its arguments; what does not is text, or another call."""
        style = cast("CallStyle", self._style)
        if self._wrapping is Wrapping.OBJECT:
            rest = self._rest_of_object(style.closing, over=over)
            if rest is None:
                return
            self._unread = self._unread[rest:]
            self._wrapping = Wrapping.ENDED
        said = self._unread.lstrip()
        self._opened = ""
        while self._ends:
            mark = self._ends[0]
            if said.startswith(mark):
                self._unread = said.removeprefix(mark)
                said = self._unread.lstrip()
                self._wrapping = Wrapping.NONE  # no other object follows before the next opening
            elif mark.startswith(said):
                if not over:
                    return
                self._unread = said = ""  # the answer's limit cut the mark
            self._ends.pop(0)
        ended = self._wrapping is Wrapping.ENDED
        if not (style.closing or said or over) and (ended or style.unmarked):
            return
        if ended and said and said[0] in style.separators:
            self._opened, self._unread = said[0], said[1:]
            self._state = _State.TEXT if said[0] == "]" else _State.CALL
            return
        another = style.unmarked or (ended and said[:1] == "{")
        self._state = _State.CALL if another and said else _State.TEXT

    def _rest_of_object(self, closing: str, *, over: bool) -> int | None:
        """Return how much of what is unread ends the object around the arguments; None: more must come."""
        said = self._unread.lstrip()
        blank = len(self._unread) - len(said)
        if not said:
            return 0 if over else None
        if said[0] not in "},":
            return 0
        place = said.find(closing) if closing else -1
        _, end = JsonEnd(1).take(said[: _LONGEST_REST if place < 0 else min(place, _LONGEST_REST)])
        if end is not None:
            return blank + end if _is_rest(said[:end]) else 0
        return 0 if over or place >= 0 or len(said) >= _LONGEST_REST else None

    def _say(self, pieces: list[Piece], text: str) -> None:
        """Add text; white space at its end waits, since it may only stand before a call."""
        text = self._blank + text
        said = text.rstrip() if self._style is not None else text
        self._blank = text[len(said) :]
        if said:
            pieces.append(said)
            self._said_since = True


def _is_rest(text: str) -> bool:
    """Whether an object may go on like this behind one of its fields."""
    try:
        json.loads('{"": 0' + text)
    except (ValueError, RecursionError):
        return False
    return True


def _parted(text: str, kept: int) -> tuple[str, str]:
    """Return `text` without its last `kept` characters, and those."""
    return text[: len(text) - kept], text[len(text) - kept :]


class MarkedChoice:
    """One choice of a model whose conversations a template writes, with the interface of `ChoiceReader`.

    White space before its text is dropped. Not thread-safe.
    """

    def __init__(self, marks: MarkedText) -> None:
        self._marks = marks
        self._said = False
        """Whether there was text."""
        self.thoughts, self.hidden = marks.thoughts, marks.hidden

    def push(self, text: str, segments: Sequence[Segment] = ()) -> tuple[Piece, ...]:
        """Take one delta; return what can be shown.

        Raises:
            ValueError: there are segments, which such an answer has none of.
        """
        if segments:
            raise ValueError("a segment in an answer without any")
        return joined_pieces(self._shown(self._marks.push(text)))

    def finish(self) -> tuple[Piece, ...]:
        """Return what was held back; the choice is over."""
        return joined_pieces(self._shown(self._marks.end()))

    def _shown(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if self._said or not isinstance(piece, str):
                yield piece
            elif text := piece.lstrip():
                self._said = True
                yield text

    def reason(self, reason: FinishReason | None) -> FinishReason | None:
        """Return why it ended, given why the model did; call it after `finish`.

        It ends with its only call, whatever the model wrote behind that.
        """
        called = self._marks.called and not self._marks.cut
        ended = reason == "stop" or (reason is not None and self._marks.over)
        return "tool_calls" if ended and called else reason
