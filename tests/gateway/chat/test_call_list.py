"""Calls as a JSON list: what its schema allows, and how such a list is read."""

import json
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.call_list import list_schema
from gateway.chat.marked import MarkedText
from gateway.chat.styles import CALL_LIST
from gateway.core.events import CallPart, Piece, joined_pieces
from wire.grammar import CallableTool, ToolCalls

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
PLACE = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/point"}, "$ref": {"enum": [{"$ref": "#/$defs/point"}]}},
    "required": ["at"],
    "$defs": {"point": POINT},
}
TREE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}


def schema(*tools: CallableTool, single: bool = False) -> dict[str, Any]:
    made = list_schema(ToolCalls(tools=list(tools), required=True, single=single))
    jsonschema.Draft202012Validator.check_schema(made)
    return made


def allows(made: dict[str, Any], *calls: Any) -> bool:
    return jsonschema.Draft202012Validator(made).is_valid(list(calls))


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def test_a_list_has_calls_of_the_tools_and_nothing_else() -> None:
    made = schema(CallableTool("go", PLACE), CallableTool("wait"))
    assert allows(made, call("go", at={"x": 1}))
    assert allows(made, call("wait"), call("go", at={"x": 1}), call("wait", hours=2))
    assert not allows(made)
    assert not allows(made, call("stay"))
    assert not allows(made, call("go"))
    assert not allows(made, call("wait") | {"id": 7})
    assert not allows(made, {"name": "wait"})
    once = schema(CallableTool("wait"), single=True)
    assert allows(once, call("wait"))
    assert not allows(once, call("wait"), call("wait"))


def test_references_are_to_their_own_tools_schema() -> None:
    other = {"$defs": {"point": {"type": "null"}}, "properties": {"at": {"$ref": "#/$defs/point"}}}
    names = {name: {"$ref": "#/$defs/point"} for name in ("default", "const", "enum", "$ref")}
    named = {"properties": names, "default": {"$ref": "#/$defs/no"}, "$defs": {"point": POINT}}
    made = schema(CallableTool("name", named))
    assert made["$defs"]["tool0"]["default"] == {"$ref": "#/$defs/no"}
    for name in names:
        assert allows(made, call("name", **{name: {"x": 1}}))
        assert not allows(made, call("name", **{name: {"x": "1"}}))
    made = schema(CallableTool("go", PLACE), CallableTool("rest", other), CallableTool("tree", TREE))
    assert allows(made, call("go", at={"x": 1}), call("rest", at=None), call("tree", next={"next": {}}))
    assert not allows(made, call("go", at={"x": "1"}))
    assert not allows(made, call("rest", at={"x": 1}))
    assert not allows(made, call("tree", next={"other": {}}))
    assert allows(made, call("go", at={"x": 1}, **{"$ref": {"$ref": "#/$defs/point"}}))


LIST = [call("go", at={"x": 1}, note='"}], ["'), call("wait"), call("go", at={"x": -2})]
WRITTEN = [CallPart(each["name"], json.dumps(each["arguments"])) for each in LIST]


def read(text: str, cuts: list[int], *, single: bool = False) -> tuple[list[Piece], MarkedText]:
    reader = MarkedText(CALL_LIST, ("go", "wait"), single=single)
    pieces: list[Piece] = []
    for begin, end in pairwise([0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]):
        pieces += reader.push(text[begin:end])
    joined = list(joined_pieces([*pieces, *reader.end()]))
    return joined, reader


@pytest.mark.parametrize("indent", [None, 2])
@given(cuts=st.lists(st.integers(0, 400), max_size=12))
def test_a_list_is_read_as_it_comes(cuts: list[int], indent: int | None) -> None:
    text = json.dumps(LIST, indent=indent)
    pieces, reader = read(text, cuts)
    assert all(isinstance(piece, CallPart) for piece in pieces)
    found = [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, CallPart)]
    assert found == [(each["name"], each["arguments"]) for each in LIST]
    assert reader.called
    assert not reader.cut


def test_a_single_call_ends_the_answer() -> None:
    pieces, reader = read(json.dumps(LIST), [], single=True)
    assert pieces == WRITTEN[:1]
    assert reader.over


def test_a_list_that_breaks_off_is_a_call_that_does() -> None:
    text = json.dumps(LIST[:1])
    pieces, reader = read(text[: text.index("note")], [])
    assert pieces == [CallPart("go", '{"at": {"x": 1}, "')]
    assert reader.cut
