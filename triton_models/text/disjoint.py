"""Determines whether the branches of a `oneOf` exclude each other, as far as that is easy."""

import json
from typing import Any


def disjoint(branches: list[Any]) -> bool:
    """Return whether types or constants show that no value fits two branches; if in doubt, False."""
    kinds = [each.get("type") if isinstance(each, dict) else None for each in branches]
    if all(isinstance(kind, str) for kind in kinds):
        told = ["number" if kind == "integer" else kind for kind in kinds]
        if len(set(told)) == len(told):
            return True
    constants = [_constants(each) for each in branches]
    shared = set(constants[0]).intersection(*constants[1:])
    return any(len({values[name] for values in constants}) == len(branches) for name in shared)


def _constants(schema: Any) -> dict[str, str]:
    """Return the required properties of an object that allow only one value, with that value as JSON."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return {}
    found = {}
    for name in schema.get("required", []):
        each = schema.get("properties", {}).get(name)
        values = [each["const"]] if isinstance(each, dict) and "const" in each else []
        if isinstance(each, dict) and len(each.get("enum", [])) == 1:
            values = each["enum"]
        if values:
            found[name] = json.dumps(_canonical(values[0]), sort_keys=True)
    return found


def _canonical(value: Any) -> Any:
    """Return `value` such that what JSON Schema takes for equal (`1` and `1.0`) is written in one way."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(each) for each in value]
    if isinstance(value, dict):
        return {name: _canonical(each) for name, each in value.items()}
    return value
