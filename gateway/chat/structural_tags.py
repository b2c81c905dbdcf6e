"""Answers of text and calls that follow schemas, or of reasoning and a grammar: xgrammar's structural tags.

https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html

Qwen3-Coder and GLM-4.5 write an argument as a marked key and a value: a string as it is, all else as JSON. A
string ends at the first closing mark, so a grammar can say no more of it than that, or which strings it may
be. xgrammar's own styles for such arguments are not used: there, a string with a length or a pattern may have
closing marks in it, and white space may stand around a value.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.chat.value_types import leaf_types, leaf_values, leaves, referred, within
from wire.grammar import RESTRICTIONS, CallableTool, GrammarKind, Reasoning, ToolCalls

_NAME: Final = "\0"
"""Stands for a tool's name."""
_CALL: Final = "<tool_call>"
_CALLED: Final = "</tool_call>"
_KEY: Final = re.compile(r"[^<>\s]([^<>\n]*[^<>\s])?")
"""A parameter's name that is read as it was written."""
_ANY_KEY: Final = {"type": "regex", "pattern": r"[^<>\n]+"}
_TEXT: Final = {"type": "any_text"}
_BLANKS: Final = {"type": "regex", "pattern": r"[ \t\r\n]*"}
_OF_OBJECT: Final = frozenset({"type", "properties", "required", "additionalProperties"})
_OF_STRING: Final = frozenset({"type", "enum", "const"})
"""What is enforced of a string without quotes."""
_OF_NO_JSON: Final = frozenset({"minLength", "maxLength", "pattern", "patternProperties", "format"})
"""Of strings in which no closing mark may be, xgrammar enforces no length; and it does not keep the mark out
of those with a pattern."""
_LIKE_NULL: Final = frozenset({"null", "None"})
"""Strings that are read as null where that may be, too."""
_DEFINED: Final = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
_MOST_BYTES: Final = 2**20
"""Of the definitions that the values of a request's tools have, each with its own."""


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

    key: tuple[str, str]
    """What stands before its name, and behind it."""
    opening: str
    """The mark before its value; none: what stands behind the name."""
    padding: str
    """What stands behind its value, and is none of it."""
    closing: str
    """The mark behind that."""
    gap: str
    """The regular expression of what stands between marks."""


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
        pair = self.pair
        return (*self.begins, self.end, *(() if pair is None else (*pair.key, pair.opening, pair.closing)))


FORMS: Final[Mapping[str, CallForm]] = {
    "hermes": CallForm(
        begins=(f'{_CALL}\n{{"name": "{_NAME}", "arguments": ',), end=f"}}\n{_CALLED}", marks=(_CALL,)
    ),
    "qwen3coder": CallForm(
        # That model often leaves out the first mark.
        begins=(f"{_CALL}\n<function={_NAME}>", f"<function={_NAME}>"),
        end=f"</function>\n{_CALLED}",
        marks=(_CALL, "<function="),
        pair=Pair(("<parameter=", ">\n"), "", "\n", "</parameter>", r"\n"),
    ),
    "glm45": CallForm(
        begins=(f"{_CALL}{_NAME}",),
        end=_CALLED,
        marks=(_CALL,),
        # Without line ends from GLM-4.7 on.
        pair=Pair(("<arg_key>", "</arg_key>"), "<arg_value>", "", "</arg_value>", r"\n?"),
    ),
}
"""By the names of styles (`gateway.chat.styles`)."""


def structural_tag(calls: ToolCalls, form: CallForm, reasoning: Reasoning | None = None) -> dict[str, Any]:
    """Return the structural tag of an answer with calls. A tool that is not strict takes any arguments.

    Where it can be, it is in the tags' older form, which all releases of vLLM read. Otherwise xgrammar 0.1.25
    reads it, or 0.1.33 where a parameter may be missing, a tool is not strict or reasoning may come first. An
    older one refuses it.

    `reasoning` is what may come first, in which no call is one.

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
    definitions = _Definitions()
    tags = []
    for tool in calls.tools:
        arguments = _arguments(tool, form.pair, definitions)
        tags += [_tag(_named(begin, tool.name), arguments, form.end) for begin in form.begins]
    answer: dict[str, Any] = {"type": "triggered_tags", "triggers": [*form.marks], "tags": tags}
    if reasoning is not None and reasoning.begun:
        answer = _sequence(_tag("", _TEXT, reasoning.end), answer)
    elif reasoning is not None:
        # Without that, reasoning would also be text with calls in it.
        answer["excludes"] = [reasoning.begin]
        first = _sequence(_BLANKS, _tag(reasoning.begin, _TEXT, reasoning.end))
        answer = _sequence(_optional(first), answer)
    return {"type": "structural_tag", "format": answer}


def behind_reasoning(kind: GrammarKind, text: str, reasoning: Reasoning) -> dict[str, Any] | None:
    """Return the structural tag of an answer that a grammar is of once its reasoning has ended.

    xgrammar 0.1.25 reads it. `kind` and `text` are as in `wire.grammar.Grammar`; None: there is none of that.
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


