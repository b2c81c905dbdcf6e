"""JSON schemas as grammars of Python literals, the form of ChatGLM3's arguments.

For a strict tool, a grammar may allow less than the schema, never more: properties come in the schema's
order, and only those that the schema names; numbers have at most 18 digits before the point. What JSON and
Python write in the same way (strings with a pattern or a format, numbers with bounds) is left to llguidance's
own JSON schemas.
"""

import json
import unicodedata
from collections.abc import Mapping
from typing import Any

import llguidance

from triton_models.errors import InvalidGrammarError
from triton_models.text.complaints import about_schema
from triton_models.text.disjoint import disjoint
from triton_models.text.grammar_text import literal
from triton_models.text.literals import LONGEST, either, is_of, key, repeated, shared_json, times, written
from triton_models.text.object_grammar import Entry, in_order
from triton_models.text.schema_keywords import target
from wire.grammar import CallableTool

_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$defs", "definitions", "$anchor"),
    }
)
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_LARGEST = 10**15


class LiteralGrammar:
    """Writes the rules for the arguments of one tool.

    Args:
        tool: the tool; its schema must describe an object.
        name: prefix of the rules' names.
    """

    def __init__(self, tool: CallableTool, name: str) -> None:
        self._tool = tool
        self._name = name
        self._references: dict[str, str] = {}
        self._count = 0
        self.rules: list[str] = []

    def arguments(self) -> str:
        """Return the expression for `k=v, ...`, and add its rules to `rules`.

        Raises:
            InvalidGrammarError: the tool is strict, and its schema cannot be expressed in full.
        """
        path = "parameters"
        schema: Any = self._resolved(self._tool.parameters, path)
        if schema.get("type", "object") != "object":
            raise InvalidGrammarError(f"{path}.type must be object")
        self._check_keywords(schema, "object", path)
        entries = self._entries(schema, path)
        if entries:
            return self._rule(in_order([self._argument(each) for each in entries], self._rule))
        more = schema.get("additionalProperties", False)
        if more is False or schema.get("maxProperties") == 0:
            return ""
        return f'("**" {self._map(schema, more, path)})?'

    def _argument(self, entry: Entry) -> Entry:
        name = entry.name
        # Python normalises identifiers, which would change other names.
        if name.isidentifier() and unicodedata.normalize("NFKC", name) == name:
            return Entry(name, f"{literal(name + '=')} {entry.body}", entry.required)
        return Entry(name, f'"**{{" {key(name)} COLON {entry.body} "}}"', entry.required)

    def _value(self, schema: Any, path: str) -> str:  # noqa: PLR0911 - one for each kind of schema
        if schema is True or schema == {}:
            return "any"
        if not isinstance(schema, dict):
            self._cannot(path, "false" if schema is False else "a schema that is no object")
            return "any"
        if "$ref" in schema:
            return self._reference(schema, path)
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema:
                return self._combined(schema, keyword, path)
        if "enum" in schema or "const" in schema:
            return self._one_of(schema, path)
        kinds = schema.get("type") or _implied(schema)
        if kinds is None:
            self._check_keywords(schema, "null", path)
            return "any"
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not kinds or not all(kind in _KEYWORDS for kind in kinds):
            raise InvalidGrammarError(f"{path}.type is not a type of JSON's")
        all_keywords = frozenset().union(*(_KEYWORDS[kind] for kind in kinds))
        for keyword in schema.keys() - _ANNOTATIONS - {"type"} - all_keywords:
            self._cannot(path, keyword)
        return either(self._of_kind(kind, schema, path) for kind in kinds)

    def _of_kind(self, kind: str, schema: dict[str, Any], path: str) -> str:
        match kind:
            case "object":
                return self._dict(schema, path)
            case "array":
                return self._list(schema, path)
            case "string":
                return self._string(schema, path)
            case "integer" | "number":
                return self._number(kind, schema, path)
            case "boolean":
                return '("True" | "False")'
        return '"None"'

    def _dict(self, schema: dict[str, Any], path: str) -> str:
        entries = [
            Entry(each.name, f"{key(each.name)} COLON {each.body}", each.required)
            for each in self._entries(schema, path)
        ]
        if entries:
            return self._rule(f'"{{" {self._rule(in_order(entries, self._rule))} "}}"')
        more = schema.get("additionalProperties", "properties" not in schema)
        return '"{}"' if more is False else self._map(schema, more, path)

    def _map(self, schema: dict[str, Any], more: Any, path: str) -> str:
        """Return the expression for a dictionary with arbitrary keys, whose values conform to `more`."""
        value = self._value(more, f"{path}.additionalProperties")
        least = schema.get("minProperties", 0)
        if least > 1:
            self._cannot(path, "minProperties over 1")  # A repeated key counts once.
        items = repeated(f"STR COLON {value}", min(least, 1), schema.get("maxProperties"))
        return self._rule(f'"{{" {items} "}}"')

    def _entries(self, schema: dict[str, Any], path: str) -> list[Entry]:
        """Return the properties that an object may have, in order: only those that the schema names."""
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        more = schema.get("additionalProperties", True)
        entries = []
        for name in dict.fromkeys([*properties, *required]):
            each = properties.get(name, more)
            if each is False:
                if name in required:
                    raise InvalidGrammarError(f"{path} requires {name!r}, and allows it not")
                continue
            entries.append(Entry(name, self._value(each, f"{path}.properties.{name}"), name in required))
        if entries and schema.get("minProperties", 0) > sum(entry.required for entry in entries):
            self._cannot(path, "minProperties")
        if len(entries) > schema.get("maxProperties", len(entries)):
            entries = [entry for entry in entries if entry.required]
            if len(entries) > schema["maxProperties"]:
                raise InvalidGrammarError(f"{path}.maxProperties contradicts required")
        return entries

    def _list(self, schema: dict[str, Any], path: str) -> str:
        items = schema.get("items", True)
        first = schema.get("prefixItems", [])
        if isinstance(items, list):
            self._cannot(path, "a list of items")
            items, first = True, items
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most is not None and most < least:
            raise InvalidGrammarError(f"{path}.maxItems contradicts minItems")
        first = first if most is None else first[:most]
        begun = [self._value(each, f"{path}.prefixItems.{at}") for at, each in enumerate(first)]
        if not begun:
            value = self._value(items, f"{path}.items") if items is not False else '"None"'
            return self._rule(f'"[" {repeated(value, least, 0 if items is False else most)} "]"')
        rest = ""
        if items is not False and (most is None or most > len(begun)):
            more = f"(SEP {self._value(items, f'{path}.items')})"
            rest = f" {more}{times(max(0, least - len(begun)), None if most is None else most - len(begun))}"
        return self._rule(f'"[" {" SEP ".join(begun)}{rest} "]"')

    def _string(self, schema: dict[str, Any], path: str) -> str:
        asked: dict[str, Any] = {name: schema[name] for name in ("minLength", "maxLength") if name in schema}
        for keyword in ("pattern", "format"):
            if keyword in schema and self._fits(
                path, keyword, {**asked, "type": "string", keyword: schema[keyword]}
            ):
                asked[keyword] = schema[keyword]
        if asked.keys() & {"pattern", "format"}:
            return shared_json({"type": "string", **asked})
        if not asked:
            return "STR"
        least, most = asked.get("minLength", 0), asked.get("maxLength", LONGEST)
        times = f"{{{least},{max(least, min(most, LONGEST))}}}"
        escape = r"""\\[\\'"nrt]"""
        single, double = (rf"{quote}([^{quote}\\\x00-\x1f\x7f]|{escape}){times}{quote}" for quote in "'\"")
        return f"/{single}|{double}/"

    def _number(self, kind: str, schema: dict[str, Any], path: str) -> str:
        asked = {name: schema[name] for name in _KEYWORDS["number"] if name in schema}
        if not asked:
            return "INT" if kind == "integer" else "NUM"
        lower = [asked[name] for name in ("minimum", "exclusiveMinimum") if name in asked]
        upper = [asked[name] for name in ("maximum", "exclusiveMaximum") if name in asked]
        if not all(type(value) in (int, float) for value in asked.values()):
            raise InvalidGrammarError(f"{path} has a bound that is no number")
        # Bounds on both sides, so that no number is too long to be parsed.
        if not lower:
            asked["minimum"] = min(-_LARGEST, *(int(value) - _LARGEST for value in upper), 0)
        if not upper:
            asked["maximum"] = max(_LARGEST, *(int(value) + _LARGEST for value in lower), 0)
        bounded = {"type": kind, **asked}
        return shared_json(bounded) if self._fits(path, "bounds", bounded) else kind[:3].upper()

    def _one_of(self, schema: dict[str, Any], path: str) -> str:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        for keyword in schema.keys() - _ANNOTATIONS - {"enum", "const", "type"}:
            self._cannot(path, keyword)
        kinds = schema.get("type")
        if kinds is not None:
            kinds = [kinds] if isinstance(kinds, str) else kinds
            values = [value for value in values if is_of(value, kinds)]
        if not values:
            raise InvalidGrammarError(f"{path} allows no value")
        return either(written(value) for value in values)

    def _combined(self, schema: dict[str, Any], keyword: str, path: str) -> str:
        for beside in schema.keys() - _ANNOTATIONS - {keyword}:
            self._cannot(path, f"{beside} beside {keyword}")
        branches = schema[keyword]
        if not isinstance(branches, list) or not branches:
            raise InvalidGrammarError(f"{path}.{keyword} must be a list of schemas")
        if len(branches) > 1 and (keyword == "allOf" or (keyword == "oneOf" and not disjoint(branches))):
            self._cannot(path, keyword if keyword == "allOf" else "oneOf of branches that may overlap")
        branches = branches[:1] if keyword == "allOf" else branches
        return either(self._value(each, f"{path}.{keyword}.{at}") for at, each in enumerate(branches))

    def _reference(self, schema: dict[str, Any], path: str) -> str:
        pointer = schema["$ref"]
        for beside in schema.keys() - _ANNOTATIONS - {"$ref"}:
            self._cannot(path, f"{beside} beside $ref")
        if pointer not in self._references:
            self._references[pointer] = rule = self._new_name()
            self.rules.append(f"{rule}: {self._value(self._target(pointer, path), pointer)}")
        return self._references[pointer]

    def _resolved(self, schema: Any, path: str) -> dict[str, Any]:
        seen = set()
        while isinstance(schema, dict) and "$ref" in schema and schema["$ref"] not in seen:
            seen.add(schema["$ref"])
            schema = self._target(schema["$ref"], path)
        if not isinstance(schema, dict) or "$ref" in schema:
            raise InvalidGrammarError(f"{path} is no schema of an object")
        return schema

    def _target(self, pointer: Any, path: str) -> Any:
        try:
            return target(self._tool.parameters, pointer)
        except LookupError:
            raise InvalidGrammarError(f"{path}.$ref leads nowhere: {pointer!r:.100}") from None

    def _check_keywords(self, schema: dict[str, Any], kind: str, path: str) -> None:
        for keyword in schema.keys() - _ANNOTATIONS - {"type"} - _KEYWORDS[kind]:
            self._cannot(path, keyword)

    def _fits(self, path: str, keyword: str, schema: dict[str, Any]) -> bool:
        """Return whether llguidance can express `schema`."""
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        broken, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
        if broken:
            self._cannot(path, f"{keyword} ({about_schema(' '.join(messages))})")
        return not broken

    def _cannot(self, path: str, what: str) -> None:
        """Skip `what`, which cannot be expressed.

        Raises:
            InvalidGrammarError: the tool is strict.
        """
        if self._tool.strict:
            raise InvalidGrammarError(f"it is strict, and in {path} this cannot be enforced: {what}")

    def _rule(self, body: str) -> str:
        name = self._new_name()
        self.rules.append(f"{name}: {body}")
        return name

    def _new_name(self) -> str:
        self._count += 1
        return f"{self._name}_{self._count}"


def _implied(schema: dict[str, Any]) -> str | None:
    kinds = ("object", "array", "string", "number")
    return next((kind for kind in kinds if schema.keys() & _KEYWORDS[kind]), None)
