"""`/v1/messages` on the demo model: what the chat route answers, in Anthropic's words."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.test_tools import QUESTIONS, SUNNY, TOOLS

pytestmark = pytest.mark.e2e

MODEL = "chatglm3-demo"
GREETING: list[Any] = [{"role": "user", "content": "Good morning to you!"}]
OFFERED = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]


def ask(
    client: openai.OpenAI, messages: list[Any], path: str = "messages", **parameters: Any
) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 160, "temperature": 0, "messages": messages} | parameters
    return httpx.post(f"{client.base_url}{path}", json=body, timeout=60)


def test_whole_streamed_and_counted_are_those_of_the_chat(demo: openai.OpenAI) -> None:
    whole = ask(demo, GREETING).json()
    chat = demo.chat.completions.create(model=MODEL, messages=GREETING, temperature=0)
    assert whole["content"] == [{"type": "text", "text": chat.choices[0].message.content}]
    assert whole["stop_reason"] == "end_turn"
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat.usage.prompt_tokens
    assert usage["output_tokens"] == chat.usage.completion_tokens
    assert ask(demo, GREETING, "messages/count_tokens").json() == {"input_tokens": chat.usage.prompt_tokens}
    lines = ask(demo, GREETING, stream=True).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts) == whole["content"][0]["text"]
    assert events[-2]["usage"]["output_tokens"] == usage["output_tokens"]


@pytest.mark.parametrize(("question", "name", "arguments"), QUESTIONS)
def test_a_question_is_a_call(question: str, name: str, arguments: Any, demo: openai.OpenAI) -> None:
    answer = ask(demo, [{"role": "user", "content": question}], tools=OFFERED).json()
    (call,) = answer["content"]
    assert (answer["stop_reason"], call["name"], call["input"]) == ("tool_use", name, arguments)


def test_the_result_of_a_call_is_answered(demo: openai.OpenAI) -> None:
    said: list[Any] = [{"role": "user", "content": QUESTIONS[0][0]}]
    called = ask(demo, said, tools=OFFERED).json()
    result = {"type": "tool_result", "tool_use_id": called["content"][0]["id"], "content": SUNNY}
    said += [{"role": "assistant", "content": called["content"]}, {"role": "user", "content": [result]}]
    answer = ask(demo, said, tools=OFFERED).json()
    assert answer["content"] == [{"type": "text", "text": "襄阳的天气：晴，21 °C。"}]


def test_a_context_that_is_exceeded_is_told_in_the_words_that_agents_look_for(demo: openai.OpenAI) -> None:
    """By them Claude Code and others shorten the conversation, or ask again for fewer tokens."""
    tokens = ask(demo, GREETING, "messages/count_tokens").json()["input_tokens"]
    both = ask(demo, GREETING, max_tokens=2048).json()["error"]["message"]
    assert both == f"input length and `max_tokens` exceed context limit: {tokens} + 2048 > 2048"
    long = ask(demo, [{"role": "user", "content": "Good morning! " * 2048}]).json()["error"]["message"]
    assert long.startswith("prompt is too long: This model's maximum context length is 2048 tokens. ")


def test_what_the_model_side_refuses_has_the_form_of_this_route(demo: openai.OpenAI) -> None:
    answer = ask(demo, GREETING, max_tokens=10**6)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    unanswered = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]
    assert "messages.0.content.0" in ask(demo, unanswered, tools=OFFERED).json()["error"]["message"]
