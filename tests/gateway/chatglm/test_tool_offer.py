import pytest

from gateway.chatglm.tool_offer import answer_metadata, callable_names, last_calls
from gateway.errors import InvalidRequestError
from gateway.generation import NamedTool, Tool, ToolChoice, ToolOffer

TOOLS = tuple(Tool(name=name, description=None, parameters={}) for name in ("a", "b"))


@pytest.mark.parametrize(
    ("choice", "metadata", "names", "last"),
    [
        ("auto", None, ["a", "b"], []),
        ("none", "", [], []),
        (NamedTool("b"), "b", ["b"], ["b"]),
    ],
)
def test_choices(choice: ToolChoice, metadata: str | None, names: list[str], last: list[str]) -> None:
    offer = ToolOffer(tools=TOOLS, choice=choice)
    assert (answer_metadata(offer), callable_names(offer), last_calls(offer)) == (metadata, names, last)


def test_a_required_call_is_enforced_where_there_is_one_tool() -> None:
    assert answer_metadata(ToolOffer(tools=TOOLS[:1], choice="required")) == "a"
    with pytest.raises(InvalidRequestError, match="Name the tool") as refused:
        answer_metadata(ToolOffer(tools=TOOLS, choice="required"))
    assert refused.value.param == "tool_choice"


def test_a_single_call_ends_the_answer() -> None:
    assert last_calls(ToolOffer(tools=TOOLS, single=True)) == ["a", "b"]
    assert last_calls(ToolOffer(tools=TOOLS, choice="none", single=True)) == []
