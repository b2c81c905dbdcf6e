"""Incremental reading of what follows a tool's name in an answer: a call in the format's notation, or text.

A ChatGLM3 call is only known at its end, and is reported whole. A GLM-4 call has JSON arguments from the
first character on and is reported as it is written. What was passed on cannot be taken back, so its arguments
are what the model wrote, complete or not, whatever ended the answer.
"""

import enum
import json
import re
from collections.abc import Callable
from typing import Protocol

from gateway.pieces import CallPart
from wire.fenced_calls import OPENING, read_call

OnPart = Callable[[CallPart], None]
"""Called with each part of a call, in order."""


class Verdict(enum.Enum):
    """What is known of the text after a tool's name."""

    PENDING = enum.auto()
    """It may still be a call; nothing was reported yet."""
    CALL = enum.auto()
    NO_CALL = enum.auto()


class CallReader(Protocol):
    """Reads one segment's text after the line with the tool's name."""

    @property
    def whole(self) -> bool:
        """Whether a call was reported to its end."""
        ...

    def push(self, text: str) -> Verdict:
        """Take more of it."""
        ...

    def end(self) -> Verdict:
        """Return CALL or NO_CALL: the segment is over."""
        ...

    def take_rest(self) -> str:
        """Return the text that came after the call since the last time."""
        ...


class FencedCallReader:
    """Reads ChatGLM3's fenced `tool_call(...)` (`wire.fenced_calls`), reported at its end."""

    def __init__(self, name: str, on_part: OnPart) -> None:
        self._name = name
        self._on_part = on_part
        self._content: list[str] = []
        self._beginning = ""
        self._opened = False
        self._told = False

    @property
    def whole(self) -> bool:
        """See `CallReader.whole`."""
        return self._told

    def push(self, text: str) -> Verdict:
        """See `CallReader.push`."""
        self._content.append(text)
        if not self._opened:
            self._beginning = (self._beginning + text).lstrip()
            self._opened = self._beginning.startswith(OPENING)
            if not self._opened and not OPENING.startswith(self._beginning):
                return Verdict.NO_CALL
        return Verdict.PENDING

    def end(self) -> Verdict:
        """See `CallReader.end`."""
        arguments = read_call("".join(self._content).lstrip()) if self._opened else None
        if arguments is None:
            return Verdict.NO_CALL
        self._on_part(CallPart(self._name, json.dumps(arguments, ensure_ascii=False)))
        self._told = True
        return Verdict.CALL

    def take_rest(self) -> str:
        """See `CallReader.take_rest`: the whole segment is the call."""
        return ""


_OUTSIDE_STRING = re.compile(r'["{}\[\]]')
_INSIDE_STRING = re.compile(r'["\\]')


class JsonCallReader:
    """Reads GLM-4's JSON object (`wire.json_calls`), reported from its first bracket to its last."""

    def __init__(self, name: str, on_part: OnPart) -> None:
        self._name: str | None = name
        self._on_part = on_part
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._over = False
        self._rest = ""

    @property
    def whole(self) -> bool:
        """See `CallReader.whole`."""
        return self._over

    def push(self, text: str) -> Verdict:
        """See `CallReader.push`."""
        if self._over:
            self._rest += text
            return Verdict.CALL
        if self._name is not None:
            text = text.lstrip()
            if not text.startswith("{"):
                return Verdict.NO_CALL if text else Verdict.PENDING
        end = self._end_in(text)
        self._on_part(CallPart(self._name, text[:end]))
        self._name = None
        self._rest = text[end:]
        return Verdict.CALL

    def end(self) -> Verdict:
        """See `CallReader.end`."""
        return Verdict.NO_CALL if self._name is not None else Verdict.CALL

    def take_rest(self) -> str:
        """See `CallReader.take_rest`."""
        rest, self._rest = self._rest, ""
        return rest

    def _end_in(self, text: str) -> int:
        """Return where in `text` the object ends; the length of `text` if it does not."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_INSIDE_STRING if self._in_string else _OUTSIDE_STRING).search(text, at)
            if found is None:
                break
            at = found.end()
            match found[0]:
                case "\\":
                    self._escaped = True
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth == 0:
                        self._over = True
                        return at
        return len(text)
