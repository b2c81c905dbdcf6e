"""Answers of text and calls that follow schemas, or of reasoning and a grammar: xgrammar's structural tags.

https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html

Qwen3-Coder and GLM-4.5 write an argument as a marked key and a value: a string as it is, all else as JSON. A
string ends at the first closing mark, so a grammar can say no more of it than that, or which strings it may
be. xgrammar's own styles for such arguments are not used: there, a string with a length or a pattern may have
closing marks in it, and white space may stand around a value.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.chat.value_types import leaf_types, leaf_values, leaves, referred
from wire.grammar import CallableTool, GrammarKind, Reasoning, ToolCalls

_NAME: Final = "\0"
"""Stands for a name, of a tool or a parameter."""
_CALL: Final = "<tool_call>"
_CALLED: Final = "</tool_call>"
_KEY: Final = re.compile(r"[^<>\s]([^<>\n]*[^<>\s])?")
"""A parameter's name that is read as it was written."""
_TEXT: Final = {"type": "any_text"}
_BLANKS: Final = {"type": "regex", "pattern": r"[ \t\r\n]*"}
_ENFORCED: Final = frozenset({"type", "properties", "required", "additionalProperties"})
_SAY_NOTHING: Final = frozenset(
    {"$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default", "examples"}
)
_DEFINITIONS: Final = ("$defs", "definitions")
_OF_STRINGS: Final = ("minLength", "maxLength", "pattern", "format")
"""What no grammar of a string without quotes enforces."""


class UnenforceableError(ValueError):
    """A strict tool's schema that no grammar of its family's calls enforces.

    Attributes:
        tool: its name.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.tool = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """How an argument is written."""

    before: str
    """What stands before its value."""
    padding: str
    """What stands behind it, and is none of it."""
    closing: str
    """The mark behind that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a family's calls are written."""

    begins: tuple[str, ...]
    """What stands before a call's arguments, in one way or another."""
    end: str
    """What stands behind them."""
    marks: tuple[str, ...]
    """One of these is where a call begins."""
    pair: Pair | None = None
    """How an argument is written; None: the arguments are JSON."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All that it has."""
        return (*self.begins, self.end, *(() if self.pair is None else (self.pair.before, self.pair.closing)))


FORMS: Final[Mapping[str, CallForm]] = {
    "hermes": CallForm(
        begins=(f'{_CALL}\n{{"name": "{_NAME}", "arguments": ',), end=f"}}\n{_CALLED}", marks=(_CALL,)
    ),
    "qwen3coder": CallForm(
        # That model often leaves out the first mark.
        begins=(f"{_CALL}\n<function={_NAME}>\n", f"<function={_NAME}>\n"),
        end=f"</function>\n{_CALLED}",
        marks=(_CALL, "<function="),
        pair=Pair(f"<parameter={_NAME}>\n", "\n", "</parameter>"),
    ),
    "glm45": CallForm(
        begins=(f"{_CALL}{_NAME}\n",),
        end=_CALLED,
        marks=(_CALL,),
        pair=Pair(f"<arg_key>{_NAME}</arg_key>\n<arg_value>", "", "</arg_value>"),
    ),
}
"""By the names of styles (`gateway.chat.styles`)."""


def structural_tag(calls: ToolCalls, form: CallForm, reasoning: Reasoning | None = None) -> dict[str, Any]:
    """Return the structural tag of an answer with calls. A tool that is not strict takes any arguments.

    Where it can be, it is in the tags' older form, which all releases of vLLM read. Otherwise xgrammar 0.1.25
    reads it, or 0.1.33 if there are parameters that may be missing or the answer may begin with reasoning. An
    older one refuses it.

    Args:
        calls: what may be called.
        form: how that is written.
        reasoning: what may come first, in which no call is one.

    Raises:
        UnenforceableError: a strict tool's schema says what cannot be enforced.
    """
    if form.pair is None and reasoning is None:
        structures = [
            {"begin": _named(begin, tool.name), "schema": _json_schema(tool), "end": form.end}
            for tool in calls.tools
            for begin in form.begins
        ]
        return {"type": "structural_tag", "structures": structures, "triggers": [*form.marks]}
    tags = [
        _tag(_named(begin, tool.name), _arguments(tool, form.pair), form.end)
        for tool in calls.tools
        for begin in form.begins
    ]
    answer: dict[str, Any] = {"type": "triggered_tags", "triggers": [*form.marks], "tags": tags}
    if reasoning is not None and reasoning.begun:
        answer = _sequence(_tag("", _TEXT, reasoning.end), answer)
    elif reasoning is not None:
        # Without that, reasoning would also be text with calls in it.
        answer["excludes"] = [reasoning.begin, reasoning.end]
        first = _sequence(_BLANKS, _tag(reasoning.begin, _TEXT, reasoning.end))
        answer = _sequence(_optional(first), answer)
    return {"type": "structural_tag", "format": answer}


