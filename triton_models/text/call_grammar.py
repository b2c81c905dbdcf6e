"""Grammars for answers of text and tool calls, in the notation of each chat format (see `wire.calls`)."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import msgspec

from triton_models.errors import InvalidGrammarError
from triton_models.text.grammar_text import ANSWER_RULE, Document, TextRule, json_rule, literal, text_rule
from triton_models.text.literal_grammar import COMMON_RULES, LiteralGrammar
from triton_models.text.schemas import check_schema, check_size
from wire.fenced_calls import FENCE, OPENING
from wire.grammar import TEXT_PART, CallableTool, Part, ToolCalls, decode_tool_calls

_TEXT_RULE: Final = "TEXT: /(.|\\n)*/\n"

_CLOSING: Final = f")\n{FENCE}"

_PARAMETERS: Final = "parameters"

_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class _Notation:
    """How a chat format writes calls."""

    write: Callable[[CallableTool, str], tuple[str, str]]
    """Returns the body of a tool's call after the opening, and the rules that it uses."""
    opening: str = ""
    rules: str = ""
    """Rules shared by all tools."""


def _fenced(tool: CallableTool, name: str) -> tuple[str, str]:
    grammar = LiteralGrammar(tool, name)
    arguments = grammar.arguments()
    return f"{arguments} {literal(_CLOSING)}", "\n".join(grammar.rules) + "\n"


def _json(tool: CallableTool, _name: str) -> tuple[str, str]:
    schema: dict[str, Any] = tool.parameters or _NO_ARGUMENTS
    if schema.get("type", "object") != "object":
        raise InvalidGrammarError("parameters.type must be object")
    schema = {"type": "object", **schema}
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    return json_rule(schema, lenient=not tool.strict), ""


_NOTATIONS: Final[Mapping[str, _Notation]] = MappingProxyType(
    {"chatglm3": _Notation(_fenced, OPENING, COMMON_RULES), "glm4": _Notation(_json)}
)
"""The notation of each chat format that has tools."""


def call_document(
    text: str, *, prefix: str, metadata: str | None, call_format: str | None, segment_id: int | None
) -> Document:
    """Return the document to compile for a grammar of kind `tool_calls`.

    A segment consists of the hidden prefix, a tool's name or nothing, a newline, and a call or text. If the
    prompt already contains the first line of a call, the segment continues after that line.

    Raises:
        InvalidGrammarError: the grammar is broken or cannot be enforced, or the chat format has no calls.
    """
    try:
        calls = decode_tool_calls(text)
    except msgspec.MsgspecError as error:
        raise InvalidGrammarError(f"not a rule of calls: {error}") from None
    if call_format is None or call_format not in _NOTATIONS or segment_id is None:
        raise InvalidGrammarError("calls of tools cannot be enforced: the model's format has none here")
    notation = _NOTATIONS[call_format]
    rules = notation.rules
    first = f"{literal(prefix)} " if prefix else ""
    opening = f"{literal(notation.opening)} " if notation.opening else ""
    names = [tool.name for tool in calls.tools]
    sizes = Counter[str]()
    for tool in calls.tools:
        with _blaming(Part(tool.name)):
            size = check_schema(tool.parameters, _PARAMETERS, strict=tool.strict)
            check_size(size, _PARAMETERS)
        sizes += size
    check_size(sizes, "the schemas of all tools together")
    for at, tool in enumerate(calls.tools):
        with _blaming(Part(tool.name)):
            body, more = notation.write(tool, f"t{at}")
        line = f"{tool.name}\n"
        rules += f"{more}body{at}: {opening}{body}\ncall{at}: {first}{literal(line)} / ?/ body{at}\n"
    if metadata is not None and metadata not in names:
        raise InvalidGrammarError("the answer begins as the call of none of the tools")
    only_calls = calls.required or metadata is not None
    resumed = "" if metadata is None else f"{first}body{names.index(metadata)}"
    with _blaming(TEXT_PART):
        answer = TextRule("TEXT", _TEXT_RULE) if calls.text is None else text_rule(calls.text)
    start = _start(calls, resumed, f"<[{segment_id}]>", only_calls=only_calls)
    text_line = f'text: {first}"\\n" {answer.body}\n{answer.rules}'
    openings = (
        {f"{prefix}{notation.opening}": Part(metadata)}
        if resumed
        else {f"{prefix}{name}\n{notation.opening}": Part(name) for name in names}
    )
    if not only_calls and calls.text is not None:
        openings[f"{prefix}\n"] = TEXT_PART
    return Document(
        f"{start}{text_line}{rules}",
        answer.nested,
        openings,
        {f"{rule}{at}": Part(name) for at, name in enumerate(names) for rule in ("t", "body")}
        | dict.fromkeys(("text", ANSWER_RULE), TEXT_PART),
    )


@contextmanager
def _blaming(part: Part) -> Iterator[None]:
    """Make the message of a refusal within the block say that it is about `part`."""
    try:
        yield
    except InvalidGrammarError as error:
        raise InvalidGrammarError(part.blamed(str(error))) from None


def _start(calls: ToolCalls, resumed: str, boundary: str, *, only_calls: bool) -> str:
    """Return the rules for the segments; `resumed` matches the rest of a call that begins in the prompt."""
    call = " | ".join(f"call{at}" for at in range(len(calls.tools)))
    more = "" if calls.single else f"({boundary} call)*"
    rules = f"call: {call}\ncalls: {resumed or 'call'} {more}\n"
    if only_calls:
        return f"start: calls\n{rules}"
    both = "" if calls.text is not None else f" | text {boundary} calls"
    return f"start: text | calls{both}\n{rules}"
