import json
from typing import Any

import pytest

from gateway.core.request import (
    Conversation,
    Message,
    NamedTool,
    PastCall,
    Tool,
    ToolOffer,
)
from gateway.errors import InvalidRequestError
from gateway.openai.chat_request import ChatRequest
from gateway.openai.structured import MAX_DEPTH
from wire.limits import TOOLS_LIMIT

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "get_weather", "description": "Tells it.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]
OFFERED = (
    Tool(name="get_weather", description="Tells it.", parameters=SCHEMA),
    Tool(name="now", description=None, parameters={}),
)
CALL: dict[str, Any] = {
    "id": "c1",
    "type": "function",
    "function": {"name": "now", "arguments": '{"zone": null}'},
}


def prompt(**parameters: Any) -> Conversation:
    body = {"model": "m", "messages": [USER], **parameters}
    asked = ChatRequest.read(json.dumps(body).encode()).generations(request_id="r", deadline=0)[0]
    assert isinstance(asked.prompt, Conversation)
    return asked.prompt


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [named(each) for each in names]},
    }


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("parameters", "offer"),
    [
        ({}, None),
        ({"tools": None, "tool_choice": "auto"}, None),
        ({"tools": [], "tool_choice": "none"}, None),
        ({"tools": TOOLS}, ToolOffer(tools=OFFERED)),
        ({"tools": TOOLS, "tool_choice": "none"}, ToolOffer(tools=OFFERED, choice="none")),
        ({"tools": TOOLS, "tool_choice": "required"}, ToolOffer(tools=OFFERED, choice="required")),
        ({"tools": TOOLS, "tool_choice": named("now")}, ToolOffer(tools=OFFERED, choice=NamedTool("now"))),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "now")}, ToolOffer(tools=OFFERED[1:])),
        (
            {"tools": TOOLS, "tool_choice": allowed("required", "now", "get_weather")},
            ToolOffer(tools=OFFERED, choice="required"),
        ),
        ({"tools": TOOLS, "parallel_tool_calls": True}, ToolOffer(tools=OFFERED)),
        ({"tools": TOOLS, "parallel_tool_calls": False}, ToolOffer(tools=OFFERED, single=True)),
        (
            {"functions": [WEATHER], "function_call": {"name": "get_weather"}},
            ToolOffer(
                tools=OFFERED[:1],
                choice=NamedTool("get_weather"),
                single=True,
                field="functions",
                schema_field="functions.{}.parameters",
                choice_field="function_call",
            ),
        ),
    ],
)
def test_what_is_offered(parameters: dict[str, Any], offer: ToolOffer | None) -> None:
    assert prompt(**parameters).offer == offer


def test_agents_with_many_servers_offer_more_tools_than_openai_takes() -> None:
    """OpenAI takes 128."""
    offer = prompt(tools=[named(f"f{number}") for number in range(300)], tool_choice=named("f299")).offer
    assert offer is not None
    assert [tool.name for tool in offer.tools] == [f"f{number}" for number in range(300)]
    assert offer.choice == NamedTool("f299")


def test_faults_are_those_of_the_tool_as_it_was_sent() -> None:
    body = {"model": "m", "messages": [USER], "tools": TOOLS, "tool_choice": allowed("auto", "now")}
    (asked,) = ChatRequest.read(json.dumps(body).encode()).generations(request_id="r", deadline=0)
    assert asked.grammar_field("now") == "tools.1.function.parameters"


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (allowed("auto", "later"), "tool_choice names 'later', which is not among the tools."),
        (
            {"type": "custom"},
            "tool_choice: only choices of the types function and allowed_tools are supported",
        ),
        ({"type": "function"}, "Missing required parameter: tool_choice.function."),
    ],
)
def test_choices_are_refused_by_name(choice: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        prompt(tools=TOOLS, tool_choice=choice)
    assert refused.value.message == told


def test_calls_and_results_in_the_conversation() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": [{"type": "text", "text": "noon"}], "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "function_call": {"name": "now", "arguments": ""}},
        {"role": "function", "content": "one", "name": "now"},
    ]
    assert prompt(messages=messages).messages == (
        Message(role="user", content="hi"),
        Message(
            role="assistant", content="", calls=(PastCall(id="c1", name="now", arguments='{"zone": null}'),)
        ),
        Message(role="tool", content="noon", answers="c1"),
        Message(role="assistant", content="", calls=(PastCall(id="now", name="now", arguments="{}"),)),
        Message(role="tool", content="one", answers="now"),
    )


