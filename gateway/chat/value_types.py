"""What types a JSON schema lets a value have, for calls whose values are written without quotes."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

_JSON: Final = {
    bool: "boolean", str: "string", type(None): "null", int: "number", float: "number", list: "array",
    dict: "object",
}  # fmt: skip


def leaves(schema: Any, root: Any, seen: tuple[str, ...] = ()) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas of which a value has one: alternatives and references are followed.

    Args:
        schema: of the value.
        root: what references are within (`#/...`).
        seen: references that were followed already.
    """
    schema = schema if isinstance(schema, Mapping) else {}
    reference = schema.get("$ref")
    if isinstance(reference, str):
        again = reference in seen
        yield from leaves({} if again else referred(reference, root), root, (*seen, reference))
        return
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        if isinstance(options, list) and options and (key != "allOf" or len(options) == 1):
            for option in options:
                yield from leaves(option, root, seen)
            return
    yield schema


def types_of(schema: Any, root: Any) -> set[str]:
    """Return the names of the types that a value may have; an empty one where a schema does not say."""
    return {name for leaf in leaves(schema, root) for name in leaf_types(leaf)}


def leaf_types(leaf: Mapping[str, Any]) -> set[str]:
    """Return the same of one of `leaves`."""
    values = leaf_values(leaf)
    if "type" not in leaf and values is not None:
        return {_JSON[type(value)] for value in values}
    types = leaf.get("type", "")
    return {str(each) for each in (types if isinstance(types, list) else [types])}


def leaf_values(leaf: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that one of `leaves` names; None: any of its type."""
    if "const" in leaf:
        return [leaf["const"]]
    values = leaf.get("enum")
    return values if isinstance(values, list) and values else None


def referred(reference: str, root: Any) -> Any:
    """Return what a reference is to; an empty schema, if nothing is there."""
    beginning, *keys = reference.split("/")
    found = root if beginning == "#" else {}
    for key in keys:
        name = key.replace("~1", "/").replace("~0", "~")
        found = found.get(name, {}) if isinstance(found, Mapping) else {}
    return found
