"""`POST /v1/completions` over the official SDK and a real socket, on the fake upstream."""

from collections.abc import AsyncGenerator, AsyncIterator

import openai
import pytest

from gateway.core.events import (
    Accepted,
    Delta,
    Event,
    Usage,
)
from gateway.core.request import Generation, PlainText, TokenIds
from gateway.errors import ContextLengthError
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import Served, in_process, on_socket

COMPLETIONS = "/v1/completions"


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with on_socket(FakeUpstream()) as served:
        yield served


async def with_ids(_request: Generation) -> AsyncGenerator[Event, None]:
    """Say something that shows no text at first."""
    yield Accepted(prompt_tokens=2, prompt_token_ids=((8, 9),))
    yield Delta(tokens=1, token_ids=(5,))
    usage = Usage(prompt_tokens=2, completion_tokens=3)
    yield Delta(pieces=(" é",), tokens=2, token_ids=(6, 2), finish_reason="stop", usage=usage)


async def test_whole_answer(served: Served) -> None:
    answer = await served.sdk.completions.create(model="glm", prompt="Say", max_tokens=9)
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (
        0,
        "Hello world",
        "stop",
        None,
    )
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        3,
        3,
        6,
    )
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "glm")
    assert answer.system_fingerprint
    assert "token_ids" not in (choice.model_extra or {})
    (asked,) = served.upstream.requests
    assert (asked.prompt, asked.max_tokens, asked.stream) == (PlainText("Say"), 9, False)


async def test_stream(served: Served) -> None:
    stream = await served.sdk.completions.create(
        model="glm", prompt=[5, 6], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["Hello", " wor", "ld"]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, "stop"]
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 6
    (asked,) = served.upstream.requests
    assert (asked.prompt, asked.stream) == (TokenIds((5, 6)), True)


async def test_a_stream_without_usage_ends_with_its_reason() -> None:
    async with in_process(FakeUpstream()) as served:
        answer = await served.http.post(COMPLETIONS, json={"model": "glm", "prompt": "a", "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert '"finish_reason":"stop"' in events[-3]
    assert "usage" not in answer.text


async def test_token_ids_are_reported_where_asked_for() -> None:
    async with on_socket(FakeUpstream(with_ids)) as served:
        asked = {"model": "glm", "prompt": "a", "extra_body": {"return_token_ids": True}}
        whole = await served.sdk.completions.create(**asked)
        chunks = [chunk async for chunk in await served.sdk.completions.create(**asked, stream=True)]
    assert all(request.return_token_ids for request in served.upstream.requests)
    ended = {"stop_reason": None}
    assert whole.choices[0].model_extra == {"prompt_token_ids": [8, 9], "token_ids": [5, 6, 2], **ended}
    assert [chunk.choices[0].model_extra for chunk in chunks] == [
        {"prompt_token_ids": [8, 9], "token_ids": [5]},
        {"token_ids": [6, 2], **ended},
    ]


async def test_errors_are_the_sdks_own(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await served.sdk.completions.create(model="other", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as empty:
        await served.sdk.completions.create(model="glm", prompt=[])
    assert empty.value.param == "prompt"

    async def refuse(_request: Generation) -> AsyncGenerator[Event, None]:
        raise ContextLengthError("too long")
        yield

    served.upstream.script = refuse
    with pytest.raises(openai.BadRequestError) as too_long:
        await served.sdk.completions.create(model="glm", prompt="a", stream=True)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_report_on_prompts_too_large_for_an_answer_is_refused_and_cancelled(
    served: Served, stream: bool
) -> None:
    served.upstream.script = lambda _request: say("a", "b", prompt_tokens=30_000, gap_s=60)
    asked = {"model": "glm", "prompt": "a", "echo": True, "logprobs": 5, "n": 6, "stream": stream}
    answer = await served.http.post(COMPLETIONS, json=asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
    assert "1080000 log-probabilities" in answer.json()["error"]["message"]
    await served.until_idle()
    assert served.upstream.cancelled == 1


async def test_requests_count_under_their_own_route() -> None:
    async with in_process(FakeUpstream()) as served:
        await served.http.post(COMPLETIONS, json={"model": "glm", "prompt": "a"})
        assert served.metric("requests_total", route=COMPLETIONS, model="glm", status="200") == 1
        assert served.metric("generated_tokens_total", model="glm") == 3
