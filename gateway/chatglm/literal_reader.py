"""ChatGLM3's fenced call, reported as it is written: for calls whose form a grammar enforces.

The grammar (`wire.grammar.ToolCalls`) guarantees that everything after the opening is literals. So they can
be rewritten as JSON piece by piece, and only an incomplete piece has to be held back. A call that is cut
short has the arguments up to there, complete or not.
"""

import re

from gateway.chatglm.call_readers import OnPart, Verdict
from gateway.pieces import CallPart
from wire.fenced_calls import OPENING

_PIECE = re.compile(
    r"""(?P<space> \s+ )
    | (?P<word> [^\W\d]\w* (?=[^\w]) )
    | (?P<number> [-+.0-9][-+.0-9eE]* (?=[^-+.0-9eE]) )
    | (?P<stars> \*\*\{ )
    | (?P<mark> [=,:(\[{)\]}'"] )""",
    re.VERBOSE,
)
_IN_STRING = re.compile(r"""(?P<text> [^'"\\]+ ) | (?P<escape> \\. ) | (?P<quote> ['"] )""", re.VERBOSE)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_MARKS = {",": ", ", ":": ": ", "=": ""}
_UNPACKED = "}*"
"""Closes a dictionary whose entries are arguments; its brackets are not part of them."""


class LiteralCallReader:
    """A `CallReader` of one segment's text after the line with the tool's name."""

    def __init__(self, name: str, on_part: OnPart) -> None:
        self._name = name
        self._on_part = on_part
        self._unread = ""
        self._opened = False
        self._quote = ""
        """The quote of the string that is being read."""
        self._open: list[str] = [")"]
        """The closing brackets still to come; none: the call is over."""

    @property
    def whole(self) -> bool:
        """See `CallReader.whole`."""
        return not self._open

    def push(self, text: str) -> Verdict:
        """See `CallReader.push`."""
        self._unread += text
        if not self._opened:
            begun = self._unread.lstrip()
            if not begun.startswith(OPENING):
                return Verdict.PENDING if OPENING.startswith(begun) else Verdict.NO_CALL
            self._opened = True
            self._unread = begun.removeprefix(OPENING)
            self._on_part(CallPart(self._name, "{"))
        if written := self._rewritten():
            self._on_part(CallPart(None, written))
        return Verdict.CALL

    def end(self) -> Verdict:
        """See `CallReader.end`."""
        return Verdict.CALL if self._opened else Verdict.NO_CALL

    def take_rest(self) -> str:
        """See `CallReader.take_rest`: only the closing fence follows the call."""
        return ""

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
            case "word":
                return _WORDS.get(piece) or f'"{piece}": '
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
