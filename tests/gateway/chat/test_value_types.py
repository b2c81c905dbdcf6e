from typing import Any

import pytest

from gateway.chat.value_types import leaf_values, leaves, referred, types_of

ROOT: dict[str, Any] = {
    "$defs": {
        "text": {"type": "string"},
        "choice": {"enum": ["1", None]},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "integer"}]},
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
        ({"$ref": "#/$defs/loop"}, {"", "integer"}),
        ({"$ref": "#/$defs/a~1b~0"}, {"boolean"}),
        ({"$ref": "#"}, {"object"}),
        ({"$ref": "#/$defs/gone"}, {""}),
        ({"$ref": "other.json#/x"}, {""}),
        ({"allOf": [{"$ref": "#/$defs/text"}], "default": "a"}, {"string"}),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, {""}),
        ({"oneOf": [{"const": 1}, {"const": [1]}, {"const": {"a": 1}}]}, {"number", "array", "object"}),
        ({"const": True}, {"boolean"}),
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
    assert referred("#/$defs/text", ROOT) == {"type": "string"}
