"""Grammars for answers of text and tool calls, in the syntax of each chat format (see `wire.calls`)."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from triton_models.errors import InvalidGrammarError
from triton_models.text.grammar_text import (
    ANYTHING,
    BLANKS,
    Document,
    TextRule,
    Thought,
    escaped,
    fault,
    json_rule,
    literal,
    optional,
    read,
    text_rule,
)
from triton_models.text.literal_grammar import BOUNDS, COMMON_RULES, LiteralGrammar
from triton_models.text.schemas import (
    check_schema,
    check_size,
    drop_needless_keywords,
    reachable,
    rewrite_look_aheads,
)
from wire.calls import FENCE, OPENING
from wire.grammar import (
    TEXT_PART,
    CallableTool,
    Grammar,
    Part,
    Reasoning,
    ToolCalls,
    decode_tool_calls,
)

_CLOSING: Final = f")\n{FENCE}"

_ANY_TEXT: Final = TextRule("TEXT", "TEXT: /(.|\\n)*/\n")

_CALL_BEGUN: Final = r'/\s*\{\s*"(name|type|id|parameters|arguments)"(?s:.*)/'
"""The regular expression of text that begins as a call: the gateway takes it for one."""

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


def _json(tool: CallableTool, _name: str) -> tuple[str, str]:
    schema: dict[str, Any] = {"type": "object", **(tool.parameters or _NO_ARGUMENTS)}
    if schema["type"] != "object":
        raise InvalidGrammarError("parameters.type must be object")
    _close(schema)
    rewrite_look_aheads(schema)
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
    """Drop the patterns and bounds that llguidance cannot express: it skips other keywords by itself."""
    for _, each in reachable(schema, "parameters"):
        for keywords in (("pattern",), BOUNDS):
            found = each.keys() & {*keywords}
            if found and fault({name: each[name] for name in each.keys() & {"type", *found}}):
                for name in found:
                    del each[name]


FENCED_CALLS: Final = CallSyntax(_fenced, OPENING, COMMON_RULES)
"""A fenced block of Python literals: ChatGLM3."""

JSON_CALLS: Final = CallSyntax(_json)
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
    _check(calls)
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
        [*_strict_schemas(calls), ("$", answer.schema)],
        (segment_id,),
    )


def raw_call_document(grammar: Grammar, special_ids: Mapping[str, int]) -> Document:
    """Return the document to compile for a grammar of kind `tool_calls` of an answer without a chat format.

    See `ToolCalls` for where calls stand: within marks, behind a token, at the beginning, or in a list.

    Args:
        grammar: in the wire's form.
        special_ids: the ids of special tokens.

    Raises:
        InvalidGrammarError: the grammar is broken or cannot be enforced, or calls cannot be told from text.
    """
    calls = read(decode_tool_calls, grammar.text, "rule of calls")
    tokens = [mark for mark in (calls.opening, calls.between) if mark is not None]
    behind = calls.opening is not None and special_ids.keys() >= {*tokens}
    alone = behind or (calls.bare and calls.text is None)
    if not (calls.marks or (alone and grammar.reasoning is None) or (calls.required and not tokens)):
        raise InvalidGrammarError("calls cannot be told from text: the model's format has none here")
    _check(calls)
    thought = Thought.of(grammar.reasoning)
    bodies = [_json(tool, f"t{at}")[0] for at, tool in enumerate(calls.tools)]
    if calls.opening is not None:
        return _behind_token(calls, bodies, [special_ids[mark] for mark in tokens])

    key = "parameters" if calls.bare else "arguments"
    heads = [f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": ' for tool in calls.tools]
    rules = thought.rules + _objects(heads, bodies)
    if calls.bare:
        more = "" if calls.single else f'({BLANKS} ";" {BLANKS} object)*'
        rules += f"calls: object {more} {BLANKS}\nSAID: {ANYTHING} & ~{_CALL_BEGUN}\n"
        start = f"start: {thought.body}calls{'' if calls.required else ' | SAID'}\n"
        openings = [*heads, *([] if calls.required else [""])]
        return Document(start + rules, None, openings, _strict_schemas(calls))
    if calls.marks is None:
        more = "" if calls.single else f'("," {BLANKS} object)*'
        start = f'start: {thought.body}"[" object {more} "]"\n'
        openings = [f"{before}[{head}" for before in thought.openings for head in heads]
        return Document(start + rules, None, openings, _strict_schemas(calls))
    return _within_marks(calls, calls.marks, rules, heads, grammar.reasoning)


def _objects(heads: Sequence[str], bodies: Sequence[str]) -> str:
    """Return the rules for an object of a call, which begins with one of `heads`."""
    rules = "".join(
        f'object{at}: {literal(head)} {body} "}}"\n'
        for at, (head, body) in enumerate(zip(heads, bodies, strict=True))
    )
    return f"{rules}object: {' | '.join(f'object{at}' for at in range(len(heads)))}\n"


def _within_marks(
    calls: ToolCalls, marks: tuple[str, str], rules: str, heads: Sequence[str], reasoning: Reasoning | None
) -> Document:
    """Return the document for objects within marks of text, among text or alone."""
    thought, (begin, end) = Thought.of(reasoning), marks
    rules += f"body: {BLANKS} object {BLANKS} {literal(end)}\ncall: {literal(begin)} body\n"
    rules += "calls: call" + ("" if calls.single else f" ({BLANKS} call)*") + "\n"
    openings = [f"{before}{begin}{head}" for before in thought.openings for head in heads]
    answer = TextRule("") if calls.text is None else text_rule(calls.text)
    if calls.required:
        start = f"start: {thought.body}calls\n"
    elif calls.text is not None:
        start = f"start: {thought.body}(calls | {answer.body})\n{answer.rules}"
        openings += thought.openings
    else:
        start, more_rules = _among_text(calls, begin, reasoning)
        rules += more_rules
    schemas = [*_strict_schemas(calls), ("$", answer.schema)]
    return Document(start + rules, answer.nested, openings, schemas)


def _behind_token(calls: ToolCalls, bodies: Sequence[str], ids: Sequence[int]) -> Document:
    """Return the document for calls behind a special token, after text or alone."""
    opening, *between = (f"<[{token_id}]>" for token_id in ids)
    names = [tool.name for tool in calls.tools]
    if between:
        each = [
            f"{opening} {literal(name)} {between[0]} {BLANKS} {body}"
            for name, body in zip(names, bodies, strict=True)
        ]
        rules = f"call: {' | '.join(each)}\ncalls: call{'' if calls.single else '+'}\n"
    else:
        heads = [f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ' for name in names]
        more = "" if calls.single else f'({BLANKS} "," {BLANKS} object)*'
        rules = _objects(heads, bodies)
        rules += f'calls: {opening} {BLANKS} "[" {BLANKS} object {more} {BLANKS} "]"\n'
    answer = TextRule("said", f"said: {ANYTHING}\n") if calls.text is None else text_rule(calls.text)
    before = " | said calls" if calls.text is None else ""
    start = "start: calls\n" if calls.required else f"start: {answer.body} | calls{before}\n{answer.rules}"
    schemas = [*_strict_schemas(calls), ("$", answer.schema)]
    return Document(start + rules, answer.nested, [] if calls.required else [""], schemas, tuple(ids))


def _among_text(calls: ToolCalls, begin: str, reasoning: Reasoning | None) -> tuple[str, str]:
    """Return the rules for text with calls in it, whose objects stand behind `begin`.

    Text that begins as reasoning may begin is reasoning: a mark within that is none.
    """
    more = "?" if calls.single else "*"
    rules = f"before[suffix={literal(begin)}]: {ANYTHING}\n"
    rules += f"REST: {ANYTHING} & ~/(?s:.*{escaped(begin)}.*)/\n"
    if reasoning is None or reasoning.begun:
        return f"start: {'' if reasoning is None else 'thought '}(before body){more} REST\n", rules
    rules += f"SAID: {ANYTHING} & ~/\\s*{escaped(reasoning.begin)}(?s:.*)/\nLAST: SAID & REST\n"
    rules += f"said[suffix={literal(begin)}]: SAID\n"
    then = "REST" if calls.single else "(before body)* REST"
    return f"start: thought (before body){more} REST | said body {then} | LAST\n", rules


def _check(calls: ToolCalls) -> None:
    """Check the tools' schemas, and drop from them what restricts nothing."""
    size = Counter[str]()
    for tool in calls.tools:
        size += check_schema(tool.parameters, "parameters", strict=tool.strict)
    check_size(size)
    for tool in calls.tools:
        drop_needless_keywords(tool.parameters)


def _strict_schemas(calls: ToolCalls) -> list[tuple[str, Any]]:
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
