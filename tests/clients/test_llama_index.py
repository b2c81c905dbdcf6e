"""LlamaIndex's `OpenAILike`: chats, streams, completions, several at once, a tool, structured output."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

HELLO = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="你好")]
QUESTION = "襄阳今天天气怎么样？"


class City(BaseModel):
    """A city of which the weather is asked."""

    city: str = Field(description="Name of the city")


def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return f"{city}: 晴, 21"


@pytest.fixture
def llm(demo_url: str) -> Iterator[OpenAILike]:
    # Its own clients would be left open.
    with httpx.Client() as http:
        yield OpenAILike(
            model="chatglm3-demo",
            api_base=demo_url + "/v1",
            api_key="unused",
            is_chat_model=True,
            is_function_calling_model=True,
            context_window=2048,
            max_tokens=120,
            temperature=0,
            max_retries=0,
            http_client=http,
        )


def test_a_streamed_chat_is_the_whole_one(llm: OpenAILike) -> None:
    whole = llm.chat(HELLO).message.content
    # With its token ids no piece is joined to the next, as a busy machine may do.
    pieces = list(llm.stream_chat(HELLO, extra_body={"return_token_ids": True}))
    assert len(pieces) > 2
    assert "".join(piece.delta or "" for piece in pieces) == pieces[-1].message.content == whole


def test_completions_continue_text(llm: OpenAILike) -> None:
    plain = llm.model_copy(update={"is_chat_model": False, "max_tokens": 8})
    assert (
        "".join(piece.delta or "" for piece in plain.stream_complete("你好")) == plain.complete("你好").text
    )


async def test_several_at_once(llm: OpenAILike) -> None:
    async with httpx.AsyncClient() as http:
        many = OpenAILike(**llm.model_dump(), async_http_client=http)
        answers = await asyncio.gather(*(many.achat(HELLO) for _ in range(4)))
    assert {answer.message.content for answer in answers} == {llm.chat(HELLO).message.content}


def test_a_tool_is_called_and_its_result_told(llm: OpenAILike) -> None:
    tool = FunctionTool.from_defaults(get_weather)
    answer = llm.chat_with_tools([tool], user_msg=QUESTION)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "襄阳"})


def test_structured_output_is_an_object(llm: OpenAILike) -> None:
    found = llm.structured_predict(City, PromptTemplate(QUESTION))
    assert isinstance(found, City)
    assert found.city
