"""Delta channels on the real Triton: the wire itself, and whole gateways over it, by the official SDK."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from anyio.from_thread import start_blocking_portal

from tests.e2e.channel_client import open_channel
from tests.e2e.meddling_proxy import MeddlingProxy
from tests.e2e.serve_process import ServeProcess
from tests.e2e.stream_client import StreamClient
from tests.e2e.test_load import different, idle, sdk, streamed, until
from tests.e2e.unread_answer import UnreadAnswer
from tests.e2e.up_process import UpProcess, slowed, wait_until
from wire.channel import Frame
from wire.meta import Meta

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STREAMS = 64
LONG: dict[str, Any] = {
    "model": "chatglm3",
    "messages": [{"role": "user", "content": "你好"}],
    "max_tokens": 480,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture
def worker() -> Iterator[Callable[[str], ServeProcess]]:
    with contextlib.ExitStack() as workers:
        yield lambda upstream: workers.enter_context(ServeProcess(upstream, "--models", "chatglm3"))


def test_a_quiet_channel_beats_and_so_does_a_request_that_waits_for_its_turn(triton: StreamClient) -> None:
    channel = open_channel(triton, "chatglm3", "quiet")
    wait_until(lambda: len(channel.frames) > 2)
    assert channel.frames[:3] == [Frame(frame=number) for number in range(3)]
    channel.close()


def test_closing_a_channel_ends_what_is_on_it(patient: UpProcess) -> None:
    triton = StreamClient(patient.triton_grpc)
    channel = open_channel(triton, "chatglm3", "closed")

    def where(stream: int) -> dict[str, object]:
        return {"id": "closed", "stream": stream}

    owns = [
        triton.stream("chatglm3", "你好", max_tokens=8000, ignore_eos=True, channel=where(stream))
        for stream in range(64)
    ]
    assert all(next(own)[1].accepted is not None for own in owns)
    wait_until(lambda: channel.deltas(63) > 0)
    channel.close()
    assert [end_of(own) for own in owns] == ["channel_lost"] * 64
    wait_until(lambda: patient.gauge("tritongate_engine_requests_running") == 0)
    with pytest.raises(RuntimeError, match="tritongate:channel_lost:"):
        next(triton.stream("chatglm3", "你好", channel=where(0)))
    triton.close()


def end_of(own: Iterator[tuple[str, Meta]]) -> str | None:
    try:
        *beats, (_, last) = own
    except RuntimeError as error:
        return str(error).split(":")[1]
    assert all(meta == Meta() for _, meta in beats)
    return last.finish_reason


async def unstreamed(client: openai.AsyncOpenAI, request: dict[str, Any]) -> tuple[str, str, int]:
    """What `streamed` returns, of an answer in one piece."""
    answer = await client.chat.completions.create(**request)
    (choice,) = answer.choices
    return choice.message.content, choice.finish_reason, answer.usage.completion_tokens


async def test_answers_are_alike_whether_they_are_streamed_or_not(
    up: UpProcess, beside: ServeProcess
) -> None:
    requests = [different(number) for number in range(STREAMS)]
    async with beside.sdk() as client:
        streams = [asyncio.create_task(streamed(client, request)) for request in requests]
        others = [asyncio.create_task(unstreamed(client, request)) for request in requests]
        answers = await asyncio.gather(*streams)
        assert await asyncio.gather(*others) == answers
    assert len({text for text, _, _ in answers}) > STREAMS // 2
    await idle(up)


async def lasting(
    client: openai.AsyncOpenAI, begun: asyncio.Event | None = None, **changes: Any
) -> tuple[str, str]:
    """Stream a long answer to its end; return how it ended and its text."""
    text, reason = "", ""
    try:
        stream = await client.chat.completions.create(**(LONG | changes), stream=True)
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
            if begun is not None and text:
                begun.set()
    except (openai.APIError, httpx.TransportError) as error:
        reason = f"error: {error}"
    return reason, text


async def again_and_again(
    client: openai.AsyncOpenAI, over: asyncio.Event, **changes: Any
) -> list[tuple[str, str]]:
    """Stream one long answer after the other until it is over; return what `lasting` said of each."""
    ends = []
    while not over.is_set():
        ends.append(await lasting(client, **changes))
    return ends


@pytest.fixture
def proxy(up: UpProcess) -> Iterator[MeddlingProxy]:
    # In a loop of its own: the tests' is busy with streams, and probes would come too late.
    with start_blocking_portal() as portal:
        proxy = portal.call(MeddlingProxy, up.triton_grpc)
        portal.call(proxy.start)
        yield proxy
        portal.call(proxy.stop)


@pytest.fixture
def meddled(proxy: MeddlingProxy, worker: Callable[[str], ServeProcess]) -> ServeProcess:
    """A gateway that reaches Triton through the proxy."""
    return worker(proxy.address)


async def test_a_channel_lost_under_load_leaves_no_stream_silent(
    up: UpProcess, proxy: MeddlingProxy, meddled: ServeProcess
) -> None:
    """The channel alone, twice; each answer is resumed over the next one."""
    async with meddled.sdk() as client:
        expected = await lasting(client, temperature=0)
        assert expected[0] == "length"
        ends: list[tuple[str, str]] = []
        for _ in range(2):
            begun = [asyncio.Event() for _ in range(16)]
            # Slowed: the engine would have written all answers before the last of them is read.
            with slowed(up.stub("chatglm3")):
                tasks = [asyncio.create_task(lasting(client, each, temperature=0)) for each in begun]
                # One that has not begun is refused if the next channel does not open in time.
                await asyncio.wait_for(asyncio.gather(*(each.wait() for each in begun)), 100)
                opened = proxy.opened
                proxy.reset_channels()
            ends += await asyncio.wait_for(asyncio.gather(*tasks), 100)
        assert await lasting(client, temperature=0) == expected
        assert proxy.opened > opened
    assert ends == [expected] * len(ends)
    assert await asyncio.to_thread(meddled.gauge, "tritongate_resumed_total") > 0
    await until(lambda: up.gauge("tritongate_engine_requests_running", model="chatglm3") == 0)
    assert await asyncio.to_thread(meddled.gauge, "tritongate_upstream_errors_total", code="channel_lost") > 0


async def test_a_missing_delta_is_noticed_by_the_count_in_the_last_response(
    proxy: MeddlingProxy, meddled: ServeProcess
) -> None:
    async with meddled.sdk() as client:
        assert (await lasting(client, max_tokens=60))[0] == "length"
        proxy.steal = 1
        # Long enough for many frames, however slow the machine: there is text beside what is stolen.
        reason, text = await lasting(client)
        assert proxy.steal == 0
        assert reason.startswith("error: ")
        assert text
        assert (await lasting(client, max_tokens=60))[0] == "length", "the channel itself is well"
    assert await asyncio.to_thread(meddled.gauge, "tritongate_upstream_errors_total", code="protocol") == 1
    assert proxy.opened == 1


async def test_a_killed_worker_frees_its_requests_and_harms_no_other(
    patient: UpProcess, worker: Callable[[str], ServeProcess]
) -> None:
    doomed = worker(patient.triton_grpc)
    async with doomed.sdk() as dies, sdk(patient) as lives:
        killed = asyncio.Event()
        # Slowed: the engine would be answers ahead of this process, which reads them all, and seldom so full.
        with slowed(patient.stub("chatglm3")):
            lost = [asyncio.create_task(lasting(dies, max_tokens=8000)) for _ in range(32)]
            kept = [asyncio.create_task(again_and_again(lives, killed, temperature=0)) for _ in range(4)]
            await until(lambda: patient.gauge("tritongate_engine_requests_running") >= 34)
            doomed.process.kill()
            killed.set()
        await until(lambda: patient.gauge("tritongate_engine_requests_running") <= 4)
        ends = [end for each in await asyncio.gather(*kept) for end in each]
        assert {reason for reason, _ in ends} == {"length"}
        assert len({text for _, text in ends}) == 1
        assert all(reason.startswith("error: ") for reason, _ in await asyncio.gather(*lost))
    await idle(patient)


async def test_a_client_that_does_not_read_stalls_nobody(up: UpProcess, beside: ServeProcess) -> None:
    slow = await UnreadAnswer.begin(beside.base_url)
    async with beside.sdk() as client:
        ends = await asyncio.wait_for(
            asyncio.gather(*(lasting(client, temperature=0) for _ in range(8))), 100
        )
    assert {reason for reason, _ in ends} == {"length"}
    assert len({text for _, text in ends}) == 1
    await until(lambda: up.gauge("tritongate_engine_requests_running", model="chatglm3") == 0)
    assert await asyncio.to_thread(beside.gauge, "tritongate_requests_in_flight") == 1
    slow.close()
    await until(lambda: beside.gauge("tritongate_requests_in_flight") == 0)
    await idle(up)
