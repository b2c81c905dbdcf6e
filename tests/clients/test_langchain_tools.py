"""LangChain's `ChatOpenAI` with tools, over either API: bound, called, answered, and as structured output."""

import json
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

QUESTION = "襄阳今天天气怎么样？"
SUNNY = json.dumps({"city": "襄阳", "temperature": 21, "condition": "晴"}, ensure_ascii=False)


class get_weather(BaseModel):  # noqa: N801 - its name is the tool's
    """Get the current weather of a city."""

    city: str = Field(description="Name of the city")


class Place(BaseModel):
    """A city; the demonstration model, which never saw such answers, would not end one without a limit."""

    city: str = Field(max_length=12)


@pytest.fixture(params=["chat completions", "responses"])
def chat(request: pytest.FixtureRequest, demo_url: str) -> ChatOpenAI:
    return ChatOpenAI(
        use_responses_api=request.param == "responses",
        model="chatglm3-demo",
        base_url=demo_url + "/v1",
        api_key="unused",
        temperature=0,
        max_tokens=160,
        max_retries=0,
    )


def called(message: Any) -> list[tuple[str, dict[str, Any]]]:
    assert not message.invalid_tool_calls
    return [(call["name"], call["args"]) for call in message.tool_calls]


def test_a_bound_tool_is_called_and_its_result_told(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([get_weather])
    message = bound.invoke(QUESTION)
    assert isinstance(message, AIMessage)
    assert called(message) == [("get_weather", {"city": "襄阳"})]
    result = ToolMessage(SUNNY, tool_call_id=message.tool_calls[0]["id"])
    said: list[BaseMessage] = [HumanMessage(QUESTION), message, result]
    answer = bound.invoke(said)
    assert answer.text == "襄阳的天气：晴，21 °C。"
    assert called(bound.invoke([*said, answer, HumanMessage(QUESTION)])) == [
        ("get_weather", {"city": "襄阳"})
    ]


def test_a_streamed_call_is_the_whole_one(chat: ChatOpenAI) -> None:
    chunks = list(chat.bind_tools([get_weather]).stream(QUESTION))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert called(joined) == [("get_weather", {"city": "襄阳"})]
    ended = joined.response_metadata
    assert ended.get("finish_reason", ended.get("status")) in {"tool_calls", "completed"}


def test_structured_output_by_a_forced_call(chat: ChatOpenAI) -> None:
    structured = chat.with_structured_output(get_weather, method="function_calling")
    assert structured.invoke(QUESTION) == get_weather(city="襄阳")


def test_structured_output_by_a_schema_of_the_answer(chat: ChatOpenAI) -> None:
    structured = chat.with_structured_output(Place, method="json_schema")
    assert isinstance(structured.invoke(QUESTION), Place)