def behind_reasoning(kind: GrammarKind, text: str, reasoning: Reasoning) -> dict[str, Any] | None:
    """Return the structural tag of an answer that a grammar is of once its reasoning has ended.

    Args:
        kind: of the grammar.
        text: the grammar, as `wire.grammar.Grammar` has it.
        reasoning: what the prompt ends within.

    Returns:
        xgrammar 0.1.25 reads it. None: there is none of such a grammar.
    """
    content: dict[str, Any]
    match kind:
        case "json_object":
            content = {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            content = {"type": "json_schema", "json_schema": json.loads(text)}
        case "regex":
            content = {"type": "regex", "pattern": text}
        case "choice":
            content = {"type": "or", "elements": [_constant(each) for each in json.loads(text)]}
        case _:
            return None
    answer = _sequence(_tag("", _TEXT, reasoning.end), _BLANKS, content)
    return {"type": "structural_tag", "format": answer}


def _arguments(tool: CallableTool, pair: Pair | None) -> dict[str, Any]:
    if pair is None:
        return {"type": "json_schema", "json_schema": _json_schema(tool)}
    if not tool.strict:
        return _TEXT
    try:
        return _pairs(tool.parameters, pair)
    except UnenforceableError as error:
        error.tool = tool.name
        raise


def _json_schema(tool: CallableTool) -> dict[str, Any]:
    return {"type": "object", **tool.parameters} if tool.strict else {"type": "object"}


def _pairs(parameters: Mapping[str, Any], pair: Pair) -> dict[str, Any]:
    """Return the format of an object's properties, in their order."""
    reference = parameters.get("$ref")
    found = referred(reference, parameters) if isinstance(reference, str) else parameters
    for key in found:
        if key not in _ENFORCED | _SAY_NOTHING:
            raise UnenforceableError(f"{key!r} cannot be enforced with this model")
    properties, required = found.get("properties", {}), found.get("required", [])
    if not (isinstance(properties, Mapping) and isinstance(required, list)):
        raise UnenforceableError("'properties' is an object, and 'required' a list")
    if any(name not in [*properties] for name in required):
        raise UnenforceableError("of what is 'required', the schema does not say what it is")
    elements = []
    for name, schema in properties.items():
        if not _KEY.fullmatch(name):
            raise UnenforceableError(f"a parameter's name cannot be written by this model: {name!r}")
        before, behind = _named(pair.before, name), f"{pair.padding}{pair.closing}\n"
        value = _value(name, schema, parameters, pair)
        if value is _TEXT:
            written = _sequence(_tag(before, _TEXT, pair.closing), _constant("\n"))
        else:
            written = _sequence(_constant(before), value, _constant(behind))
        elements.append(written if name in required else _optional(written))
    return _sequence(*elements)


def _value(name: str, schema: Any, root: Mapping[str, Any], pair: Pair) -> dict[str, Any]:
    """Return the format of a value: `_TEXT`, or one that does not go on behind it."""
    found = [*leaves(schema, root)]
    types = {each for leaf in found for each in leaf_types(leaf)}
    if not types & {"string", ""}:
        definitions = {key: root[key] for key in _DEFINITIONS if key in root}
        return {"type": "json_schema", "json_schema": {**definitions, **schema}, "excludes": [pair.closing]}
    if types - {"string", "null"}:
        raise UnenforceableError(f"{name!r} may be a string or something else: calls do not tell")
    for key in _OF_STRINGS:
        if any(key in leaf for leaf in found):
            raise UnenforceableError(f"{key!r} of {name!r} cannot be enforced with this model")
    values = [leaf_values(leaf) or ([None] if leaf_types(leaf) == {"null"} else None) for leaf in found]
    if None in values:
        return _TEXT
    texts = dict.fromkeys("null" if value is None else str(value) for each in values for value in each or ())
    if any(pair.closing in text for text in texts):
        raise UnenforceableError(f"{name!r} cannot be what has {pair.closing!r} in it")
    return {"type": "or", "elements": [_constant(text) for text in texts]}


def _named(text: str, name: str) -> str:
    return text.replace(_NAME, json.dumps(name, ensure_ascii=False)[1:-1] if '"' in text else name)


def _tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    if content == _sequence():
        # What a tag holds is never empty.
        begin, content = begin[:-1], _constant(begin[-1])
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


def _optional(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "optional", "content": content}


def _constant(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}
