"""pydantic-ai over either API: an agent calls its function, streams, and ends in an object."""

import json
from collections.abc import AsyncIterator
from typing import Literal

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

QUESTION = "襄阳今天天气怎么样？"
ANSWER = "襄阳的天气：晴，21 °C。"
SETTINGS = ModelSettings(temperature=0, max_tokens=160)


class City(BaseModel):
    city: str


class Sky(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sky: Literal["sunny", "rainy"]


def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return json.dumps({"city": city, "temperature": 21, "condition": "晴"}, ensure_ascii=False)


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel])
async def model(request: pytest.FixtureRequest, demo_url: str) -> AsyncIterator[Model]:
    # Its own client would be left open.
    async with AsyncOpenAI(base_url=demo_url + "/v1", api_key="unused", max_retries=0) as client:
        yield request.param("chatglm3-demo", provider=OpenAIProvider(openai_client=client))


async def test_an_agent_calls_its_function_and_goes_on(model: Model) -> None:
    agent = Agent(model, model_settings=SETTINGS, tools=[get_weather])
    assert (await agent.run(QUESTION)).output == ANSWER
    async with agent.run_stream(QUESTION) as run:
        assert [text async for text in run.stream_text()][-1] == ANSWER


async def test_an_object_by_a_forced_call(model: Model) -> None:
    agent = Agent(model, model_settings=SETTINGS, output_type=ToolOutput(City), retries=0)
    assert (await agent.run(QUESTION)).output == City(city="襄阳")


async def test_an_object_by_a_schema_of_the_answer(model: Model) -> None:
    agent = Agent(model, model_settings=SETTINGS, output_type=NativeOutput(Sky), retries=0)
    assert isinstance((await agent.run(QUESTION)).output, Sky)
