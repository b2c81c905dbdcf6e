r"""How each chat format writes a tool call: the content of the turn whose metadata is the tool's name.

ChatGLM3 writes a fenced block with `tool_call(city='北京', days=3)`, evaluated by `process_response` in its
published `modeling_chatglm.py`. GLM-4 writes the arguments as a JSON object. Here nothing is evaluated.
"""

import ast
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import msgspec

from wire.decoding import decode_bounded

FENCE: Final = "```"
OPENING: Final = FENCE + "python\ntool_call("
"""The text with which every call of ChatGLM3 begins."""

MAX_LENGTH: Final = 2**15
"""Longest call that is parsed, in characters: about as many as a context of 8,192 tokens can hold."""
MAX_DEPTH: Final = 64
"""Deepest nesting of brackets that is parsed."""

_FENCED = re.compile(r"\s*```[^\n]*\n(.*?)\n?```\s*", re.DOTALL)

_WORD = r"[A-Za-z_\x80-\U0010ffff][\w\x80-\U0010ffff]*"
_TOKEN = re.compile(
    rf"""(?P<string> '{{3}}(?:[^\\]|\\.)*?'{{3}} | "{{3}}(?:[^\\]|\\.)*?"{{3}}
                   | "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' )
    | (?P<open> [\[({{] )
    | (?P<close> [\])}}] )
    | (?P<parameter> {_WORD} (?=\s*=) )
    | {_WORD} (?! [\w\x80-\U0010ffff'"] )
    | [-+]?\.?[0-9][0-9A-Za-z_.]*(?:(?<=[eE])[-+][0-9]+)?
    | [\s,:=*]+""",
    re.VERBOSE | re.DOTALL,
)
"""The tokens of literals and parameter names. Strings have no prefix, so that escapes always mean the
same."""

_ESCAPE = re.compile(r"\\([0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = frozenset("\\'\"abfnrtvxuUN\n")

_MARK = "_"
"""Prepended to each parameter's name for parsing, because some names, such as `from`, are Python keywords."""


def read_fenced(content: str) -> dict[str, Any] | None:
    """Return the arguments of ChatGLM3's call in `content`, with or without its fence; None if it is no call.

    They can only be Python literals. They are parsed, never evaluated, and only after their size, their
    nesting and everything outside strings have been checked, so that hostile input cannot exhaust the stack.
    Every value can be written as JSON; tuples become arrays.
    """
    fenced = _FENCED.fullmatch(content)
    source = (fenced[1] if fenced else content).strip()
    marked = _mark_parameters(source) if len(source) <= MAX_LENGTH else None
    if marked is None:
        return None
    try:
        call = ast.parse(marked, mode="eval").body
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "tool_call" or call.args:
            return None
        arguments = _arguments(call)
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        # ValueError: not a literal, NaN, a number of thousands of digits, half of a surrogate pair.
        return None
    return arguments


def write_fenced(arguments: Mapping[str, Any]) -> str:
    """Return the fenced block that calls a tool with `arguments`, which are JSON values."""
    return f"{OPENING}{', '.join(_written(name, value) for name, value in arguments.items())})\n{FENCE}"


def is_parameter(name: str) -> bool:
    """Return whether ChatGLM3 writes `name=value`. Python normalises identifiers, which changes others."""
    return name.isidentifier() and unicodedata.normalize("NFKC", name) == name


_json_arguments = msgspec.json.Decoder(dict[str, Any])


def read_json(content: str) -> dict[str, Any] | None:
    """Return the arguments of GLM-4's call in `content`; None if it is no call."""
    try:
        arguments = decode_bounded(_json_arguments, content.encode())
        json.dumps(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    return arguments


def write_json(arguments: Mapping[str, Any]) -> str:
    """Return `arguments`, which are JSON values, as a JSON object."""
    return json.dumps(dict(arguments), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class CallNotation:
    """How one format writes a call's arguments."""

    write: Callable[[Mapping[str, Any]], str]
    """Returns the content of a call with these arguments, which are JSON values."""
    read: Callable[[str], dict[str, Any] | None]
    """Returns the arguments of a call as JSON values; None: the content is no call."""


NOTATIONS: Final[Mapping[str, CallNotation]] = MappingProxyType(
    {"chatglm3": CallNotation(write_fenced, read_fenced), "glm4": CallNotation(write_json, read_json)}
)
"""The notation of each chat format that has tools."""


def _mark_parameters(source: str) -> str | None:
    """Return `source` with marked parameters; None if it holds more than literals or nests too deeply."""
    parts = []
    depth = position = 0
    while position < len(source):
        token = _TOKEN.match(source, position)
        if token is None:
            return None
        position = token.end()
        text = token[0]
        if token["string"]:
            text = _ESCAPE.sub(_escape, text)
        elif token["open"]:
            depth += 1
            if depth > MAX_DEPTH:
                return None
        elif token["close"]:
            depth -= 1
        elif token["parameter"]:
            text = _MARK + text
        parts.append(text)
    return "".join(parts)


def _escape(found: re.Match[str]) -> str:
    r"""Rewrite an escape that Python warns of: an unknown one (`'\d'`), or an octal over 0o377."""
    after = found[1]
    if after[0] in "01234567":
        return rf"\u{int(after, 8):04x}"
    return found[0] if after in _ESCAPES else "\\" + found[0]


def _arguments(call: ast.Call) -> dict[str, Any]:
    """Return the values by name; `**{...}` holds those whose names are not identifiers.

    Raises:
        ValueError: something is not a literal, or a name occurs twice.
    """
    arguments: dict[str, Any] = {}
    for word in call.keywords:
        value = ast.literal_eval(word.value)
        if word.arg is not None:
            found = {word.arg.removeprefix(_MARK): value}
        elif isinstance(value, dict) and all(isinstance(name, str) for name in value):
            found = value
        else:
            raise ValueError("only names and their values can be unpacked")
        if found.keys() & arguments.keys():
            raise ValueError("a name twice")
        arguments.update(found)
    return arguments


def _written(name: str, value: Any) -> str:
    return f"{name}={value!r}" if is_parameter(name) else f"**{ {name: value}!r}"
