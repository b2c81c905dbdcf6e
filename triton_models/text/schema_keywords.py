"""Checks that the keywords of a JSON schema have valid values, before anything is compiled.

Covers the part of JSON Schema that our grammars use: draft 2020-12, and the older form of `items` as a list.
Keywords that are only annotations are not checked.
"""

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from triton_models.errors import InvalidGrammarError

TYPES: Final = frozenset({"object", "array", "string", "integer", "number", "boolean", "null"})

OPTIONAL: Final = 500
"""Most optional properties of one object. At each of them, all the following ones are possible next, so that
masks become too expensive with a few hundred more."""

PROPERTIES: Final = 5_000
"""Most properties in a whole schema, and in the schemas of all tools together: the time to compile them grows
faster than their number."""

VALUES: Final = 10_000
"""Most enumerated values in the schemas of all tools: they take half a second in Python's notation."""

_IN_PLACE: Final = ("anyOf", "oneOf", "allOf")
_OF_ONE: Final = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames")
_OF_LIST: Final = (*_IN_PLACE, "prefixItems", "items")
_OF_MAP: Final = ("properties", "patternProperties", "$defs", "definitions")


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_list_of_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _is_map_of_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _are_types(value: Any) -> bool:
    kinds = [value] if isinstance(value, str) else value
    return _are_names(kinds) and bool(kinds) and TYPES.issuperset(kinds)


_Rule = tuple[str, Callable[[Any], bool]]

_SCHEMA: Final[_Rule] = ("a schema, which is an object or a boolean", _is_schema)
_SCHEMAS: Final[_Rule] = (
    "a list of schemas, at least one",
    lambda value: _is_list_of_schemas(value) and value,
)
_NAMED: Final[_Rule] = ("an object of schemas", _is_map_of_schemas)
_COUNT: Final[_Rule] = ("a whole number from 0", _is_count)
_NUMBER: Final[_Rule] = ("a number", _is_number)
_TEXT: Final[_Rule] = ("a string", lambda value: isinstance(value, str))

_RULES: Final[MappingProxyType[str, _Rule]] = MappingProxyType(
    {
        **dict.fromkeys(_OF_ONE, _SCHEMA),
        **dict.fromkeys(_IN_PLACE, _SCHEMAS),
        **dict.fromkeys(_OF_MAP, _NAMED),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _COUNT),
        **dict.fromkeys(("minProperties", "maxProperties"), _COUNT),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
        **dict.fromkeys(("pattern", "format", "$ref"), _TEXT),
        "items": ("a schema", lambda value: _is_schema(value) or _is_list_of_schemas(value)),
        "prefixItems": ("a list of schemas", _is_list_of_schemas),
        "multipleOf": ("a number over 0", lambda value: _is_number(value) and value > 0),
        "required": ("a list of strings", _are_names),
        "enum": ("a list of values, at least one", lambda value: isinstance(value, list) and bool(value)),
        "type": (f"one or more of {', '.join(sorted(TYPES))}", _are_types),
    }
)


class SchemaSize(NamedTuple):
    """The size of a schema that is to be compiled."""

    properties: int = 0
    values: int = 0
    """Number of values in enumerations."""

    def check(self, what: str) -> None:
        """Check that the schema is not too large to be enforced; the error names it as `what`.

        Raises:
            InvalidGrammarError: it is too large.
        """
        for count, bound, name in (
            (self.properties, PROPERTIES, "properties"),
            (self.values, VALUES, "values in enumerations"),
        ):
            if count > bound:
                raise InvalidGrammarError(f"{what}: over {bound} {name}")


def check_keywords(schema: Any, path: str = "$") -> SchemaSize:
    """Check that every keyword has a valid value within bounds, and that no schema refers only to itself.

    Returns:
        The schema's size; its number of properties is within the limit.

    Raises:
        InvalidGrammarError: the schema fails a check; the message names the place, and the keyword if one is
            at fault.
    """
    if not _is_schema(schema):
        raise InvalidGrammarError("a JSON schema is an object")
    in_place: dict[int, list[int]] = {}
    properties = values = 0
    for where, each in _reachable(schema, path):
        for keyword, value in each.items():
            rule = _RULES.get(keyword)
            if rule is not None and not rule[1](value):
                raise InvalidGrammarError(f"{where[:200]}: {keyword} must be {rule[0]}")
        named = each.get("properties", {})
        properties += len(named)
        values += len(each.get("enum", ()))
        if len(named.keys() - each.get("required", [])) > OPTIONAL:
            raise InvalidGrammarError(
                f"{where[:200]}: over {OPTIONAL} properties may be left out of an object"
            )
        in_place[id(each)] = [id(part) for part in _in_place(schema, each)]
    if _has_cycle(in_place):
        raise InvalidGrammarError(f"{path}: a $ref leads back to itself, with no object or array between")
    SchemaSize(properties).check(path)
    return SchemaSize(properties, values)


def subschemas(schema: Any, path: str = "$") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `schema` and all schemas in it that are objects, each with its path."""
    pending = [(path, schema)]
    while pending:
        path, each = pending.pop()
        if isinstance(each, dict):
            yield path, each
            pending += _parts(each, path)


def target(schema: Any, pointer: Any) -> Any:
    """Return what `pointer`, the value of a `$ref`, refers to within `schema`.

    Raises:
        LookupError: it refers to nothing, or to another document.
    """
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        raise LookupError(pointer)
    at = schema
    for part in pointer.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            at = at[int(name)] if isinstance(at, list) else at[name]
        except (TypeError, ValueError):
            raise LookupError(pointer) from None
    return at


def _parts(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        within = f"{path}.{keyword}"
        if keyword in _OF_MAP and isinstance(value, dict):
            yield from ((f"{within}.{name}", part) for name, part in value.items())
        elif keyword in _OF_LIST and isinstance(value, list):
            yield from ((f"{within}.{at}", part) for at, part in enumerate(value))
        elif keyword in _OF_ONE:
            yield within, value


def _reachable(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what `subschemas` yields, and the schemas that references lead to, each once."""
    pending, seen = [(path, schema)], set()
    while pending:
        path, each = pending.pop()
        if not isinstance(each, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        yield path, each
        pending += _parts(each, path)
        if "$ref" in each:
            pending += [(str(each["$ref"]), part) for part in _referred(schema, each)]


def _referred(schema: Any, each: dict[str, Any]) -> list[Any]:
    try:
        return [target(schema, each["$ref"])] if "$ref" in each else []
    except LookupError:
        return []  # Refused later, when it is compiled.


def _in_place(schema: Any, each: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas that `each` applies to the same value: by `$ref`, `anyOf`, `oneOf` or `allOf`."""
    parts = [*_referred(schema, each), *(part for keyword in _IN_PLACE for part in each.get(keyword, ()))]
    return [part for part in parts if isinstance(part, dict)]


def _has_cycle(edges: dict[int, list[int]]) -> bool:
    """Return whether there is a cycle: whether nodes remain after repeatedly removing those without edges."""
    before: dict[int, list[int]] = {node: [] for node in edges}
    left = {node: len(targets) for node, targets in edges.items()}
    for node, targets in edges.items():
        for each in targets:
            before[each].append(node)
    ends = [node for node, count in left.items() if not count]
    taken = 0
    while ends:
        taken += 1
        for node in before[ends.pop()]:
            left[node] -= 1
            if not left[node]:
                ends.append(node)
    return taken < len(edges)
