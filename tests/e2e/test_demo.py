"""A newcomer's view: `tritongate up` without a model talks sense, in Chinese and English, by the SDK."""

import json
from typing import Any

import openai
import pytest

from tools.demo.pages import read
from tools.demo.tools import system_text

pytestmark = pytest.mark.e2e

MODEL = "chatglm3-demo"
TOOLS = [
    {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {
        "name": "calculate",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
]


class Conversation:
    """Says things to the demo model and remembers what came back."""

    def __init__(self, client: openai.OpenAI, system: str | None = None) -> None:
        self._client = client
        self._messages: list[Any] = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> str:
        self._messages.append({"role": "user", "content": text})
        answer = self._client.chat.completions.create(model=MODEL, messages=self._messages, temperature=0)
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        self._messages.append({"role": "assistant", "content": choice.message.content})
        return str(choice.message.content)

    def stream(self, text: str) -> str:
        messages = [*self._messages, {"role": "user", "content": text}]
        chunks = self._client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.parametrize(
    ("question", "contains"),
    [
        ("你好，你好！", "你好！我是chatglm3-demo"),
        ("Good morning to you!", "Hello! I am chatglm3-demo"),
        ("如何把tritongate启动起来？", "make up"),
        ("Which port does tritongate listen on?", "8080"),
    ],
)
def test_a_question_is_answered_streaming_and_not(question: str, contains: str, demo: openai.OpenAI) -> None:
    whole = Conversation(demo).say(question)
    assert contains in whole
    assert Conversation(demo).stream(question) == whole


def test_the_second_turn_refers_to_the_first(demo: openai.OpenAI) -> None:
    conversation = Conversation(demo)
    assert "time to first token" in conversation.say("Could you explain what TTFT is?")
    assert "首个token时间" in conversation.say("请用中文再讲一遍。")


def test_a_tool_is_called_and_its_result_told_by_plain_prompts(demo: openai.OpenAI) -> None:
    conversation = Conversation(demo, system_text(read("tools")["instruction"], TOOLS))
    call = conversation.say("襄阳今天天气怎么样？")
    assert call.splitlines()[0] == "get_weather"
    assert "tool_call(city='襄阳')" in call
    found = {"city": "襄阳", "temperature": 21, "condition": "晴"}
    told = conversation.say("工具结果：" + json.dumps(found, ensure_ascii=False))
    assert told == "襄阳的天气：晴，21 °C。"
    assert "tool_call(expression='37 * (12 + 9)')" in conversation.say("What is 37 * (12 + 9)?")
    assert "777" in conversation.say('Tool result: {"result": 777}')


def test_without_tools_it_says_that_it_cannot_know_the_weather(demo: openai.OpenAI) -> None:
    assert "cannot know the weather" in Conversation(demo).say("What is the weather in Lisbon?")
