"""Several prompts in one `/v1/completions`, over the official SDK and a real socket, on the fake upstream."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest

from gateway.core.events import (
    Accepted,
    Delta,
    Event,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from gateway.core.request import Generation, PlainText, TokenIds
from gateway.errors import ContextLengthError, UnavailableError
from tests.gateway.fake_upstream import FakeUpstream, say, say_choices
from tests.gateway.serving import Served, in_process, on_socket, until

COMPLETIONS = "/v1/completions"


async def repeat_prompt(request: Generation) -> AsyncGenerator[Event, None]:
    """Answer with the prompt and the choice's number, a character for each token; later prompts faster."""
    assert isinstance(request.prompt, PlainText)
    size = len(request.prompt.text)
    yield Accepted(prompt_tokens=size, prompt_token_ids=(tuple(map(ord, request.prompt.text)),))
    for index in range(request.n):
        text = f"{request.prompt.text}{index}"
        for at, character in enumerate(text, 1):
            await asyncio.sleep(0.002 / size)
            last = at == len(text)
            usage = Usage(prompt_tokens=size, completion_tokens=request.n * len(text))
            yield Delta(
                pieces=(character,),
                tokens=1,
                index=index,
                finish_reason="stop" if last else None,
                usage=usage if last and index == request.n - 1 else None,
            )


def parts_of(chunks: list[Any], index: int) -> list[Any]:
    return [part for chunk in chunks for part in chunk.choices if part.index == index]


@pytest.mark.parametrize("n", [None, 1, 3])
async def test_every_prompt_has_its_choices(n: int | None) -> None:
    prompts = ["a", "bcd", "ef"]
    asked: dict[str, Any] = {"model": "glm", "prompt": prompts, "extra_body": {"return_token_ids": True}}
    if n:
        asked["n"] = n
    async with on_socket(FakeUpstream(repeat_prompt)) as served:
        whole = await served.sdk.completions.create(**asked)
        stream = await served.sdk.completions.create(
            **asked, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
        )
        chunks = [chunk async for chunk in stream]
        await served.until_idle()
    expected = [f"{prompt}{index}" for prompt in prompts for index in range(n or 1)]
    assert [choice.index for choice in whole.choices] == list(range(len(expected)))
    assert [choice.text for choice in whole.choices] == expected
    assert [choice.prompt_token_ids for choice in whole.choices] == [
        list(map(ord, prompt)) for prompt in prompts for _ in range(n or 1)
    ]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, sum(map(len, expected)))
    for choice in whole.choices:
        parts = parts_of(chunks, choice.index)
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [*[None] * (len(parts) - 1), "stop"]
        assert parts[0].model_extra["prompt_token_ids"] == choice.prompt_token_ids
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    running = [chunk.usage.completion_tokens for chunk in chunks]
    assert running == sorted(running)
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {6}
    order = [part.index for chunk in chunks for part in chunk.choices]
    assert order != sorted(order), "the choices of different prompts come as they are ready"


async def test_one_prompt_that_fails_fails_the_request_and_ends_the_others() -> None:
    async def refuse_the_second(request: Generation) -> AsyncGenerator[Event, None]:
        if request.prompt == TokenIds((2,)):
            raise ContextLengthError("too long")
        async for event in say(*["a"] * 1000, gap_s=0.01):
            yield event

    async with on_socket(FakeUpstream(refuse_the_second)) as served:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await served.sdk.completions.create(model="glm", prompt=[[1], [2]], stream=stream)
            assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt.1")
            await served.until_idle()


