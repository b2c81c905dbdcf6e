"""Tool calls as models write them: readers of what follows a tool's name in an answer, piece by piece.

A GLM-4 call has JSON arguments from the first character on and is reported as it is written. A ChatGLM3 call,
whose arguments are Python literals, is only known at its end, and is reported then; if a grammar enforces its
form (`wire.grammar.ToolCalls`), everything after the opening is literals, which are rewritten as JSON as they
come. What was passed on cannot be taken back, so the arguments are what the model wrote, complete or not,
whatever ended the answer; only the control characters that it left in strings are escaped. Literals are read,
never evaluated.
"""

import abc
import enum
import json
import re
from collections.abc import Callable

from gateway.core.events import CallPart
from wire.calls import OPENING, read_fenced

OnPart = Callable[[CallPart], None]
"""Called with each part of a call, in order."""


class Verdict(enum.Enum):
    """What is known of the text after a tool's name."""

    PENDING = enum.auto()
    """It may still be a call; nothing was reported yet."""
    CALL = enum.auto()
    NO_CALL = enum.auto()


class CallReader(abc.ABC):
    """Reads one segment's text after the line with the tool's name, and reports the call in it.

    Args:
        name: of the tool.
        on_part: the call is reported to it; the first part has the name.
    """

    def __init__(self, name: str, on_part: OnPart) -> None:
        self._name = name
        self._on_part = on_part
        self.complete = False
        """Whether a call was reported to its end."""

    @abc.abstractmethod
    def push(self, text: str) -> Verdict:
        """Take more of it."""

    @abc.abstractmethod
    def end(self) -> Verdict:
        """Return CALL or NO_CALL: the segment is over."""

    def take_rest(self) -> str:
        """Return the text that came after the call since the last time."""
        return ""


class FencedCallReader(CallReader):
    """Reads ChatGLM3's fenced `tool_call(...)` (`wire.calls`), reported at its end.

    The rest of its segment is part of it.
    """

    def __init__(self, name: str, on_part: OnPart) -> None:
        super().__init__(name, on_part)
        self._content: list[str] = []
        self._beginning = ""
        self._opened = False

    def push(self, text: str) -> Verdict:
        """Take more of it: what begins as a call may still turn out to be none at its end."""
        self._content.append(text)
        if not self._opened:
            self._beginning = (self._beginning + text).lstrip()
            self._opened = self._beginning.startswith(OPENING)
            if not self._opened and not OPENING.startswith(self._beginning):
                return Verdict.NO_CALL
        return Verdict.PENDING

    def end(self) -> Verdict:
        """Report the call, if it is one."""
        arguments = read_fenced("".join(self._content).lstrip()) if self._opened else None
        if arguments is None:
            return Verdict.NO_CALL
        self._on_part(CallPart(self._name, json.dumps(arguments, ensure_ascii=False)))
        self.complete = True
        return Verdict.CALL


_OUTSIDE_STRING = re.compile(r'["{}\[\]]')
_INSIDE_STRING = re.compile(r'["\\\x00-\x1f]')


class JsonEnd:
    """Finds where a JSON object or list ends that comes piece by piece, `depth` brackets deep already."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._escaped = False
        self.in_string = False
        """Whether it goes on within a string."""

    def take(self, text: str) -> tuple[str, int | None]:
        """Take more of it; return that, and where in `text` it ends: None if it does not.

        Control characters in strings are escaped. Models write line ends there, with which it is no JSON.
        """
        written: list[str] = []
        begun = at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_INSIDE_STRING if self.in_string else _OUTSIDE_STRING).search(text, at)
            if found is None:
                break
            at = found.end()
            match found[0]:
                case "\\":
                    self._escaped = True
                case '"':
                    self.in_string = not self.in_string
                case "{" | "[":
                    self._depth += 1
                case "}" | "]":
                    self._depth -= 1
                    if self._depth == 0:
                        return "".join((*written, text[begun:at])), at
                case control:
                    written += (text[begun : found.start()], json.dumps(control)[1:-1])
                    begun = at
        return "".join((*written, text[begun:])), None


class JsonCallReader(CallReader):
    """Reads GLM-4's JSON object (`wire.calls`), reported from its first bracket to its last."""

    def __init__(self, name: str, on_part: OnPart) -> None:
        super().__init__(name, on_part)
        self._opened = False
        self._end = JsonEnd()
        self._rest = ""

    def push(self, text: str) -> Verdict:
        """Take more of it: with the first bracket, it is a call."""
        if self.complete:
            self._rest += text
            return Verdict.CALL
        if not self._opened:
            text = text.lstrip()
            if not text.startswith("{"):
                return Verdict.NO_CALL if text else Verdict.PENDING
        written, end = self._end.take(text)
        self.complete = end is not None
        self._on_part(CallPart(None if self._opened else self._name, written))
        self._opened = True
        self._rest = "" if end is None else text[end:]
        return Verdict.CALL

    def end(self) -> Verdict:
        """Return CALL if there was a bracket: an object that is cut short is a call, too."""
        return Verdict.CALL if self._opened else Verdict.NO_CALL

    def take_rest(self) -> str:
        """Return what came behind the object since the last time."""
        rest, self._rest = self._rest, ""
        return rest


