"""OpenAI's Agents SDK over the Responses API: it calls its own function, and goes on with what came back."""

import json
from collections.abc import AsyncIterator

import pytest
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

QUESTION = "襄阳今天天气怎么样？"
ANSWER = "襄阳的天气：晴，21 °C。"


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return json.dumps({"city": city, "temperature": 21, "condition": "晴"}, ensure_ascii=False)


@pytest.fixture
async def agent(demo_url: str) -> AsyncIterator[Agent[None]]:
    set_tracing_disabled(disabled=True)  # it would send traces to OpenAI
    async with AsyncOpenAI(base_url=demo_url + "/v1", api_key="unused", max_retries=0) as client:
        yield Agent(
            name="weather",
            model=OpenAIResponsesModel(model="chatglm3-demo", openai_client=client),
            model_settings=ModelSettings(temperature=0),
            tools=[get_weather],
        )


async def test_an_agent_calls_its_function_and_goes_on(agent: Agent[None]) -> None:
    first = await Runner.run(agent, QUESTION)
    assert first.final_output == ANSWER
    assert [item["type"] for item in first.to_input_list() if "type" in item] == [
        "function_call",
        "function_call_output",
        "message",
    ]
    said = [*first.to_input_list(), {"role": "user", "content": "What is the weather in Lisbon?"}]
    second = await Runner.run(agent, said)
    assert "Lisbon" in second.final_output
    assert "21 °C" in second.final_output


async def test_a_streamed_run_is_the_whole_one(agent: Agent[None]) -> None:
    lengths = []
    for _ in range(5):  # a busy machine may join the pieces of a short answer
        run = Runner.run_streamed(agent, QUESTION)
        pieces = [
            event.data.delta
            async for event in run.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert "".join(pieces) == run.final_output == ANSWER
        lengths.append(len(pieces))
    assert max(lengths) > 1
