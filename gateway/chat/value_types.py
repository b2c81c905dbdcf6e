"""What types a JSON schema lets a value have, for calls whose values are written without quotes."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from wire.grammar import RESTRICTIONS

_FOLLOWED: Final = ("$ref", "anyOf", "oneOf", "allOf")
NAMED: Final = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
"""Keywords whose values are schemas by names."""
VALUES: Final = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are no schemas, whatever they look like."""
_MOST: Final = 256
"""Schemas that are looked at for one value: those who have more say nothing of it."""
_JSON: Final[Mapping[type, frozenset[str]]] = {
    bool: frozenset({"boolean"}),
    str: frozenset({"string"}),
    type(None): frozenset({"null"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"integer", "number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}


def leaves(schema: Any, root: Any) -> list[Mapping[str, Any]]:
    """Return the schemas of which a value has one: references and alternatives are followed, each once.

    One that says more beside these is none of them itself.

    Args:
        schema: of the value.
        root: what references are within (`#/...`).
    """
    found: list[Mapping[str, Any]] = []
    seen: set[str] = set()
    waiting = [schema]
    for _ in range(_MOST):
        if not waiting:
            return found or [{}]
        node = waiting.pop()
        node = node if isinstance(node, Mapping) else {}
        key = next((each for each in _FOLLOWED if each in node), "")
        target = node.get(key)
        if not node.keys() & RESTRICTIONS - {key}:
            if key == "$ref" and isinstance(target, str):
                if target not in seen:
                    waiting.append(referred(target, root))
                    seen.add(target)
                continue
            if isinstance(target, list) and target and (key != "allOf" or len(target) == 1):
                waiting += reversed(target)
                continue
        found.append(node)
    return [{}]


def types_of(schema: Any, root: Any) -> set[str]:
    """Return the names of the types that a value may have; an empty one where a schema does not say."""
    return {name for leaf in leaves(schema, root) for name in leaf_types(leaf)}


def leaf_types(leaf: Mapping[str, Any]) -> set[str]:
    """Return the same of one of `leaves`."""
    values = leaf_values(leaf)
    if "type" not in leaf and values is not None:
        return {name for value in values for name in _JSON[type(value)]}
    types = leaf.get("type", "")
    return {str(each) for each in (types if isinstance(types, list) else [types])}


def leaf_values(leaf: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that one of `leaves` names, of its types; None: any of its types."""
    values = [leaf["const"]] if "const" in leaf else leaf.get("enum")
    if not isinstance(values, list):
        return None
    types = leaf.get("type")
    if types is None:
        return values or None
    names = {str(each) for each in (types if isinstance(types, list) else [types])}
    return [value for value in values if _JSON[type(value)] & names]


def referred(reference: str, root: Any) -> Any:
    """Return what a reference is to; an empty schema, if nothing is there."""
    beginning, *keys = reference.split("/")
    found = root if beginning == "#" else {}
    for key in keys:
        name = key.replace("~1", "/").replace("~0", "~")
        found = found.get(name, {}) if isinstance(found, Mapping) else {}
    return found


def within(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all those in it."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, Mapping):
            yield node
            for key, value in node.items():
                if key in NAMED and isinstance(value, Mapping):
                    waiting += value.values()
                elif key in RESTRICTIONS and key not in VALUES:
                    waiting.append(value)
