from dataclasses import replace

import pytest

from gateway.chat.conversation import (
    answer_metadata,
    call_rules,
    callable_names,
    last_calls,
)
from gateway.core.request import (
    Grammar,
    NamedTool,
    Tool,
    ToolChoice,
    ToolOffer,
)
from wire.grammar import Grammar as WireGrammar

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


def test_a_required_call_begins_in_the_prompt_where_there_is_one_tool() -> None:
    assert answer_metadata(ToolOffer(tools=TOOLS[:1], choice="required")) == "a"
    assert answer_metadata(ToolOffer(tools=TOOLS, choice="required")) is None


def test_calls_that_have_to_be_made_or_that_are_strict_are_held_to_rules() -> None:
    strict = replace(TOOLS[1], strict=True)
    for offer, rules in (
        (ToolOffer(tools=TOOLS), None),
        (ToolOffer(tools=(strict,), choice="none"), None),
        (ToolOffer(tools=TOOLS, choice="required"), (["a", "b"], True, False)),
        (ToolOffer(tools=TOOLS, choice="required", single=True), (["a", "b"], True, True)),
        (ToolOffer(tools=TOOLS, choice=NamedTool("b")), (["b"], True, True)),
        (ToolOffer(tools=(TOOLS[0], strict)), (["a", "b"], False, False)),
    ):
        found = call_rules(offer)
        told = None if found is None else ([tool.name for tool in found.tools], found.required, found.single)
        assert told == rules
    found = call_rules(ToolOffer(tools=(TOOLS[0], strict)))
    assert found is not None
    assert [tool.strict for tool in found.tools] == [False, True]


def test_text_with_a_grammar_holds_calls_to_rules_where_there_may_be_text() -> None:
    grammar = Grammar(kind="json_object", field="response_format")
    assert call_rules(ToolOffer(tools=TOOLS, choice="none"), grammar) is None
    for choice in ("required", NamedTool("b")):
        offer = ToolOffer(tools=TOOLS, choice=choice)
        assert call_rules(offer, grammar) == call_rules(offer)
    found = call_rules(ToolOffer(tools=TOOLS), grammar)
    assert found is not None
    assert (found.text, found.required) == (WireGrammar("json_object"), False)


def test_a_single_call_ends_the_answer() -> None:
    assert last_calls(ToolOffer(tools=TOOLS, single=True)) == ["a", "b"]
    assert last_calls(ToolOffer(tools=TOOLS, choice="none", single=True)) == []
