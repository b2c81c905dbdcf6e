"""Requests of `/v1/messages` as conversations and sampling parameters."""

import base64
from typing import Any

import pytest

from gateway.anthropic.request import CountTokensRequest, MessagesRequest
from gateway.core.request import Conversation, Image, Message, NamedTool, PastCall
from gateway.errors import InvalidRequestError
from gateway.openai.answer import encode
from gateway.openai.document import Reading

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
PNG = base64.b64encode(b"picture").decode()


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def use(name: str = "f", call: str = "t1", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": name, "input": arguments}


def result(content: Any = None, call: str = "t1", **more: Any) -> dict[str, Any]:
    given = {} if content is None else {"content": content}
    return {"type": "tool_result", "tool_use_id": call, **given, **more}


BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"


def body(*messages: Any, **parameters: Any) -> dict[str, Any]:
    said = [each if isinstance(each, dict) else {"role": "user", "content": each} for each in messages]
    return {
        "model": "glm",
        "max_tokens": 9,
        "messages": said or [{"role": "user", "content": "hi"}],
    } | parameters


def read(*messages: Any, reading: Reading | None = None, **parameters: Any) -> MessagesRequest:
    return MessagesRequest.read(encode(body(*messages, **parameters)), reading or Reading())


def conversation(*messages: Any, **parameters: Any) -> Conversation:
    return read(*messages, **parameters).continued


def refused(*messages: Any, **parameters: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refused:
        read(*messages, **parameters)
    return refused.value


def test_messages_of_an_assistant_in_a_row_are_one() -> None:
    """As at Anthropic; a call in one of them was refused for want of its result behind it."""
    said = conversation(
        "a",
        {"role": "assistant", "content": [text("b"), use(call="t1")]},
        {"role": "assistant", "content": [use(call="t2")]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": [result("1", "t1"), result("2", "t2")]},
    ).messages
    assert [each.role for each in said] == ["user", "assistant", "tool", "tool"]
    assert said[1].content == "b\n\nc"
    assert [each.id for each in said[1].calls] == ["t1", "t2"]
    assert said[1].field == "messages.1"


def test_messages_of_a_user_in_a_row_are_one() -> None:
    """As at Anthropic; templates that demand alternating roles refused them."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    said = conversation(
        "a",
        {"role": "assistant", "content": [use(call="t1"), use(call="t2")]},
        [result("1", "t1")],
        [result("2", "t2"), text("b")],
        "",
        [image, text("c"), text("d")],
        {"role": "assistant", "content": "e"},
        "f",
        "g",
    ).messages
    assert [(each.role, each.content, each.field) for each in said] == [
        ("user", "a", "messages.0"),
        ("assistant", "", "messages.1"),
        ("tool", "1", "messages.2.content.0"),
        ("tool", "2", "messages.3.content.0"),
        ("user", "b\n\ncd", "messages.3"),
        ("assistant", "e", "messages.6"),
        ("user", "f\n\ng", "messages.7"),
    ]
    assert [(each.at, each.field) for each in said[4].images] == [(1, "messages.5.content.0")]


def test_messages_of_text() -> None:
    said = conversation(
        "a",
        {"role": "assistant", "content": "b"},
        [text("c"), text("d")],
        {"role": "system", "content": [text("e")]},
        [],
        system=[text("S"), text("T")],
    )
    assert said.messages == (
        Message(role="system", content="ST"),
        Message(role="user", content="a"),
        Message(role="assistant", content="b"),
        Message(role="user", content="cd"),
        Message(role="system", content="e"),
        Message(role="user", content=""),
    )
    assert [message.field for message in said.messages[:2]] == ["system", "messages.0"]
    assert conversation("a", system="S").messages[0].content == "S"
    assert len(conversation("a", system="").messages) == 1


def test_calls_and_their_results() -> None:
    calls = [text("See:"), use(a=1), use("g", "t2"), text("Or:")]
    said = conversation(
        "a",
        {"role": "assistant", "content": calls},
        [result([text("x"), text("y")]), result(call="t2"), text("and"), text(" now?")],
    )
    assert said.messages[1:] == (
        Message(
            role="assistant",
            content="See:\n\nOr:",
            calls=(
                PastCall(id="t1", name="f", arguments='{"a":1}'),
                PastCall(id="t2", name="g", arguments="{}"),
            ),
        ),
        Message(role="tool", content="x\ny", answers="t1"),
        Message(role="tool", content="", answers="t2"),
        Message(role="user", content="and now?"),
    )
    assert [message.field for message in said.messages[2:]] == [
        "messages.2.content.0",
        "messages.2.content.1",
        "messages.2",
    ]


def test_images() -> None:
    sources = (
        {"type": "base64", "media_type": "image/webp", "data": PNG},
        {"type": "url", "url": f"data:image/png;base64,{PNG}"},
    )
    (message,) = conversation([text("ab"), *({"type": "image", "source": each} for each in sources)]).messages
    assert message.images == tuple(
        Image(url=f"data:image/{kind};base64,{PNG}", at=2) for kind in ("webp", "png")
    )
    assert [image.field for image in message.images] == ["messages.0.content.1", "messages.0.content.2"]
    for source, path in (
        ({"type": "base64", "media_type": "image/png", "data": "?"}, "source.data"),
        ({"type": "base64", "media_type": "text/html", "data": PNG}, "source.media_type"),
        ({"type": "url", "url": "https://example.org/a.png"}, "source.url"),
        ({"type": "file", "file_id": "f"}, "source"),
    ):
        assert refused([{"type": "image", "source": source}]).param == f"messages.0.content.0.{path}"


def test_reasoning_is_for_templates_that_read_it() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        text("b"),
    ]
    said = ("a", {"role": "assistant", "content": blocks}, "c")
    reading = Reading()
    assert read(*said, reading=reading).continued.messages[1] == Message(role="assistant", content="b")
    assert list(reading.ignored) == ["messages.content.thinking", "messages.content.redacted_thinking"]
    reads = Reading(reads=frozenset({"reasoning_content"}))
    assert read(*said, reading=reads).continued.messages[1].reasoning == "hm"
    assert list(reads.ignored) == ["messages.content.redacted_thinking"]


def test_tools() -> None:
    offer = conversation(tools=[TOOL | {"type": "custom", "strict": True}]).offer
    assert offer is not None
    (tool,) = offer.tools
    assert (tool.name, tool.description, tool.parameters, tool.strict) == ("f", "d", {"type": "object"}, True)
    assert (offer.choice, offer.single) == ("auto", False)
    assert (offer.field, offer.schema_field.format(0)) == ("tools", "tools.0.input_schema")


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, NamedTool("f")),
    ],
)
def test_tool_choice(choice: dict[str, Any], chosen: Any) -> None:
    offer = conversation(tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True}).offer
    assert offer is not None
    assert (offer.choice, offer.single) == (chosen, True)


def test_sampling() -> None:
    request = read(stop_sequences=["x", "y"], temperature=0.5, top_p=0.5, top_k=3, seed=7)
    (asked,) = request.generations(request_id="r", deadline=1.0)
    assert (asked.max_tokens, asked.stop, asked.temperature) == (9, ["x", "y"], 0.5)
    assert (asked.top_p, asked.top_k, asked.seed) == (0.5, 3, 7)
    assert read(stop="z", stop_sequences=["x"]).sampling()["stop"] == ["z", "x"]


def test_a_schema_of_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    grammar = read(output_config={"format": {"type": "json_schema", "schema": schema}}).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.field) == ("json_schema", "output_config.format.schema")


def test_advice_reaches_templates_that_read_it() -> None:
    advice = {"thinking": {"type": "enabled"}, "output_config": {"effort": "low"}}
    reads = Reading(reads=frozenset({"enable_thinking", "reasoning_effort"}))
    switches = {"enable_thinking": True, "reasoning_effort": "low"}
    assert read(reading=reads, **advice).continued.switches == switches
    off = read(reading=reads, thinking={"type": "disabled"}).continued
    assert off.switches == {"enable_thinking": False}
    assert not reads.ignored
    reading = Reading()
    assert read(reading=reading, **advice).continued.switches == {}
    assert list(reading.ignored) == ["thinking", "output_config.effort"]


def test_what_has_no_effect_is_named() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    reading = Reading()
    read(
        "a",
        {"role": "assistant", "content": [use() | cached]},
        [result([text("x") | cached], is_error=True), text("b") | cached],
        reading=reading,
        system=[text("s") | cached],
        tools=[TOOL | cached],
        thinking={"type": "enabled", "budget_tokens": 1024},
        context_management={"edits": [1]},
        metadata={"user_id": None},
        service_tier="auto",
    )
    assert set(reading.ignored) == {
        "messages.content.cache_control",
        "messages.content.content.cache_control",
        "messages.content.is_error",
        "system.cache_control",
        "tools.cache_control",
        "thinking",
        "thinking.budget_tokens",
        "context_management",
    }
    with pytest.raises(InvalidRequestError):
        read(reading=Reading(strict=True), context_management={"edits": [1]})


@pytest.mark.parametrize(
    ("messages", "parameters", "param"),
    [
        ((), {"max_tokens": None}, "max_tokens"),
        ((), {"max_tokens": 0}, "max_tokens"),
        ((), {"messages": []}, "messages"),
        ((), {"temperature": 3}, "temperature"),
        ((), {"stop_sequences": [""]}, "stop_sequences.0"),
        ((), {"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ((), {"stop_sequences": ["a"] * 9, "stop": ["b"] * 8}, "stop_sequences"),
        ((), {"n": 2}, "n"),
        ((), {"regex": "a+"}, "regex"),
        ((), {"container": "c"}, "container"),
        ((), {"mcp_servers": [{"url": "u"}]}, "mcp_servers"),
        ((), {"output_format": {"type": "json_schema"}}, "output_format"),
        ((), {"compaction": {"type": "summarize"}}, "compaction"),
        ((), {"thread": {"type": "create"}}, "thread"),
        ((), {"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ((), {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ((), {"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ((), {"tools": [TOOL, TOOL]}, "tools.1.name"),
        ((), {"tool_choice": {"type": "any"}}, "tool_choice"),
        ((), {"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ((), {"tools": [TOOL], "tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name"),
        ((), {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ((), {"system": [{"type": "image"}]}, "system.0.type"),
        ((["a"],), {}, "messages.0.content.0"),
        (([{"type": "document"}],), {}, "messages.0.content.0"),
        (([use()],), {}, "messages.0.content"),
        (("a", {"role": "assistant", "content": [result()]}, "b"), {}, "messages.1.content"),
        (("a", {"role": "assistant", "content": [use(), use()]}, "b"), {}, "messages.1.content.1.id"),
        (
            ("a", {"role": "assistant", "content": [use() | {"input": "x"}]}, "b"),
            {},
            "messages.1.content.0.input",
        ),
        (([result([{"type": "image"}])],), {}, "messages.0.content.0.content.0.type"),
        (("a", {"role": "assistant", "content": "b"}), {}, "messages.1"),
    ],
)
def test_what_is_refused_is_named(messages: Any, parameters: dict[str, Any], param: str) -> None:
    assert refused(*messages, **parameters).param == param


def test_a_prompt_to_be_counted() -> None:
    asked = body(system="S", tools=[TOOL])
    del asked["max_tokens"]
    request = CountTokensRequest.read(encode(asked), Reading())
    work = request.tokenization(request_id="r", deadline=1.0)
    assert work.prompt == read(system="S", tools=[TOOL]).continued
    with pytest.raises(InvalidRequestError):
        CountTokensRequest.read(encode(asked | {"tool_choice": {"type": "tool", "name": "g"}}), Reading())


@pytest.mark.parametrize("system", [[text(BILLING), text("S")], BILLING + "\nS"])
def test_what_claude_code_tells_its_maker_is_no_part_of_the_prompt(system: Any) -> None:
    """It differs in each request, and stands before all that the prefix cache could find."""
    reading = Reading()
    said = read(system=system, reading=reading).continued.messages
    assert said[0].content == "S"
    assert list(reading.ignored) == ["system.x-anthropic-billing-header"]
    assert read(system=f"Not {BILLING}").continued.messages[0].content == f"Not {BILLING}"
