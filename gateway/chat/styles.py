"""How model families other than ChatGLM write tool calls.

| style | written as |
| --- | --- |
| hermes (Qwen 2.5 and 3, Hermes) | `<tool_call>{"name": N, "arguments": {...}}</tool_call>`, one or several |
| qwen3coder (Qwen3-Coder) | `<tool_call><function=N><parameter=K>V</parameter>...</function></tool_call>` |
| glm45 (GLM-4.5) | `<tool_call>N<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>` |
| mistral | `[TOOL_CALLS][{"name": N, "arguments": {...}}, ...]`, or `[TOOL_CALLS]N[CALL_ID]I[ARGS]{...}` |
| llama3 (Llama 3.1 and later) | `{"name": N, "parameters": {...}}`, perhaps after `<|python_tag|>` |
| deepseek (V3, R1) | a block of calls, each a name behind its type, then the arguments, fenced |
| deepseek (V3.1) | a block of calls, each a name, a separator and the arguments |
| glm4 (GLM-4, GLM-4-0414) | the name on a line, then the arguments as an object |

DeepSeek's marks, as vLLM's `deepseek_v3` and `deepseek_v31` read them:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>N
    ```json
    {...}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>N<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

A call whose name comes first is read as it is written, its arguments unchanged. Others are read whole. Where
values are not JSON, the tool's schema says which are strings; of others, what reads as JSON is that, and so
are Python's words, which Qwen3-Coder's template writes. That model often leaves out `<tool_call>`, which then
is not missed, and sometimes `</function>`. Mistral's marks within a call may be missing: vLLM's tokenizer for
these models leaves them out. Between hermes's marks there may be several objects, or a list of them.
"""

import enum
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Protocol

import msgspec

from gateway.chat.calls import WORDS, JsonEnd
from gateway.core.events import CallPart
from wire.calls import read_json