def calling(**changes: Any) -> dict[str, Any]:
    call = {**CALL, "function": {**CALL["function"], **changes}}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}


def offering(**changes: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {**WEATHER, **changes}}]}


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools.0.type"),
        ({"tools": TOOLS[1:] * 2}, "tools.1.function.name"),
        ({"tools": [named(f"f{number}") for number in range(TOOLS_LIMIT + 1)]}, "tools"),
        (offering(name="get weather"), "tools.0.function.name"),
        (offering(name="get\nweather"), "tools.0.function.name"),
        (offering(name="get\n"), "tools.0.function.name"),
        (offering(name="x" * 129), "tools.0.function.name"),
        (offering(strict="yes"), "tools.0.function.strict"),
        ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 1}, "min_tokens"),
        (offering(parameters=[]), "tools.0.function.parameters"),
        (offering(parameters=deep(MAX_DEPTH + 1)), "tools.0.function.parameters"),
        (offering(more=1), "tools.0.function.more"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("now")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": named("later")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "tool_choice": allowed("none", "now")}, "tool_choice.allowed_tools.mode"),
        ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "now", "later")}, "tool_choice"),
        ({"tool_choice": allowed("required", "now")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "name": "now"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "functions": [WEATHER]}, "functions"),
        ({"tools": TOOLS, "function_call": {"name": "now"}}, "function_call"),
        ({"functions": [WEATHER, WEATHER]}, "functions.1.name"),
        ({"functions": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        (calling(arguments=json.dumps(deep(MAX_DEPTH + 1))), "messages.1.tool_calls.0.function.arguments"),
        (calling(arguments="[" * 50_000), "messages.1.tool_calls.0.function.arguments"),
        (calling(arguments={}), "messages.1.tool_calls.0.function.arguments"),
        (calling(name="a\nb"), "messages.1.tool_calls.0.function.name"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL, CALL]}]}, "messages.0.tool_calls"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
        ({"messages": [{**USER, "function_call": CALL["function"]}]}, "messages.0.function_call"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL], "function_call": CALL["function"]}]},
            "messages.0.function_call",
        ),
        ({"messages": [{"role": "tool", "tool_call_id": "c1"}]}, "messages.0.content"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.name"),
        (
            {"messages": [{"role": "function", "content": "x", "tool_call_id": "c"}]},
            "messages.0.tool_call_id",
        ),
    ],
)
def test_refused_by_name(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        prompt(**parameters)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"a": "b\n\tc"}', '{"a":"b\\n\\tc"}'),
        ('{"a":\n"b\nc', '{"a":"b\\nc"}'),
        ('{"zone": "Eur', '{"zone":"Eur"}'),
        ('{"zone": [1, {"a', '{"zone":[1,{}]}'),
        ("{", "{}"),
        ('{"zone": 1,, "a": 2}', '{"zone": 1,, "a": 2}'),
        ("[]", "[]"),
        ("Hm.", "Hm."),
        ("", "{}"),
        ('{"zone": NaN}', '{"zone": NaN}'),
        ('{"zone": 1e400}', '{"zone": 1e400}'),
        ('{"zone": [-1e400, "Eur', '{"zone": [-1e400, "Eur'),
        (r'{"zone": "\ud800"}', r'{"zone": "\ud800"}'),
    ],
)
def test_arguments_of_the_past_may_be_no_object(written: str, arguments: str) -> None:
    """A model may write such, and an agent sends them back with an error for a result."""
    (call,) = prompt(**calling(arguments=written)).messages[1].calls
    assert call.arguments == arguments


def test_depth_is_counted_to_the_limit() -> None:
    offer = prompt(**offering(parameters=deep(MAX_DEPTH))).offer
    assert offer is not None
    assert offer.tools[0].parameters == deep(MAX_DEPTH)
