"""`include_timings`: where a request's time went, in its answer and in its log line."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest

from gateway.core.events import Accepted, Delta, Event, Usage
from gateway.core.request import Generation
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import CHAT, MESSAGES, Served, in_process

BODIES: Mapping[str, Mapping[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    "/v1/completions": {"prompt": ["a", "b"]},
    "/v1/responses": {"input": "a"},
}
QUEUED_S = 0.005
NAMES = ["queued_ms", "engine_queued_ms", "first_token_ms", "generation_ms", "server_ms"]


async def tell_queue(_: Generation) -> AsyncGenerator[Event, None]:
    """Answer as an engine that tells how long the request waited there, after at least that time."""
    async for event in say("a", "b", "c", gap_s=2 * QUEUED_S):
        if type(event) is Delta and event.usage is not None:
            usage = Usage(prompt_tokens=3, completion_tokens=3, queue_s=QUEUED_S)
            yield Delta(pieces=event.pieces, tokens=1, finish_reason="stop", usage=usage)
        else:
            yield event


async def say_nothing(_: Generation) -> AsyncGenerator[Event, None]:
    yield Accepted(prompt_tokens=3)
    yield Delta(tokens=0, finish_reason="length", usage=Usage(prompt_tokens=3, completion_tokens=0))


async def usage_of(served: Served, path: str, *, stream: bool, **parameters: Any) -> Any:
    options = {"stream_options": {"include_usage": True}} if stream and "responses" not in path else {}
    body = {"model": "glm", **BODIES[path], **options, "stream": stream, **parameters}
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()["usage"]
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    last = json.loads(data[-1])
    return last.get("response", last)["usage"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_usage_says_where_the_time_went(path: str, *, stream: bool) -> None:
    async with in_process(FakeUpstream(tell_queue)) as served:
        timings = (await usage_of(served, path, stream=stream, include_timings=True))["timings"]
    assert list(timings) == NAMES
    assert timings["engine_queued_ms"] == QUEUED_S * 1000
    assert 0 <= timings["queued_ms"] + timings["engine_queued_ms"] <= timings["first_token_ms"]
    assert timings["generation_ms"] > 0
    assert timings["first_token_ms"] + timings["generation_ms"] <= timings["server_ms"] + 0.002  # rounded


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_nobody_else_gets_them(path: str, *, stream: bool) -> None:
    async with in_process(FakeUpstream(tell_queue)) as served:
        assert "timings" not in await usage_of(served, path, stream=stream)
        assert "timings" not in await usage_of(served, path, stream=stream, include_timings=False)


@pytest.mark.parametrize("stream", [False, True])
async def test_when_the_tokens_of_a_whole_answer_came_is_not_known(*, stream: bool) -> None:
    """A backend that does not stream tells of them with the end: that is no time to the first one."""

    async def say_at_once(_: Generation) -> AsyncGenerator[Event, None]:
        yield Accepted(prompt_tokens=3, whole=stream)
        usage = Usage(prompt_tokens=3, completion_tokens=5)
        yield Delta(pieces=("a b c",), tokens=5, finish_reason="stop", usage=usage)

    async with in_process(FakeUpstream(say_at_once)) as served:
        timings = (await usage_of(served, CHAT, stream=stream, include_timings=True))["timings"]
        assert (timings["first_token_ms"], timings["generation_ms"]) == (None, None)
        assert served.metric("generated_tokens_total", model="glm") == 5
        assert served.metric("time_to_first_token_seconds_count", model="glm") == 0
        assert served.metric("inter_token_latency_seconds_count", model="glm") == 0


async def test_counts_that_come_before_a_whole_answer_time_it() -> None:
    async def count_first(_: Generation) -> AsyncGenerator[Event, None]:
        yield Accepted(prompt_tokens=3)
        yield Delta(tokens=1)
        await asyncio.sleep(QUEUED_S)
        usage = Usage(prompt_tokens=3, completion_tokens=5)
        yield Delta(pieces=("a b c",), tokens=4, finish_reason="stop", usage=usage)

    async with in_process(FakeUpstream(count_first)) as served:
        timings = (await usage_of(served, CHAT, stream=False, include_timings=True))["timings"]
        assert timings["generation_ms"] >= QUEUED_S * 1000
        assert served.metric("generated_tokens_total", model="glm") == 5
        assert served.metric("time_to_first_token_seconds_count", model="glm") == 1
        assert served.metric("inter_token_latency_seconds_count", model="glm") == 4


async def test_what_nobody_knows_is_null() -> None:
    async with in_process(FakeUpstream(say_nothing)) as served:
        timings = (await usage_of(served, CHAT, stream=False, include_timings=True))["timings"]
    assert [name for name in NAMES if timings[name] is None] == NAMES[1:4]
    assert 0 <= timings["queued_ms"] <= timings["server_ms"]


@pytest.mark.parametrize("strict", [False, True])
async def test_it_is_a_known_field(*, strict: bool) -> None:
    async with in_process(FakeUpstream(tell_queue), strict=strict) as served:
        answer = await served.chat(include_timings=True)
        assert answer.status_code == 200
        assert "x-tritongate-ignored" not in answer.headers
        assert await served.refusal(include_timings="yes") == (400, "include_timings", None)


async def test_a_stream_without_usage_would_lose_them() -> None:
    async with in_process(FakeUpstream(tell_queue)) as served:
        assert await served.refusal(include_timings=True, stream=True) == (400, "include_timings", None)