_PIECE = re.compile(
    r"""(?P<space> \s+ )
    | (?P<name> [^\W\d]\w* (?==) )
    | (?P<word> [^\W\d]\w* (?=[^\w]) )
    | (?P<number> [-+.0-9][-+.0-9eE]* (?=[^-+.0-9eE]) )
    | (?P<stars> \*\*\{ )
    | (?P<mark> [=,:(\[{)\]}'"] )""",
    re.VERBOSE,
)
_IN_STRING = re.compile(r"""(?P<text> [^'"\\]+ ) | (?P<escape> \\. ) | (?P<quote> ['"] )""", re.VERBOSE)
WORDS = {"True": "true", "False": "false", "None": "null"}
_MARKS = {",": ", ", ":": ": ", "=": ""}
_UNPACKED = "}*"
"""Closes a dictionary whose entries are arguments; its brackets are not part of them."""


class LiteralCallReader(CallReader):
    """Reads ChatGLM3's fenced call, reported as it is written: only the closing fence may follow it."""

    def __init__(self, name: str, on_part: OnPart) -> None:
        super().__init__(name, on_part)
        self._unread = ""
        self._opened = False
        self._quote = ""
        """The quote of the string that is being read."""
        self._open: list[str] = [")"]
        """The closing brackets still to come; none: the call is over."""

    def push(self, text: str) -> Verdict:
        """Take more of it: with the whole opening, it is a call."""
        self._unread += text
        if not self._opened:
            started = self._unread.lstrip()
            if not started.startswith(OPENING):
                return Verdict.PENDING if OPENING.startswith(started) else Verdict.NO_CALL
            self._opened = True
            self._unread = started.removeprefix(OPENING)
            self._on_part(CallPart(self._name, "{"))
        if written := self._rewritten():
            self._on_part(CallPart(None, written))
        self.complete = not self._open
        return Verdict.CALL

    def end(self) -> Verdict:
        """Return CALL if it was opened: a call that is cut short is one, too."""
        return Verdict.CALL if self._opened else Verdict.NO_CALL

    def _rewritten(self) -> str:
        """Take the complete pieces of the text, and return them as JSON."""
        parts = []
        at = 0
        while self._open:
            found = (_IN_STRING if self._quote else _PIECE).match(self._unread, at)
            if found is None:
                break
            at = found.end()
            parts.append(self._string_part(found) if self._quote else self._piece(found))
        self._unread = self._unread[at:]
        return "".join(parts)

    def _string_part(self, found: re.Match[str]) -> str:
        if found["text"]:
            return found[0]
        if found["escape"]:
            return "'" if found[0] == "\\'" else found[0]
        if found[0] == self._quote:
            self._quote = ""
            return '"'
        return '\\"' if found[0] == '"' else "'"

    def _piece(self, found: re.Match[str]) -> str:  # noqa: PLR0911 - one for each kind of piece
        piece = found[0]
        match found.lastgroup:
            case "space":
                return ""
            case "name":  # which may be None, True or False as well
                return f'"{piece}": '
            case "word":
                return WORDS.get(piece) or f'"{piece}": '
            case "number":
                return piece
            case "stars":
                self._open.append(_UNPACKED)
                return ""
        if piece in "'\"":
            self._quote = piece
            return '"'
        if piece in "([{":
            self._open.append({"(": ")", "[": "]", "{": "}"}[piece])
            return piece
        if piece in ")]}":
            closed = self._open.pop()
            return "}" if not self._open else "" if closed is _UNPACKED else piece
        return _MARKS[piece]
