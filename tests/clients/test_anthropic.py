"""The official Anthropic SDK over `/v1/messages`, on the model that was trained to use tools."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

MODEL = "chatglm3-demo"
QUESTION = "襄阳今天天气怎么样？"
HELLO: list[Any] = [{"role": "user", "content": "你好，你好！"}]
TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
]
# The SDK has no arguments for parameters of sampling any more; the API still takes them.
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 160, "extra_body": {"temperature": 0}}


@pytest.fixture
def client(demo_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo_url, api_key="unused", max_retries=0) as client:
        yield client


def test_a_streamed_message_is_the_whole_one(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASKED, system="Be brief.", messages=HELLO)
    (block,) = whole.content
    assert (block.type, whole.stop_reason) == ("text", "end_turn")
    with client.messages.stream(**ASKED, system="Be brief.", messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == block.text
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
    counted = client.messages.count_tokens(model=MODEL, system="Be brief.", messages=HELLO)
    for usage in (whole.usage, streamed.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_its_result_told(client: anthropic.Anthropic, streamed: bool) -> None:
    def ask(messages: list[Any]) -> Any:
        if not streamed:
            return client.messages.create(**ASKED, messages=messages, tools=TOOLS)
        with client.messages.stream(**ASKED, messages=messages, tools=TOOLS) as stream:
            return stream.get_final_message()

    said: list[Any] = [{"role": "user", "content": QUESTION}]
    called = ask(said)
    (call,) = called.content
    assert (called.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    assert call.input == {"city": "襄阳"}
    sunny = '{"city": "襄阳", "temperature": 21, "condition": "晴"}'
    result = {"type": "tool_result", "tool_use_id": call.id, "content": sunny}
    said += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert ask(said).content[0].text == "襄阳的天气：晴，21 °C。"


def test_a_tool_that_must_be_called(client: anthropic.Anthropic) -> None:
    forced = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    called = client.messages.create(**ASKED, messages=HELLO, tools=TOOLS, tool_choice=forced)
    (call,) = called.content
    assert (called.stop_reason, call.name, list(call.input)) == ("tool_use", "get_weather", ["city"])


def test_limits_and_stop_sequences(client: anthropic.Anthropic) -> None:
    short = client.messages.create(**ASKED | {"max_tokens": 2}, messages=HELLO)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)
    stopped = client.messages.create(**ASKED, messages=HELLO, stop_sequences=["！"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "！")


def test_errors_are_the_sdks_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**ASKED | {"model": "nobody"}, messages=HELLO)
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id == missing.value.body["request_id"]
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**ASKED | {"extra_body": {"temperature": 9}}, messages=HELLO)
