from typing import Any

import pytest

from gateway.chat.value_types import leaf_values, leaves, referred, types_of, within

ROOT: dict[str, Any] = {
    "$defs": {
        "text": {"type": "string"},
        "choice": {"enum": ["1", None]},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "integer"}]},
        "only": {"$ref": "#/$defs/only"},
        "a/b~": {"type": "boolean"},
    },
    "type": "object",
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"$ref": "#/$defs/text"}, {"string"}),
        ({"$ref": "#/$defs/choice", "description": "one"}, {"string", "null"}),
        ({"$ref": "#/$defs/loop"}, {"integer"}),
        ({"$ref": "#/$defs/only"}, {""}),
        ({"$ref": "#/$defs/a~1b~0"}, {"boolean"}),
        ({"$ref": "#"}, {"object"}),
        ({"$ref": "#/$defs/gone"}, {""}),
        ({"$ref": "other.json#/x"}, {""}),
        ({"allOf": [{"$ref": "#/$defs/text"}], "default": "a"}, {"string"}),
        ({"oneOf": [{"$ref": "#/$defs/text"}], "discriminator": {"propertyName": "k"}}, {"string"}),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, {""}),
        (
            {"oneOf": [{"const": 1}, {"const": [1]}, {"const": {"a": 1}}]},
            {"integer", "number", "array", "object"},
        ),
        ({"const": True}, {"boolean"}),
        ({"type": "string", "anyOf": [{"type": "integer"}]}, {"string"}),
        ({"$ref": "#/$defs/text", "minLength": 1}, {""}),
        ({"enum": []}, {""}),
        (True, {""}),
        (None, {""}),
    ],
)
def test_the_types_of_a_value(schema: Any, types: set[str]) -> None:
    assert types_of(schema, ROOT) == types


def test_the_values_that_a_schema_names() -> None:
    (leaf,) = leaves({"$ref": "#/$defs/choice"}, ROOT)
    assert leaf_values(leaf) == ["1", None]
    assert leaf_values({"const": None}) == [None]
    assert leaf_values({"type": "string"}) is None
    assert leaf_values({"type": "string", "enum": ["a", None, 1]}) == ["a"]
    assert leaf_values({"type": ["integer", "null"], "enum": ["a", None, 1]}) == [None, 1]
    assert referred("#/$defs/text", ROOT) == {"type": "string"}


def test_references_are_followed_once() -> None:
    """Each definition refers to all others, or twice to the next: few bytes, and many ways through them."""
    names = [f"d{place}" for place in range(12)]
    every = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    assert types_of(every, {"$defs": dict.fromkeys(names, every)}) == {""}
    chain: dict[str, Any] = {
        f"d{place}": {"anyOf": [{"$ref": f"#/$defs/d{place + 1}"}] * 2} for place in range(50)
    }
    assert types_of({"$ref": "#/$defs/d0"}, {"$defs": chain | {"d50": {"type": "string"}}}) == {"string"}
    chain = {f"d{place}": {"$ref": f"#/$defs/d{place + 1}"} for place in range(2000)}
    assert types_of({"$ref": "#/$defs/d0"}, {"$defs": chain}) == {""}, "too many"


def test_what_is_within_a_schema() -> None:
    schema = {
        "properties": {"pattern": {"type": "string", "pattern": "a"}},
        "items": [{"enum": [{"pattern": "b"}]}, {"not": {"format": "c"}}],
    }
    found = [*within(schema)]
    assert {"type": "string", "pattern": "a"} in found
    assert {"format": "c"} in found
    assert {"pattern": "b"} not in found
    assert sum("pattern" in each for each in found) == 1