class _Definitions:
    """The definitions that values in JSON refer to, which each of them has to have for itself."""

    def __init__(self) -> None:
        self._left = _MOST_BYTES

    def of(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
        """Return those that a value's schema needs, by keyword and name.

        Raises:
            UnenforceableError: they are too large or not where definitions are, or something is not enforced.
        """
        found: dict[str, dict[str, Any]] = {}
        waiting: list[Any] = [schema]
        while waiting:
            for node in within(waiting.pop()):
                for key in sorted(_OF_NO_JSON & node.keys()):
                    raise UnenforceableError(f"{key!r} cannot be enforced with this model")
                reference = node.get("$ref")
                if reference is None:
                    continue
                place = _DEFINED.fullmatch(reference) if isinstance(reference, str) else None
                if place is None:
                    raise UnenforceableError(f"references have to be to definitions: {reference!r} is not")
                if place[2] not in found.setdefault(place[1], {}):
                    found[place[1]][place[2]] = defined = referred(reference, root)
                    waiting.append(defined)
        self._left -= len(json.dumps(found)) if found else 0
        if self._left < 0:
            raise UnenforceableError("what the parameters refer to is too large")
        return found


def _arguments(tool: CallableTool, pair: Pair | None, definitions: _Definitions) -> dict[str, Any]:
    if pair is None:
        return {"type": "json_schema", "json_schema": _json_schema(tool)}
    if not tool.strict:
        before, behind = pair.key
        each = [_constant(before), _ANY_KEY, *_written(behind, _TEXT, pair)]
        return _sequence(_gap(pair), {"type": "star", "content": _sequence(*each)})
    try:
        return _sequence(_gap(pair), *_pairs(tool.parameters, pair, definitions))
    except UnenforceableError as error:
        error.tool = tool.name
        raise


def _json_schema(tool: CallableTool) -> dict[str, Any]:
    return {"type": "object", **tool.parameters} if tool.strict else {"type": "object"}


def _pairs(parameters: Mapping[str, Any], pair: Pair, definitions: _Definitions) -> Iterator[dict[str, Any]]:
    """Yield the formats of an object's properties, in their order."""
    found, *others = leaves(parameters, parameters)
    if others or found.get("type", "object") != "object":
        raise UnenforceableError("the arguments are one object")
    for key in found:
        if key in RESTRICTIONS and key not in _OF_OBJECT:
            raise UnenforceableError(f"{key!r} cannot be enforced with this model")
    properties, names = found.get("properties", {}), found.get("required", [])
    if not (isinstance(properties, Mapping) and isinstance(names, list)):
        raise UnenforceableError("'properties' is an object, and 'required' a list")
    if not all(isinstance(name, str) and name in properties for name in names):
        raise UnenforceableError("of what is 'required', the schema does not say what it is")
    required = {*names}
    for name, schema in properties.items():
        if not _KEY.fullmatch(name):
            raise UnenforceableError(f"a parameter's name cannot be written by this model: {name!r}")
        value = _value(name, schema, parameters, pair, definitions)
        written = _sequence(*_written("".join((pair.key[0], name, pair.key[1])), value, pair))
        yield written if name in required else _optional(written)


def _written(before: str, value: dict[str, Any], pair: Pair) -> list[dict[str, Any]]:
    """Return the formats of a value that stands behind its name, and of what is around it."""
    first = []
    if pair.opening:
        first, before = [_constant(before), _gap(pair)], pair.opening
    if value is _TEXT:
        return [*first, _tag(before, _TEXT, pair.closing), _gap(pair)]
    return [*first, _constant(before), value, _constant(pair.padding + pair.closing), _gap(pair)]


def _value(
    name: str, schema: Any, root: Mapping[str, Any], pair: Pair, definitions: _Definitions
) -> dict[str, Any]:
    """Return the format of a value: `_TEXT`, or one that does not go on behind it."""
    found = leaves(schema, root)
    types = {each for leaf in found for each in leaf_types(leaf)}
    if not types & {"string", ""}:
        content = {**schema, **definitions.of(schema, root)}
        return {"type": "json_schema", "json_schema": content, "excludes": [pair.closing]}
    if types - {"string", "null"}:
        raise UnenforceableError(f"{name!r} may be a string or something else: calls do not tell")
    for key in sorted({key for leaf in found for key in leaf} & RESTRICTIONS - _OF_STRING):
        raise UnenforceableError(f"{key!r} of {name!r} cannot be enforced with this model")
    values = [leaf_values(leaf) for leaf in found if leaf_types(leaf) != {"null"}]
    if None in values:
        return _TEXT
    texts = {value for each in values for value in each or () if value is not None}
    if "null" in types and texts & _LIKE_NULL:
        raise UnenforceableError(f"{name!r} may be null, or a string that reads like it")
    texts |= {"null"} & types
    if not texts or "" in texts:
        raise UnenforceableError(f"{name!r} can be nothing, which cannot be enforced with this model")
    if any(pair.closing in text for text in texts):
        raise UnenforceableError(f"{name!r} cannot be what has {pair.closing!r} in it")
    return {"type": "or", "elements": [_constant(text) for text in sorted(texts)]}


def _named(text: str, name: str) -> str:
    return text.replace(_NAME, json.dumps(name, ensure_ascii=False)[1:-1] if '"' in text else name)


def _gap(pair: Pair) -> dict[str, Any]:
    return {"type": "regex", "pattern": pair.gap}


def _tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


def _optional(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "optional", "content": content}


def _constant(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}
