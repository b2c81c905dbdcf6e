"""Which branches of a `oneOf` are seen to exclude each other."""

from typing import Any

import pytest

from triton_models.errors import InvalidGrammarError
from triton_models.text.literal_grammar import LiteralGrammar
from wire.grammar import CallableTool


def arguments(branches: list[Any], *, strict: bool) -> str:
    parameters = {"type": "object", "properties": {"a": {"oneOf": branches}}, "required": ["a"]}
    return LiteralGrammar(CallableTool("f", parameters, strict=strict), "t0").arguments()


def told_apart_by(constants: list[Any]) -> list[Any]:
    return [
        {"type": "object", "required": ["kind"], "properties": {"kind": {"const": constant}}}
        for constant in constants
    ]


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "string"}, {"type": "integer"}, {"type": "object"}],
        told_apart_by(["a", "b"]),
        told_apart_by([1, "1"]),
        told_apart_by([1, True]),
        told_apart_by([0, None, False]),
        [
            *told_apart_by(["a"]),
            {"type": "object", "required": ["kind"], "properties": {"kind": {"enum": ["b"]}}},
        ],
        [*told_apart_by(["a"]), {"type": "object", "properties": {"kind": {"const": "b"}}}],
        [
            *told_apart_by(["a"]),
            {"type": "object", "required": ["kind"], "properties": {"kind": {"enum": ["b", "c"]}}},
        ],
    ],
)
def test_disjoint(branches: list[Any]) -> None:
    assert arguments(branches, strict=True)


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "number"}, {"type": "integer"}],
        [{"type": "string"}, {}],
        [{"type": "string"}, True],
        [*told_apart_by(["a"]), {"type": "object", "required": ["kind"], "properties": {"kind": True}}],
        told_apart_by(["a", "a"]),
        told_apart_by([1, 1.0]),
        told_apart_by([1, 1.5]),  # for llguidance as well
        told_apart_by([[1], [1, 2]]),
        told_apart_by([[1, {"x": 2.0}], [1.0, {"x": 2}]]),
        told_apart_by([{"x": 1, "y": 2}, {"y": 2, "x": 1}]),
    ],
)
def test_in_doubt_they_are_not(branches: list[Any]) -> None:
    with pytest.raises(InvalidGrammarError, match=r"parameters\.properties\.a .*: oneOf"):
        arguments(branches, strict=True)
    assert arguments(branches, strict=False)
