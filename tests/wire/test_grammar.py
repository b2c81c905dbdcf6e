import jsonschema
import msgspec
import pytest

from wire.grammar import RESTRICTIONS, CallableTool, ToolCalls, decode_choices, decode_tool_calls


def test_calls_come_back() -> None:
    calls = ToolCalls(
        tools=[CallableTool("a", {"type": "object"}, strict=True), CallableTool("b")],
        required=True,
        single=True,
    )
    assert decode_tool_calls(msgspec.json.encode(calls).decode()) == calls
    assert decode_choices('["a","\\n"]') == ["a", "\n"]


@pytest.mark.parametrize("draft", ["3", "4", "6", "7", "201909", "202012"])
def test_all_that_a_draft_validates_is_known_to_restrict(draft: str) -> None:
    validator = getattr(jsonschema, f"Draft{draft}Validator")
    assert validator.VALIDATORS.keys() - RESTRICTIONS == set()
    annotations = {"title", "description", "default", "examples", "$id", "$schema", "$comment", "$defs"}
    assert not RESTRICTIONS & {*annotations, "definitions", "discriminator", "contentEncoding"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"tools": []}',
        '{"tools": [{"name": ""}]}',
        '{"tools": [{"name": "a", "parameters": true}]}',
        '{"tools": [{"name": "a"}], "x": 1}',
        '{"tools": [{"name": "a", "parameters": ' + "[" * 10_000,
    ],
)
def test_what_is_no_rule_of_calls_is_refused(text: str) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_tool_calls(text)


@pytest.mark.parametrize("text", ["", "[]", "[1]", '[""]', "{}", "[" + ",".join(['"a"'] * 1025) + "]"])
def test_what_is_no_list_of_choices_is_refused(text: str) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_choices(text)
