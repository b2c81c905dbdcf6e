"""JSON schemas as grammars of Python literals, the form of ChatGLM3's arguments, in llguidance's Lark.

For a strict tool, a grammar may allow less than the schema, never more: properties come in the schema's
order, and only those that the schema names; numbers have at most 18 digits before the point. What JSON and
Python write in the same way (strings with a pattern or a format, numbers with bounds) is left to llguidance's
own JSON schemas.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from typing import Any, Final

from triton_models.errors import InvalidGrammarError
from triton_models.text.grammar_text import fault, json_rule, literal
from triton_models.text.schemas import rewritten, target
from wire.calls import is_parameter
from wire.grammar import RESTRICTIONS, CallableTool

COMMON_RULES: Final = r"""
SEP: /, ?/
COLON: /: ?/
STR: /'([^'\\\x00-\x1f\x7f]|\\[\\'"nrt])*'|"([^"\\\x00-\x1f\x7f]|\\[\\'"nrt])*"/
INT: /-?(0|[1-9][0-9]{0,17})/
NUM: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/
any: STR | NUM | "True" | "False" | "None" | any_list | any_dict
any_list: "[]" | "[" any (SEP any)* "]"
any_dict: "{}" | "{" STR COLON any (SEP STR COLON any)* "}"
"""
"""The rules shared by all grammars of literals."""

LONGEST: Final = 10_000
"""Largest bound on characters and items; a schema's larger bounds are cut to it."""

_NOTHING: Final = '""'

_PLAIN = re.compile(r"[^'\"\\\x00-\x1f\x7f]*")

BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KEYWORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format", "allOf"),
    "number": BOUNDS,
    "integer": BOUNDS,
    "boolean": (),
    "null": (),
}
"""What is enforced for each type. A schema without a type is of the first that has one of its keywords. A
string's `allOf` may have a string's keywords."""

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

        The tool's schema must have passed `check_schema` and `simplify`.

        Raises:
            InvalidGrammarError: the tool is strict, and its schema cannot be expressed in full.
        """
        path = "parameters"
        schema: Any = self._tool.parameters
        while schema.get("type", "object") == "object" and "$ref" in schema:
            self._check_keywords(schema, ("$ref", "type"), path, " beside $ref")
            schema = self._target(schema["$ref"], path)
            if not isinstance(schema, dict):
                raise InvalidGrammarError(f"{path} is no schema of an object")
        if schema.get("type", "object") != "object":
            raise InvalidGrammarError(f"{path}.type must be object")
        self._check_keywords(schema, ("type", *_KEYWORDS["object"]), path)
        if named := self._properties(schema, path, _argument):
            return named
        entries = self._entries(schema, path, more=False)
        return entries and f'("**{{" {entries} "}}"){"" if schema.get("minProperties") else "?"}'

    def _value(self, schema: Any, path: str) -> str:
        if schema is False:
            self._cannot(path, "false")
        if not isinstance(schema, dict) or not schema:
            return "any"
        if "$ref" in schema:
            return self._reference(schema, path)
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema and not _is_text(schema):
                return self._combined(schema, keyword, path)
        if "enum" in schema or "const" in schema:
            return self._one_of(schema, path)
        kinds = _kinds(schema) or [kind for kind in _KEYWORDS if schema.keys() & {*_KEYWORDS[kind]}][:1]
        self._check_keywords(schema, ("type", *(word for kind in kinds for word in _KEYWORDS[kind])), path)
        return _either(self._of_kind(kind, schema, path) for kind in kinds) if kinds else "any"

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
        named = self._properties(schema, path, lambda name, value: f"{_written(name)} COLON {value}")
        entries = named or self._entries(schema, path, more="properties" not in schema)
        return self._rule(f'"{{" {entries} "}}"')

    def _entries(self, schema: dict[str, Any], path: str, *, more: bool) -> str:
        """Return the expression for entries with arbitrary keys; empty: there must be none.

        Their values conform to `additionalProperties`, for which `more` is the default.
        """
        values = schema.get("additionalProperties", more)
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        if values is False or most == 0:
            if least:
                self._cannot(path, "minProperties")
            return ""
        if least > 1:
            self._cannot(path, "minProperties over 1")  # A repeated key counts once.
        value = self._value(values, f"{path}.additionalProperties")
        return _sequence([], f"STR COLON {value}", min(least, 1), most)

    def _properties(self, schema: dict[str, Any], path: str, write: Callable[[str, str], str]) -> str:
        """Return the expression for an object's properties in order: only those that the schema names.

        Each has two rules: one if no property was written before it, one if some was. They are built starting
        from the last, so that the grammar grows with the number of properties, not of their combinations.

        Args:
            schema: of the object.
            path: its place.
            write: returns the expression for the property of this name, whose value has this expression.
        """
        properties, required = schema.get("properties", {}), dict.fromkeys(schema.get("required", ()))
        more = schema.get("additionalProperties", True)
        bodies = {}
        for name in properties | required:
            each = properties.get(name, more)
            if each is not False:
                bodies[name] = write(name, self._value(each, f"{path}.properties.{name}"))
            elif name in required:
                raise InvalidGrammarError(f"{path} requires {name!r}, and allows it not")
        least = schema.get("minProperties", 0)
        if bodies and least > max(1, len(required)):
            self._cannot(path, "minProperties")
        if len(bodies) > schema.get("maxProperties", len(bodies)):
            bodies = {name: body for name, body in bodies.items() if name in required}
            if len(bodies) > schema["maxProperties"]:
                raise InvalidGrammarError(f"{path}.maxProperties contradicts required")
        first = after = ""
        for name, body in reversed(bodies.items()):
            here = f"{body} {after}".rstrip()
            if name in required:
                first, after = self._rule(here), self._rule(f"SEP {here}")
            else:
                others = first or ("" if least else _NOTHING)
                first = self._rule(f"{here} | {others}" if others else here)
                after = self._rule(f"SEP {here} | {after or _NOTHING}")
        return first

    def _list(self, schema: dict[str, Any], path: str) -> str:
        items = schema.get("items", True)
        first = schema.get("prefixItems", [])
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most is not None and most < least:
            raise InvalidGrammarError(f"{path}.maxItems contradicts minItems")
        if items is False and least > len(first):
            raise InvalidGrammarError(f"{path}.minItems contradicts items")
        first = first if most is None else first[:most]
        places = [self._value(each, f"{path}.prefixItems.{at}") for at, each in enumerate(first)]
        most = 0 if items is False else most and most - len(places)
        item = "" if most == 0 else self._value(items, f"{path}.items")
        return self._rule(f'"[" {_sequence(places, item, max(0, least - len(places)), most)} "]"')

    def _string(self, schema: dict[str, Any], path: str) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength", math.inf)
        if most < least:
            raise InvalidGrammarError(f"{path}.maxLength contradicts minLength")
        enforced: dict[str, Any] = {
            name: schema[name] for name in ("minLength", "maxLength") if name in schema
        }
        for keyword in ("allOf", "pattern", "format"):
            if keyword not in schema:
                continue
            each = rewritten({**enforced, "type": "string", keyword: schema[keyword]})
            if self._fits(each, keyword, path):
                enforced = each
        if enforced.keys() - {"minLength", "maxLength"}:
            return _shared_json(enforced)
        if not enforced:
            return "STR"
        times = _times(least, min(most, LONGEST))
        escape = r"""\\[\\'"nrt]"""
        single, double = (rf"{quote}([^{quote}\\\x00-\x1f\x7f]|{escape}){times}{quote}" for quote in "'\"")
        return f"/{single}|{double}/"

    def _number(self, kind: str, schema: dict[str, Any], path: str) -> str:
        bounds: dict[str, Any] = {name: schema[name] for name in BOUNDS if name in schema}
        if not bounds:
            return kind[:3].upper()
        given = [0, *(int(value) for name, value in bounds.items() if name != "multipleOf")]
        # Bounds on both sides, so that no number is too long to be parsed.
        widest = {"minimum": min(given) - _LARGEST, "maximum": max(given) + _LARGEST}
        bounded = {"type": kind, **widest, **bounds}
        return _shared_json(bounded) if self._fits(bounded, "bounds", path) else kind[:3].upper()

    def _one_of(self, schema: dict[str, Any], path: str) -> str:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        self._check_keywords(schema, ("enum", "const", "type"), path)
        kinds = _kinds(schema)
        values = [value for value in values if not kinds or _is_of(value, kinds)]
        if not values:
            raise InvalidGrammarError(f"{path} allows no value")
        return _either(_written(value) for value in values)

    def _combined(self, schema: dict[str, Any], keyword: str, path: str) -> str:
        self._check_keywords(schema, (keyword,), path, f" beside {keyword}")
        branches = schema[keyword]
        if keyword == "allOf" and len(branches) > 1:
            self._cannot(path, keyword)
            branches = branches[:1]
        if keyword == "oneOf" and len(branches) > 1 and self._tool.strict and self._fault:
            self._cannot(path, f"oneOf ({self._fault})")
        return _either(self._value(each, f"{path}.{keyword}.{at}") for at, each in enumerate(branches))

    def _reference(self, schema: dict[str, Any], path: str) -> str:
        pointer = schema["$ref"]
        self._check_keywords(schema, ("$ref",), path, " beside $ref")
        if pointer not in self._references:
            self._references[pointer] = name = self._new_name()
            self._rule(self._value(self._target(pointer, path), pointer), name)
        return self._references[pointer]

    def _target(self, pointer: str, path: str) -> Any:
        try:
            return target(self._tool.parameters, pointer)
        except LookupError:
            self._cannot(path, f"$ref {pointer!r:.100}, which leads nowhere")
            return {}

    def _check_keywords(
        self, schema: dict[str, Any], enforced: Collection[str], path: str, beside: str = ""
    ) -> None:
        for keyword in schema:
            if keyword in RESTRICTIONS and keyword not in enforced:
                self._cannot(path, f"{keyword}{beside}")

    def _fits(self, schema: dict[str, Any], keyword: str, path: str) -> bool:
        """Return whether llguidance can express `schema`, all of which is there for `keyword`."""
        if why := fault(schema):
            self._cannot(path, f"{keyword} ({why})")
        return not why

    @cached_property
    def _fault(self) -> str:
        """What llguidance cannot enforce of the whole schema: it finds branches of a `oneOf` that overlap."""
        return fault(self._tool.parameters)

    def _cannot(self, path: str, what: str) -> None:
        """Skip `what`, which cannot be expressed.

        Raises:
            InvalidGrammarError: the tool is strict.
        """
        if self._tool.strict:
            raise InvalidGrammarError(f"it is strict, and in {path} this cannot be enforced: {what}")

    def _rule(self, body: str, name: str | None = None) -> str:
        name = name or self._new_name()
        self.rules.append(f"{name}: {body}")
        return name

    def _new_name(self) -> str:
        self._count += 1
        return f"{self._name}_{self._count}"


def _kinds(schema: dict[str, Any]) -> list[str]:
    kinds: str | list[str] = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else kinds


def _is_text(schema: dict[str, Any]) -> bool:
    """Return whether `schema` is of strings, and has keywords of strings alone."""
    return (
        schema.get("type") == "string"
        and schema.keys() & RESTRICTIONS <= {"type", *_KEYWORDS["string"]}
        and all(
            isinstance(part, dict) and _is_text({"type": "string"} | part) for part in schema.get("allOf", ())
        )
    )


def _argument(name: str, value: str) -> str:
    if is_parameter(name):
        return f"{literal(name + '=')} {value}"
    return f'"**{{" {_written(name)} COLON {value} "}}"'


def _either(parts: Iterable[str]) -> str:
    """Return the alternation of `parts`, at least one."""
    each = list(dict.fromkeys(parts))
    return each[0] if len(each) == 1 else f"({' | '.join(each)})"


def _sequence(first: list[str], item: str, least: int, most: int | None) -> str:
    """Return the expression for `first`, then `least` to `most` times `item` (None: no limit), separated."""
    if most == 0:
        return " SEP ".join(first)
    if first:
        return f"{' SEP '.join(first)} (SEP {item}){_times(least, most)}"
    some = _sequence([item], item, max(0, least - 1), most and most - 1)
    return some if least else f"({some})?"


def _times(least: int, most: int | None) -> str:
    """Return the operator that repeats the expression before it `least` to `most` times (None: no limit)."""
    if most is None:
        return f"{{{least},}}"
    return f"{{{least},{max(least, min(most, LONGEST))}}}"


def _shared_json(schema: dict[str, Any]) -> str:
    """Return the expression for a string or number that JSON and Python write the same way."""
    return json_rule(schema, whitespace_pattern=None, whitespace_flexible=False)


def _written(value: Any) -> str:
    """Return the expression for `value` as a literal; for a string, in either kind of quotes."""
    double = literal(_in_python(value))
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        single = literal(f"'{value}'")
        return f"({single} | {double})"
    return double


def _in_python(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_in_python, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_in_python(key)}: {_in_python(each)}' for key, each in value.items())}}}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def _is_of(value: Any, kinds: list[str]) -> bool:
    """Return whether a JSON value is of one of JSON Schema's types."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    kind = "null" if value is None else names[type(value)]
    return kind in kinds or (kind == "integer" and "number" in kinds)