async def test_one_prompt_that_fails_late_ends_the_stream_with_its_error() -> None:
    async def fail_the_second(request: Generation) -> AsyncGenerator[Event, None]:
        async for event in say(*["a"] * 1000, gap_s=0.001):
            yield event
            if request.prompt == PlainText("b") and isinstance(event, Delta):
                raise UnavailableError("gone")

    async with in_process(FakeUpstream(fail_the_second)) as served:
        answer = await served.http.post(
            COMPLETIONS, json={"model": "glm", "prompt": ["a", "b"], "stream": True}
        )
        await served.until_idle()
    *_, error, done, end = answer.text.split("\n\n")
    assert '"service_unavailable"' in error
    assert (done, end) == ("data: [DONE]", "")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_every_prompt(stream: bool) -> None:
    upstream = FakeUpstream(lambda _: say(*["a"] * 10_000, gap_s=0.01))
    async with on_socket(upstream) as served:
        asking = asyncio.create_task(
            served.http.post(
                COMPLETIONS, json={"model": "glm", "prompt": ["a"] * 8, "n": 2, "stream": stream}
            )
        )
        await until(lambda: upstream.running == 8)
        assert served.gateway.admission.in_flight == 16
        asking.cancel()
        await served.until_idle()
        assert upstream.cancelled == 8


async def test_choices_count_where_places_are_few() -> None:
    upstream = FakeUpstream(lambda _: say(*["a"] * 10_000, gap_s=0.01))
    async with on_socket(upstream, max_in_flight=4, max_waiting=0) as served:
        first = asyncio.create_task(served.http.post(COMPLETIONS, json={"model": "glm", "prompt": ["a"] * 3}))
        await until(lambda: upstream.running == 3)
        refused = await served.http.post(COMPLETIONS, json={"model": "glm", "prompt": "a", "n": 2})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        first.cancel()
        await served.until_idle()


async def test_more_answers_than_the_setting_allows_are_refused() -> None:
    async def refusal(served: Served, **asked: Any) -> Any:
        answer = await served.http.post(COMPLETIONS, json={"model": "glm", **asked})
        return answer.status_code, answer.json()["error"]["param"]

    async with in_process(FakeUpstream(say_choices), max_choices=3) as served:
        assert await refusal(served, prompt=["a"] * 4) == (400, "prompt")
        assert await refusal(served, prompt=["a"] * 2, n=2, stream=True) == (400, "prompt")
        assert await refusal(served, prompt=["a"], n=4) == (400, "n")
        assert served.upstream.requests == []


async def likely(request: Generation) -> AsyncGenerator[Event, None]:
    """Say an emoji in four tokens and a letter, with as many alternatives as were asked for."""
    yield Accepted(prompt_tokens=1)
    pieces = [*[bytes([byte]) for byte in "👋".encode()], b"x"]
    for at, piece in enumerate(pieces):
        count = request.logprobs or 0
        top = tuple(
            TopLogprob(id=each, token=f"t{each}", utf8=b"t", logprob=-9999.0) for each in range(count)
        )
        shown = piece.decode("ascii", "backslashreplace")
        logprob = TokenLogprob(id=7, token=shown, utf8=piece, logprob=-1.0, top=top)
        last = at == len(pieces) - 1
        yield Delta(
            pieces={3: ("👋",), 4: ("x",)}.get(at, ()),
            tokens=1,
            logprobs=(logprob,),
            finish_reason="stop" if last else None,
            usage=Usage(prompt_tokens=1, completion_tokens=len(pieces)) if last else None,
        )


@pytest.mark.parametrize("count", [0, 5])
async def test_logprobs_are_lists_of_one_length(count: int) -> None:
    asked: dict[str, Any] = {"model": "glm", "prompt": "a", "logprobs": count}
    async with on_socket(FakeUpstream(likely)) as served:
        whole = (await served.sdk.completions.create(**asked)).choices[0]
        chunks = [chunk async for chunk in await served.sdk.completions.create(**asked, stream=True)]
        silent = await served.sdk.completions.create(model="glm", prompt="a")
    assert whole.logprobs.text_offset == [0, 0, 0, 0, 1]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [each for part in parts_of(chunks, 0) for each in getattr(part.logprobs, name)]
        assert streamed == getattr(whole.logprobs, name)
        assert len(streamed) == 5
    assert [len(each) for each in whole.logprobs.top_logprobs] == [count + 1] * 5
    assert "".join(part.text for part in parts_of(chunks, 0)) == whole.text == "👋x"
    assert silent.choices[0].logprobs is None
