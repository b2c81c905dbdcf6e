"""Answers of text and calls, as grammars in the notation of each chat format (see `wire.calls`)."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from triton_models.errors import InvalidGrammarError
from triton_models.text.grammar_text import OPTIONS, json_rule, literal
from triton_models.text.literal_grammar import LiteralGrammar
from triton_models.text.literals import COMMON_RULES
from triton_models.text.schema_check import check_schema
from wire.fenced_calls import FENCE, OPENING
from wire.grammar import CallableTool, ToolCalls, decode_tool_calls

_TEXT_RULE: Final = "TEXT: /(.|\\n)*/\n"

_CLOSING: Final = f")\n{FENCE}"

_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


def _fenced(tool: CallableTool, name: str) -> tuple[str, str]:
    grammar = LiteralGrammar(tool, name)
    arguments = grammar.arguments()
    return f"{literal(OPENING)} {arguments} {literal(_CLOSING)}", "\n".join(grammar.rules) + "\n"


def _json(tool: CallableTool, _name: str) -> tuple[str, str]:
    schema: dict[str, Any] = tool.parameters or _NO_ARGUMENTS
    if schema.get("type", "object") != "object":
        raise InvalidGrammarError(f"{tool.name}: parameters.type must be object")
    schema = {"type": "object", **schema}
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    if tool.strict:
        check_schema(schema)
    return json_rule(schema, lenient=not tool.strict), ""


_NOTATIONS: Final[Mapping[str, tuple[Callable[[CallableTool, str], tuple[str, str]], str]]] = (
    MappingProxyType({"chatglm3": (_fenced, COMMON_RULES), "glm4": (_json, "")})
)
"""By chat format: what returns the body of a tool's call and the rules behind it, and the rules of all."""


def call_document(
    text: str, *, prefix: str, metadata: str | None, call_format: str | None, segment_id: int | None
) -> str:
    """Return what llguidance compiles for a grammar of kind `tool_calls`; see `grammar_document`.

    A segment is the hidden prefix, a tool's name or nothing, a newline, and a call or text. Of a call that
    begins in the prompt the name is there, and the segment goes on behind it.

    Raises:
        InvalidGrammarError: it is broken, asks for what cannot be enforced, or the format has no calls.
    """
    try:
        calls = decode_tool_calls(text)
    except msgspec.MsgspecError as error:
        raise InvalidGrammarError(f"not a rule of calls: {error}") from None
    if call_format is None or call_format not in _NOTATIONS or segment_id is None:
        raise InvalidGrammarError("calls of tools cannot be enforced: the model's format has none here")
    write, rules = _NOTATIONS[call_format]
    first = f"{literal(prefix)} " if prefix else ""
    names = [tool.name for tool in calls.tools]
    for at, tool in enumerate(calls.tools):
        body, more = write(tool, f"t{at}")
        line = f"{tool.name}\n"
        rules += f"{more}body{at}: {body}\ncall{at}: {first}{literal(line)} / ?/ body{at}\n"
    if metadata is not None and metadata not in names:
        raise InvalidGrammarError("the answer begins as the call of none of the tools")
    begun = "" if metadata is None else f"{first}body{names.index(metadata)}"
    return f"{OPTIONS}{_start(calls, begun, first, f'<[{segment_id}]>')}{_TEXT_RULE}{rules}"


def _start(calls: ToolCalls, begun: str, first: str, boundary: str) -> str:
    """Return the rules for the segments; `begun` is the rest of a call that begins in the prompt."""
    call = " | ".join(f"call{at}" for at in range(len(calls.tools)))
    more = "" if calls.single else f"({boundary} call)*"
    rules = f"call: {call}\ncalls: {begun or 'call'} {more}\n"
    if calls.required or begun:
        return f"start: calls\n{rules}"
    text = f'{first}"\\n" TEXT'
    return f"start: text | calls | text {boundary} calls\ntext: {text}\n{rules}"
