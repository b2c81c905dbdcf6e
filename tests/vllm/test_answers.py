"""Answers of the real vLLM, through the gateway, to the official SDK."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.vllm.checkpoint import CONTEXT
from tests.vllm.conftest import Served

TEXT = "the cat and the hat"


def say(text: str = TEXT) -> Any:
    return [{"role": "user", "content": text}]


def prompt_tokens(served: Served, text: str = TEXT) -> int:
    """What the prompt is, with one `<s>`."""
    prompt = f"<s><|user|>{text}\n<|assistant|>"
    return len(served.tokenizer.encode(prompt, add_special_tokens=False).ids)


async def streamed(sdk: openai.AsyncOpenAI, **asked: Any) -> tuple[str, str | None, Any]:
    """Return the text, the finish reason and the usage."""
    text, reason, usage = "", None, None
    stream = await sdk.chat.completions.create(
        model="llama", stream=True, stream_options={"include_usage": True}, **asked
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason, usage


async def test_a_chat_has_the_tokenizers_counts(served: Served, sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model="llama", messages=say(), max_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.content
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens(served), 12)


async def test_a_stream_says_the_same(served: Served, sdk: openai.AsyncOpenAI) -> None:
    asked: Any = {"messages": say(), "max_tokens": 40, "temperature": 0}
    answer = await sdk.chat.completions.create(model="llama", **asked)
    text, reason, usage = await streamed(sdk, **asked)
    assert text == answer.choices[0].message.content
    assert reason == "length"
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt_tokens(served), 40)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_an_answer(sdk: openai.AsyncOpenAI, *, stream: bool) -> None:
    asked: Any = {"messages": say(), "max_tokens": 40, "temperature": 0}
    answer = await sdk.chat.completions.create(model="llama", **asked)
    text = answer.choices[0].message.content or ""
    stop = next(text[at : at + 2] for at in range(4, len(text)) if text[at : at + 2].isascii())
    asked["stop"] = [stop]
    if stream:
        got, reason, _ = await streamed(sdk, **asked)
    else:
        answer = await sdk.chat.completions.create(model="llama", **asked)
        got, reason = answer.choices[0].message.content or "", answer.choices[0].finish_reason
    assert (got, reason) == (text[: text.index(stop)], "stop")


async def test_several_choices(sdk: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "llama", "messages": say(), "max_tokens": 20, "seed": 1, "n": 3}
    answer = await sdk.chat.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 60
    said = ["", "", ""]
    async for chunk in await sdk.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == texts


async def test_a_prompt_is_repeated(sdk: openai.AsyncOpenAI) -> None:
    prompt = "the end and"
    asked: Any = {"model": "llama", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    alone = await sdk.completions.create(**asked)
    answer = await sdk.completions.create(**asked, echo=True)
    assert answer.choices[0].text == prompt + alone.choices[0].text
    assert answer.usage == alone.usage


@pytest.mark.parametrize(
    ("asked", "status", "param"),
    [
        ({"seed": 7, "top_p": 0.5, "presence_penalty": 1, "frequency_penalty": 1}, 200, None),
        ({"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [9]}, 200, None),
        ({"logit_bias": {"70": 100}}, 200, None),
        ({"prompt_logprobs": 1}, 400, "prompt_logprobs"),
        ({"return_token_ids": True}, 400, "return_token_ids"),
        ({"temperature": 9}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens"),
    ],
)
async def test_parameters_are_honoured_or_refused_by_name(
    served: Served, asked: dict[str, Any], status: int, param: str | None
) -> None:
    body = {"model": "llama", "messages": say(), "max_tokens": 8} | asked
    async with httpx.AsyncClient(base_url=served.gateway.base_url, timeout=100) as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == status, response.text
    if param is not None:
        assert response.json()["error"]["param"] == param


async def test_a_seed_repeats_and_a_bias_decides(sdk: openai.AsyncOpenAI, served: Served) -> None:
    def ask(**more: Any) -> Any:
        return sdk.chat.completions.create(model="llama", messages=say(), max_tokens=16, **more)

    first, again, other = await asyncio.gather(ask(seed=5), ask(seed=5), ask(seed=6))
    texts = [answer.choices[0].message.content for answer in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    the = served.tokenizer.token_to_id("the")
    biased = await ask(logit_bias={str(the): 100}, temperature=0)
    assert biased.choices[0].message.content == "the" * 16


async def test_log_probabilities(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model="llama", messages=say(), max_tokens=5, logprobs=True, top_logprobs=3, temperature=0
    )
    listed = answer.choices[0].logprobs
    assert listed is not None
    assert listed.content is not None
    assert {len(each.top_logprobs) for each in listed.content} == {3}
    said = b"".join(bytes(each.bytes or ()) for each in listed.content)
    assert said.decode() == answer.choices[0].message.content
    assert all(each.logprob == each.top_logprobs[0].logprob < 0 for each in listed.content)


async def test_a_schema_holds(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model="llama", messages=say(), max_tokens=100, extra_body={"guided_choice": ["yes", "no"]}
    )
    assert answer.choices[0].message.content in ("yes", "no")
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [CONTEXT, 20 * CONTEXT])
async def test_a_prompt_beyond_the_context_is_refused(
    sdk: openai.AsyncOpenAI, length: int, *, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.chat.completions.create(
            model="llama", messages=say("x" * length), max_tokens=5, stream=stream
        )
    assert caught.value.code == "context_length_exceeded"
    assert str(CONTEXT) in caught.value.message
    assert not any(word in caught.value.message for word in ("Traceback", "tritongate:", "File "))


async def test_an_answer_ends_with_the_context(served: Served, sdk: openai.AsyncOpenAI) -> None:
    text = "x" * (CONTEXT - 50)
    answer = await sdk.chat.completions.create(
        model="llama", messages=say(text), extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == CONTEXT
    assert answer.usage.prompt_tokens == prompt_tokens(served, text)
    assert answer.choices[0].finish_reason == "length"
