import msgspec
import pytest

from wire.grammar import CallableTool, ToolCalls, decode_choices, decode_tool_calls


def test_calls_come_back() -> None:
    calls = ToolCalls(
        tools=[CallableTool("a", {"type": "object"}, strict=True), CallableTool("b")],
        required=True,
        single=True,
    )
    assert decode_tool_calls(msgspec.json.encode(calls).decode()) == calls
    assert decode_choices('["a","\\n"]') == ["a", "\n"]


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
