"""Grammars for answers of text and tool calls, in the syntax of each chat format (see `wire.calls`)."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from triton_models.errors import InvalidGrammarError
from triton_models.text.grammar_text import (
    Document,
    TextRule,
    fault,
    json_rule,
    literal,
    optional,
    read,
    text_rule,
)
from triton_models.text.literal_grammar import BOUNDS, COMMON_RULES, LiteralGrammar
from triton_models.text.schemas import check_schema, check_size, reachable, rewrite, simplify, target
from wire.calls import FENCE, OPENING
from wire.grammar import TEXT_PART, CallableTool, Grammar, Part, ToolCalls, decode_tool_calls

_CLOSING: Final = f")\n{FENCE}"

_ANY_TEXT: Final = TextRule("TEXT", "TEXT: /(.|\\n)*/\n")

_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}

_BRANCHES: Final = frozenset({"$ref", "anyOf", "oneOf"})
_COMBINED: Final = frozenset({"allOf", "not", "if", "dependentSchemas", "unevaluatedProperties"})


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a chat format writes calls, after the line with the tool's name."""

    write: Callable[[CallableTool, str], tuple[str, str]]
    """Returns the body of a tool's call after the opening, and the rules that it uses. The second argument
    begins the names of these rules."""
    opening: str = ""
    rules: str = ""
    """Rules shared by all tools."""


def _fenced(tool: CallableTool, name: str) -> tuple[str, str]:
    grammar = LiteralGrammar(tool, name)
    arguments = grammar.arguments()
    return f"{arguments} {literal(_CLOSING)}", "\n".join(grammar.rules) + "\n"


def json_arguments(tool: CallableTool, _name: str) -> tuple[str, str]:
    """Return the body of a call with arguments in JSON, as `CallSyntax.write` does; it uses no rules."""
    schema: dict[str, Any] = {"type": "object", **(tool.parameters or _NO_ARGUMENTS)}
    if schema["type"] != "object":
        raise InvalidGrammarError("parameters.type must be object")
    _close(schema)
    rewrite(schema)
    if not tool.strict:
        _drop_what_fails(schema)
    return json_rule(schema, lenient=not tool.strict), ""


def _close(schema: dict[str, Any]) -> None:
    """Allow each object that names properties no others, unless it says so itself.

    Where schemas are combined, one may name what belongs to another: then this is for the whole alone.
    """
    found = [each for _, each in reachable(schema, "parameters")]
    for each in found[:1] if any(map(_combines, found)) else found:
        if "properties" in each and "additionalProperties" not in each:
            named, more = each["properties"], dict.fromkeys(each.get("required", ()), True)
            each |= {"properties": named | more | named, "additionalProperties": False}


def _combines(schema: dict[str, Any]) -> bool:
    return bool(schema.keys() & _COMBINED) or ("properties" in schema and bool(schema.keys() & _BRANCHES))


def _drop_what_fails(schema: dict[str, Any]) -> None:
    """Drop what llguidance cannot express and does not skip by itself: patterns, bounds, lost references."""
    for _, each in reachable(schema, "parameters"):
        if "$ref" in each and _leads_nowhere(schema, each["$ref"]):
            del each["$ref"]
        for keywords in (("pattern",), BOUNDS):
            found = each.keys() & {*keywords}
            if found and fault({name: each[name] for name in each.keys() & {"type", *found}}):
                for name in found:
                    del each[name]


def _leads_nowhere(schema: dict[str, Any], reference: str) -> bool:
    """Return whether it is a path to what is not in `schema`: other references llguidance may resolve."""
    try:
        target(schema, reference)
    except LookupError:
        return reference.startswith("#/")
    return False


FENCED_CALLS: Final = CallSyntax(_fenced, OPENING, COMMON_RULES)
"""A fenced block of Python literals: ChatGLM3."""

JSON_CALLS: Final = CallSyntax(json_arguments)
"""A JSON object: GLM-4."""


def call_document(
    text: str, *, prefix: str, metadata: str | None, syntax: CallSyntax, segment_id: int
) -> Document:
    """Return the document to compile for a grammar of kind `tool_calls`.

    A segment consists of the hidden prefix, a tool's name or nothing, a newline, and a call or text. If the
    prompt already contains the first line of a call, the segment continues after that line.

    Raises:
        InvalidGrammarError: the grammar is broken or cannot be enforced.
    """
    calls = read(decode_tool_calls, text, "rule of calls")
    names = [tool.name for tool in calls.tools]
    if metadata is not None and metadata not in names:
        raise InvalidGrammarError("the answer begins as the call of none of the tools")
    check_tools(calls)
    first = optional(prefix)
    rules = syntax.rules
    for at, tool in enumerate(calls.tools):
        line = literal(f"{tool.name}\n")
        body, more = syntax.write(tool, f"t{at}")
        rules += f"{more}body{at}: {optional(syntax.opening)}{body}\n"
        rules += f"call{at}: {first}{line} / ?/ body{at}\n"
    answer = _ANY_TEXT if calls.text is None else text_rule(calls.text)
    resumed = "" if metadata is None else f"{first}body{names.index(metadata)}"
    start = _start(calls, resumed, f"<[{segment_id}]>")
    lines = [""] if resumed else [f"{name}\n" for name in names]
    openings = [f"{prefix}{line}{syntax.opening}" for line in lines]
    if not (calls.required or resumed or calls.text is None):
        openings.append(f"{prefix}\n")
    return Document(
        f'{start}text: {first}"\\n" {answer.body}\n{answer.rules}{rules}',
        answer.nested,
        openings,
        [*strict_schemas(calls), ("$", answer.schema)],
        (segment_id,),
    )


def check_tools(calls: ToolCalls) -> None:
    """Check the tools' schemas, and simplify them."""
    size = Counter[str]()
    for tool in calls.tools:
        size += check_schema(tool.parameters, "parameters", strict=tool.strict)
    check_size(size)
    for tool in calls.tools:
        simplify(tool.parameters, size)


def strict_schemas(calls: ToolCalls) -> list[tuple[str, Any]]:
    """Return the schemas that are enforced in full, as `Document.schemas` has them."""
    return [("parameters", tool.parameters) for tool in calls.tools if tool.strict]


def parts(text: str) -> Iterator[tuple[Part, Grammar]]:
    """Yield each part of a grammar of kind `tool_calls`, with a grammar of that part alone.

    Raises:
        InvalidGrammarError: the grammar is broken.
    """
    calls = read(decode_tool_calls, text, "rule of calls")
    for tool in calls.tools:
        alone = ToolCalls(tools=[tool], required=True, single=True)
        yield Part(tool.name), Grammar("tool_calls", msgspec.json.encode(alone).decode())
    if calls.text is not None:
        yield TEXT_PART, calls.text


def _start(calls: ToolCalls, resumed: str, boundary: str) -> str:
    """Return the rules for the segments; `resumed` matches the rest of a call that begins in the prompt."""
    call = " | ".join(f"call{at}" for at in range(len(calls.tools)))
    more = "" if calls.single else f"({boundary} call)*"
    rules = f"call: {call}\ncalls: {resumed or 'call'} {more}\n"
    if calls.required or resumed:
        return f"start: calls\n{rules}"
    both = "" if calls.text is not None else f" | text {boundary} calls"
    return f"start: text | calls{both}\n{rules}"