_CALL: Final = "<tool_call>"
_CALLED: Final = "</tool_call>"
_CALLS: Final = "[TOOL_CALLS]"
_PYTHON: Final = "<|python_tag|>"
_BLOCK: Final = "<｜tool▁calls▁begin｜>"
_BLOCK_END: Final = "<｜tool▁calls▁end｜>"
_BEGIN: Final = "<｜tool▁call▁begin｜>"
_END: Final = "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_FENCE: Final = "```"
_NAME: Final = re.compile(r"[\w-]{0,128}", re.ASCII)
"""Of a tool, as far as it came."""


class Wrapping(enum.Enum):
    """What stands around a call's arguments."""

    NONE = enum.auto()
    OBJECT = enum.auto()
    """An object with the name and the arguments."""
    ENDED = enum.auto()
    """Such an object, which has ended."""


class Arguments(Protocol):
    """Reads a call's arguments, piece by piece."""

    complete: bool
    """Whether they came to their end."""
    broken: bool
    """Whether what came is none of theirs, before their end."""

    def take(self, text: str, *, over: bool) -> tuple[str, str]:
        """Take more; return the arguments in it, as JSON, and what of `text` was not read: to be given again.

        What may be the beginning of a mark is not read. `over`: no more comes, and the JSON may break off.
        """
        ...


class ObjectArguments:
    """Arguments as a JSON object, as `JsonEnd` writes them. A mark within a string is part of them.

    Args:
        mark: what they end at, complete or not.
    """

    def __init__(self, mark: str, _strings: Mapping[str, bool]) -> None:
        self._mark = mark
        self._end = JsonEnd()
        self.complete = self.broken = False

    def take(self, text: str, *, over: bool) -> tuple[str, str]:  # noqa: D102 - inherited
        written, read = "", 0
        while True:
            place = text.find(self._mark, read) if self._mark else -1
            begun = 0 if place >= 0 or over else possible_beginning(text, self._mark)
            stop = len(text) - begun if place < 0 else place
            more, end = self._end.take(text[read:stop])
            written += more
            if end is not None:
                self.complete = True
                return written, text[read + end :]
            if place < 0:
                return written, text[stop:]
            if not self._end.in_string:
                self.broken = True
                return written, text[place:]
            written += self._mark
            read = place + len(self._mark)


class PairArguments:
    """Arguments as pairs of marked keys and values, each read whole, up to the mark behind them.

    Args:
        strings: keys whose values are strings, whatever else they read as, and whether null is one, too.
    """

    pair: ClassVar[re.Pattern[str]]
    closing: ClassVar[str]
    """The mark behind a value. It is looked for first: a file's text, say, comes in thousands of pieces."""
    end: ClassVar[str]
    """The mark behind them, unless the call's own stands there."""

    def __init__(self, mark: str, strings: Mapping[str, bool]) -> None:
        self._mark = mark
        self._strings = strings
        self._pairs: int | None = None
        """So many were read; None: the object was not opened yet."""
        self.complete = self.broken = False

    def take(self, text: str, *, over: bool) -> tuple[str, str]:  # noqa: D102 - inherited
        written = "{" if self._pairs is None else ""
        self._pairs = self._pairs or 0
        while self.closing in text and (pair := self.pair.match(text)) is not None:
            key, value = pair[1].strip(), pair[2]
            is_text = key in self._strings and not (self._strings[key] and value in _NULL)
            pieces = (key, value if is_text else _value(value))
            shown = ": ".join(json.dumps(piece, ensure_ascii=False) for piece in pieces)
            written += f"{', ' if self._pairs else ''}{shown}"
            self._pairs += 1
            text = text[pair.end() :]
        said = text.lstrip()
        if said.startswith((self._mark, self.end)):
            self.complete = True
            return written + "}", said if said.startswith(self._mark) else said.removeprefix(self.end)
        self.broken = not (self.may_be_pair(said) or self._mark.startswith(said) or self.end.startswith(said))
        if self.broken or not over:
            return written, text
        text = text[: len(text) - possible_beginning(text, self.closing)] + self.closing
        if (pair := self.pair.match(text)) is not None:  # its value breaks off
            key, value = (json.dumps(each, ensure_ascii=False) for each in (pair[1].strip(), pair[2]))
            written += f"{', ' if self._pairs else ''}{key}: {value[:-1]}"
        return written, ""

    @staticmethod
    def may_be_pair(text: str) -> bool:
        """Whether `text` begins like a pair whose end is still to come."""
        raise NotImplementedError


_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="


class TaggedArguments(PairArguments):
    """As Qwen3-Coder writes them."""

    pair = re.compile(r"\s*<parameter=([^<>]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
    closing = "</parameter>"
    end = _FUNCTION_END

    @staticmethod
    def may_be_pair(text: str) -> bool:  # noqa: D102 - inherited
        return text.startswith(_PARAMETER) or _PARAMETER.startswith(text)


_KEY: Final = "<arg_key>"
_KEYED: Final = "</arg_key>"
_VALUE: Final = "<arg_value>"


class KeyedArguments(PairArguments):
    """As GLM-4.5 writes them."""

    pair = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
    closing = "</arg_value>"
    end = _CALLED

    @staticmethod
    def may_be_pair(text: str) -> bool:  # noqa: D102 - inherited
        if not text.startswith(_KEY):
            return _KEY.startswith(text)
        key, at = text[len(_KEY) :], text.find("<", len(_KEY))
        if at < 0:
            return True
        rest = key[at - len(_KEY) :]
        if not rest.startswith(_KEYED):
            return _KEYED.startswith(rest)
        rest = rest.removeprefix(_KEYED).lstrip()
        return rest.startswith(_VALUE) or _VALUE.startswith(rest)


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a call, up to where its arguments begin."""

    name: str
    at: int | None = None
    """Where they begin; None: not yet."""
    wrapping: Wrapping = Wrapping.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStyle:
    """How a family writes calls."""

    name: str
    openings: tuple[str, ...]
    """The marks before calls, one of which is there; none: an answer may begin with one."""
    closing: str
    """The mark behind a call, which the answer's end may replace; empty: only that."""
    fence: str = ""
    """What may stand between the arguments and that mark."""
    ending: str = ""
    """The mark that may stand behind the last of several calls."""
    heads: tuple[re.Pattern[str], ...]
    """How a call begins, one way or another: with its name and, perhaps, the beginning of its arguments."""
    begins: Callable[[str], bool]
    """Whether what came so far, without white space before it, may still be a call."""
    read: Callable[[str], list[CallPart] | None] = lambda _: None
    """Reads what stands between the marks, where `head` found no arguments; None: it is no call."""
    arguments: Callable[[str, Mapping[str, bool]], Arguments] = ObjectArguments
    """Makes a reader of arguments that end at the given mark, given which are strings (`PairArguments`)."""
    unmarked: bool = False
    """An answer may begin with a call without a mark."""
    enforced: tuple[str, str] | None = None
    """The marks within which a grammar can enforce `{"name": N, "arguments": {...}}`; None: it cannot."""
    list_mark: str = ""
    """The mark behind which a grammar can enforce a list of `{"name": N, "arguments": {...}}`."""
    named_mark: str = ""
    """That between a name and arguments, where the template writes no list."""
    bare: Literal["object", "line"] | None = None
    """How an answer begins that a grammar can hold to calls: see `ToolCalls.bare`. None: it cannot."""
    separators: str = ""
    """What may stand behind a call's object: another call follows, but for `]`."""

    def head(self, text: str) -> Head | None:
        """Read a call's beginning; None: no name came yet, or not where it is expected."""
        for form in self.heads:
            if (found := form.match(text)) is not None:
                wrapping = Wrapping.OBJECT if form is _OBJECT_HEAD else Wrapping.NONE
                return Head(found[1], found.start(2) if found[2] else None, wrapping)
        return None


def possible_beginning(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `mark`."""
    at = text.find(mark[:1], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[:1], at + 1)
    return 0 if at < 0 else len(text) - at


# They are matched anew each time that more came. So what white space and names took is not given back: a call
# with thousands of blanks in it would take minutes.
_OBJECT_HEAD: Final = re.compile(
    r'\s*+\[?+\s*+\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?+"name"\s*+:\s*+"([^"\\]*+)"'
    r'(?:\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(\{))?'
)
_ARGS_HEAD: Final = re.compile(r"\s*+([^\s\[\]{}]++)\s*+(?:\[CALL_ID\]\s*+\w*+\s*+)?+(?:\[ARGS\]\s*+)?+(\{)")
_ARGS_BEGUN: Final = re.compile(r"[A-Za-z0-9_-]{0,128}+\s*+(?:\[CALL_ID\]\s*+\w*+\s*+)?+(?:\[ARGS\]\s*+)?+")
"""The same as far as it came, but for the end of a mark that came in part."""
_ARGS_MARKS: Final = ("[CALL_ID]", "[ARGS]")
_PAIRS_HEAD: Final = re.compile(r"\s*+([^\s<]++)\s*+(<arg_key>)[^<]*+</arg_key>\s*+<arg_value>")
_FUNCTION_HEAD: Final = re.compile(r"\s*+(?:<function=)?+([^\s<>]++)>\s*+(<parameter=|</function>)")
_LINE_HEAD: Final = re.compile(r"\s*+(\S++)\n\s*+(\{)?")

_TYPED_HEAD: Final = re.compile(
    rf"\s*+(?:{_BEGIN})?+\s*+\w++{_SEPARATOR}([^\s<{{`]++)[ \t]*+\n\s*+(?:```(?:json)?+\s*+)?+(\{{)?"
)
_SEPARATED_HEAD: Final = re.compile(
    rf"\s*+(?:{_BEGIN})?+\s*+([^\s<{{`]++){_SEPARATOR}\s*+(?:```(?:json)?+\s*+)?+(\{{)"
)


def _named(document: Any) -> CallPart | None:
    """Return the call in an object with a name and, perhaps, an object of arguments or the text of one."""
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        return None
    given = [document[key] for key in ("arguments", "parameters") if key in document]
    for arguments in given or [{}]:
        if isinstance(arguments, str) and read_json(arguments) is not None:
            return CallPart(document["name"], arguments)
        if arguments is None or isinstance(arguments, dict):
            written = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
            written.encode()  # half of a surrogate pair, which an escape may be, cannot be sent
            return CallPart(document["name"], written)
    return None


def _read_objects(text: str) -> list[CallPart] | None:
    """Read objects one after the other, with semicolons, commas or nothing between; or a list of them."""
    decoder, at, documents = json.JSONDecoder(strict=False), 0, []
    text = text.strip()
    try:
        while at < len(text):
            document, at = decoder.raw_decode(text, at)
            documents += document if isinstance(document, list) else [document]
            while at < len(text) and text[at] in ";, \n\t":
                at += 1
        calls = [call for each in documents if (call := _named(each)) is not None]
    except (ValueError, RecursionError):  # no JSON, or none that can be sent; nested too deep
        return None
    return calls if calls and len(calls) == len(documents) else None


def _read_pairs(text: str) -> list[CallPart] | None:
    """Read a call without arguments: with the first pair, `head` has found it."""
    name = text.strip()
    return [CallPart(name, "{}")] if name and not any(each.isspace() for each in name) else None


def _value(text: str) -> Any:
    """Read a value: JSON, or else a string as it stands."""
    try:
        return msgspec.json.decode(WORDS.get(text, text))
    except (msgspec.DecodeError, RecursionError):
        return text


_NULL: Final = ("null", "None")


def _begins_objects(text: str) -> bool:
    """Whether it is an object or a list of some, as far as it came."""
    return (text[1:].lstrip() if text[:1] == "[" else text)[:1] in ("", "{")


def _begins_keyed(text: str) -> bool:
    name, _, _ = text.partition("<")
    rest = text[len(name) :]
    return _NAME.fullmatch(name.rstrip()) is not None and (
        KeyedArguments.may_be_pair(rest) or _CALLED.startswith(rest)
    )


def _begins_args(text: str) -> bool:
    rest = _ARGS_BEGUN.sub("", text, count=1)
    may_be_mark = any(mark.startswith(rest) for mark in _ARGS_MARKS)
    return _begins_objects(text) or rest[:1] == "{" or may_be_mark


def _begins_object(text: str) -> bool:
    """Whether it begins, as far as it came, as a call does."""
    start = "".join(text[:_FIRST_KEY].split())
    return any(start.startswith(key) or key.startswith(start) for key in _KEYS)


_KEYS: Final = ('{"name"', '{"type":"function"', '{"id"', '{"parameters"', '{"arguments"')
_FIRST_KEY: Final = 64
"""Characters at the beginning, white space included, that tell whether it is one of them."""


def _begins_function(text: str) -> bool:
    if _FUNCTION.startswith(text):
        return True
    name, _, arguments = text.removeprefix(_FUNCTION).partition(">")
    said = arguments.lstrip()
    return _NAME.fullmatch(name) is not None and any(
        said.startswith(mark) or mark.startswith(said) for mark in (_PARAMETER, _FUNCTION_END)
    )


def _begins_line(text: str) -> bool:
    name, line, arguments = text.partition("\n")
    begun = not line or arguments.lstrip()[:1] in ("", "{")
    return begun and _NAME.fullmatch(name) is not None


def _begins_named(text: str) -> bool:
    name, _, _ = text.removeprefix(_BEGIN).lstrip().partition("<")
    return _NAME.fullmatch(name) is not None


STYLES: Final = {
    style.name: style
    for style in (
        CallStyle(
            name="hermes",
            openings=(_CALL,),
            closing=_CALLED,
            fence="]",
            begins=_begins_objects,
            heads=(_OBJECT_HEAD,),
            read=_read_objects,
            enforced=(_CALL, _CALLED),
            separators=",",
        ),
        CallStyle(
            name="glm45",
            openings=(_CALL,),
            closing=_CALLED,
            begins=_begins_keyed,
            heads=(_PAIRS_HEAD,),
            read=_read_pairs,
            arguments=KeyedArguments,
        ),
        CallStyle(
            name="qwen3coder",
            openings=(_CALL, _FUNCTION),
            closing=_CALLED,
            begins=_begins_function,
            heads=(_FUNCTION_HEAD,),
            arguments=TaggedArguments,
        ),
        CallStyle(
            name="mistral",
            openings=(_CALLS,),
            closing="",
            begins=_begins_args,
            heads=(_OBJECT_HEAD, _ARGS_HEAD),
            read=_read_objects,
            list_mark=_CALLS,
            named_mark=_ARGS_MARKS[1],
            separators=",]",
        ),
        CallStyle(
            name="llama3",
            openings=(_PYTHON,),
            closing="",
            begins=_begins_object,
            heads=(_OBJECT_HEAD,),
            read=_read_objects,
            unmarked=True,
            bare="object",
            separators=";,",
        ),
        CallStyle(
            name="deepseek",
            openings=(_BLOCK, _BEGIN),
            closing=_END,
            fence=_FENCE,
            ending=_BLOCK_END,
            begins=_begins_named,
            heads=(_TYPED_HEAD, _SEPARATED_HEAD),
        ),
        CallStyle(
            name="glm4",
            openings=(),
            closing="",
            begins=_begins_line,
            heads=(_LINE_HEAD,),
            unmarked=True,
            bare="line",
        ),
    )
}

CALL_LIST: Final = CallStyle(
    name="list",
    openings=(),
    closing="",
    begins=_begins_objects,
    heads=(_OBJECT_HEAD,),
    read=_read_objects,
    unmarked=True,
    separators=",]",
)
"""A JSON list of objects with a name and arguments: no family's own, but what a grammar can hold any model to
(`gateway.chat.call_list`)."""


def style_of(mentions: Callable[[str], bool]) -> CallStyle | None:
    """Return the style of a chat template, given its `ChatTemplate.mentions`; None: none of these."""
    for *marks, name in (
        # These write between marks of relatives, or in marks that contain theirs, what relatives do not:
        ("invoke name=", ""),  # MiniMax-M2 and M3, Step 3
        ("<tool_calls>", ""),  # Hunyuan, Apriel
        ("<seed:tool_call>", ""),
        # DeepSeek's own templates write the calls of the past, and offer no tools.
        (_SEPARATOR, "tools", "deepseek"),
        (_KEY, "glm45"),
        (_PARAMETER, "qwen3coder"),
        (_FUNCTION, ""),  # Functionary 3.1, which knows Llama's roles
        (_CALL, "hermes"),
        (_CALLS, "mistral"),
        (_PYTHON, "llama3"),
        ("ipython", "llama3"),
        ("<|observation|>", "glm4"),
    ):
        if all(mentions(mark) for mark in marks):
            return STYLES.get(name)
    return None
