"""What is missing from an answer over a delta channel, or too much, and channels that are lost."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.core.events import Accepted, Delta
from gateway.errors import ClientGoneError, UnavailableError, UpstreamProtocolError
from gateway.triton import buffer
from gateway.triton import channel as delta_channel
from tests.gateway.triton.fake_channel import FakeChannels
from tests.gateway.triton.fake_triton import FakeTriton, generation, refusing, reply, until
from tests.gateway.triton.running import Running, send, started
from wire.meta import Meta

Serve = Callable[..., Any]


def missing_from_one_choice(fake: FakeChannels, number: int) -> None:
    fake.accept(number)
    fake.frame((number, "a"))
    fake.frame((number, "b"))
    fake.finish(number, 1, index=1, last=False)


def end_of_a_choice_that_nobody_asked_for(fake: FakeChannels, number: int) -> None:
    fake.accept(number)
    fake.finish(number, 0, index=2, last=False)


def end_that_does_not_count(fake: FakeChannels, number: int) -> None:
    fake.accept(number)
    fake.own[number].put_nowait(reply("x", Meta(tokens=1, finish_reason="stop"), final=True))


def own_stream_that_ends_without_an_end(fake: FakeChannels, number: int) -> None:
    fake.own[number].put_nowait(reply(meta=Meta(), final=True))


@pytest.mark.parametrize(
    ("choices", "answer"),
    [
        (2, missing_from_one_choice),
        (2, end_of_a_choice_that_nobody_asked_for),
        (1, end_that_does_not_count),
        (1, own_stream_that_ends_without_an_end),
    ],
)
async def test_what_is_out_of_contract_is_an_error(
    triton: FakeTriton,
    fake: FakeChannels,
    serve: Serve,
    choices: int,
    answer: Callable[[FakeChannels, int], None],
) -> None:
    running, number = await send(await serve(triton), fake, n=choices)
    answer(fake, number)
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(running.task, 60)


async def test_a_delta_too_many_is_no_answer_either(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    running, number = await send(await serve(triton), fake)
    fake.accept(number)
    fake.frame((number, "a"))
    fake.frame((number, "b"))
    await until(lambda: running.text == "ab")
    fake.finish(number, 1)
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(running.task, 60)


async def test_a_missing_delta_is_noticed_by_the_count(
    triton: FakeTriton, fake: FakeChannels, serve: Serve, observer: Any
) -> None:
    running, number = await send(await serve(triton), fake)
    fake.accept(number)
    fake.frame((number, "a"))
    fake.frame()
    fake.finish(number, 2)
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(running.task, 60)
    assert running.text == "a"
    assert running.deltas[-1].usage is None
    assert observer.errors == [("m", triton.address, "protocol")]


async def test_a_delta_that_is_missing_from_a_frame_still_to_come_is_noticed_with_that_frame(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    running, number = await send(await serve(triton), fake)
    fake.accept(number)
    fake.frame((number, "a"))
    fake.finish(number, 2, frame=2)
    await until(lambda: running.text == "a")
    await asyncio.sleep(0.05)
    assert not running.task.done()
    fake.frame()
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(running.task, 60)


async def test_a_request_of_which_nothing_is_heard_is_given_up(
    triton: FakeTriton, fake: FakeChannels, serve: Serve, observer: Any
) -> None:
    pool = await serve(triton, idle_timeout_s=3)
    running, number = await send(pool, fake)
    fake.accept(number)
    while not running.task.done():
        fake.frame()
        await asyncio.sleep(0.05)
    with pytest.raises(UnavailableError, match="stopped answering"):
        await running.task
    assert observer.errors == [("m", triton.address, "silent")]
    await asyncio.wait_for(triton.cancelled.wait(), 60)


async def test_requests_of_a_lost_channel_are_sent_again_over_the_next_or_end(
    triton: FakeTriton, fake: FakeChannels, serve: Serve, observer: Any
) -> None:
    pool = await serve(triton)
    (started, one), (accepted, two), (untouched, three) = [await send(pool, fake) for _ in range(3)]
    fake.accept(one)
    fake.accept(two)
    fake.frame((one, "par"))
    await until(lambda: started.text == "par" and bool(accepted.events))
    fake.lose()
    with pytest.raises(UnavailableError, match="was lost"):
        await asyncio.wait_for(started.task, 60)
    await until(lambda: len(fake.own) == 5)
    assert len(fake.ids) == 2
    for number in set(fake.own) - {one, two, three}:
        fake.accept(number)
        fake.finish(number, 0, text="Hello")
    await asyncio.wait_for(asyncio.gather(accepted.task, untouched.task), 60)
    for again in (accepted, untouched):
        assert again.text == "Hello"
        assert sum(isinstance(event, Accepted) for event in again.events) == 1
    assert fake.plain == 0, "what streams goes over a channel"
    assert observer.errors == [("m", triton.address, "channel_lost")] * 3
    assert pool.model("m").ready, "the model is well"


async def test_what_a_lost_channel_left_out_is_not_missed_from_the_next_one(
    triton: FakeTriton, fake: FakeChannels, serve: Serve, observer: Any
) -> None:
    """The client was not reading when its channel was lost, and the next one is open when it does."""
    pool = await serve(triton)
    events = await started(pool, fake)
    fake.finish(0, 1, frame=1, text="b")
    fake.lose()
    await until(lambda: len(fake.ids) == 2)
    fake.frame()
    running, number = await send(pool, fake)
    fake.accept(number)
    fake.frame((number, "x"))
    await until(lambda: running.text == "x")
    again = asyncio.create_task(anext(events))
    await until(lambda: again.done() or len(fake.own) == 3)
    resent = max(fake.own)
    fake.accept(resent)
    fake.finish(resent, 0, text="Hello")
    assert (await again).text == "Hello"
    assert observer.errors == [("m", triton.address, "channel_lost")]
    await events.aclose()
    running.task.cancel()


async def test_a_channel_that_only_the_model_knows_to_be_lost_is_opened_anew(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton)
    running, number = await send(pool, fake)
    fake.accept(number)
    fake.finish(number, 0, text="x")
    await running.task
    fake.ids[-1] = "something else"  # as after the model was loaded anew
    again, number = await send(pool, fake)
    assert len(fake.ids) == 2
    fake.accept(number)
    fake.finish(number, 0, text="Hello")
    await asyncio.wait_for(again.task, 60)
    assert again.text == "Hello"
    await until(lambda: fake.closed == 1)


async def test_a_stream_waits_a_moment_for_its_channel_and_is_a_503_then(
    triton: FakeTriton, fake: FakeChannels, serve: Serve, observer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_channel, "OPEN_WAIT_S", 0.05)
    fake.silent = True
    pool = await serve(triton)
    with pytest.raises(UnavailableError, match="stream") as raised:
        await Running(pool).task
    assert raised.value.retry_after_s
    assert observer.errors == [("m", triton.address, "no_channel")]
    assert triton.requests == []
    assert pool.model("m").ready
    assert [event async for event in pool.generate(generation())], "what does not stream needs none"


async def test_another_backend_is_tried_where_there_is_no_channel(
    tritons: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_channel, "OPEN_WAIT_S", 1.0)
    without, well = await tritons(), await tritons()
    without.model.channel = refusing("tritongate:unavailable: too many channels")
    pool = await serve(without, well)
    for _ in range(3):
        running = Running(pool)
        await running.task
        assert running.text == "Hello"
    assert without.requests == []


async def test_closing_a_generation_cancels_its_own_call_and_not_the_channel(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton)
    events = await started(pool, fake)
    await events.aclose()
    await asyncio.wait_for(triton.cancelled.wait(), 60)
    assert fake.closed == 0
    fake.frame((0, "nobody's"))
    running, number = await send(pool, fake)
    fake.accept(number)
    fake.frame((number, "a"))
    fake.finish(number, 1)
    await running.task
    assert running.text == "a"


async def test_a_slow_reader_stalls_nobody_and_is_given_up_beyond_a_bound(
    triton: FakeTriton, fake: FakeChannels, serve: Serve, observer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer, "BUFFER_LIMIT_BYTES", 1000)
    pool = await serve(triton)
    slow = await started(pool, fake)  # and from here on the client reads nothing
    fast, number = await send(pool, fake)
    fake.accept(number)
    for turn in range(20):
        fake.frame((0, "s"), (number, "f"))
        await until(lambda turn=turn: len(fast.text) == turn + 1)
    await asyncio.wait_for(triton.cancelled.wait(), 60)
    fake.finish(number, 20)
    await fast.task
    kept = await anext(slow)
    assert 5 < kept.tokens < 15, "what was kept is read before the error"
    with pytest.raises(ClientGoneError):
        await anext(slow)
    assert observer.errors == [], "no fault of the Triton's"


async def test_a_busy_reader_gets_what_piled_up_in_one_delta(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton)
    events = await started(pool, fake)
    for character in "abc":
        fake.frame((0, character))
    running, number = await send(pool, fake)  # its frame comes after those
    fake.accept(number)
    fake.frame((number, "x"))
    await until(lambda: running.text == "x")
    assert await anext(events) == Delta(pieces=("abc",), tokens=3)
    await events.aclose()
    running.task.cancel()


async def test_the_channel_is_closed_when_the_model_takes_no_more_requests_and_with_the_pool(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton, idle_timeout_s=100)
    running, number = await send(pool, fake)
    triton.model.state = "UNLOADING"
    await until(lambda: not pool.model("m").ready)
    fake.accept(number)
    fake.frame((number, "a"))
    await until(lambda: running.text == "a")
    assert fake.closed == 0, "one is still on it"
    fake.finish(number, 1)
    await running.task
    await until(lambda: fake.closed == 1)
    triton.model.state = "READY"
    await until(lambda: pool.model("m").ready)
    await send(pool, fake)
    assert len(fake.ids) == 2
    await pool.close()
    await until(lambda: fake.closed == 2)


async def test_running_generations_end_when_the_pool_is_closed(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton)
    running, number = await send(pool, fake)
    fake.accept(number)
    fake.frame((number, "a"))
    await until(lambda: running.text == "a")
    await pool.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        await asyncio.wait_for(running.task, 60)


async def test_a_channel_lost_after_the_final_response_does_not_concern_the_answer(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton)
    events = await started(pool, fake)
    fake.frame((0, "a"))
    fake.finish(0, 1)
    said = [await anext(events)]
    while not (isinstance(said[-1], Delta) and said[-1].usage):
        said.append(await anext(events))
    fake.lose()
    await asyncio.sleep(0.05)
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_a_delta_that_comes_while_another_is_taken_is_not_left_lying(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton, idle_timeout_s=100)
    events = await started(pool, fake)
    fake.frame((0, "a"))
    assert (await anext(events)).text == "a"
    fake.frame((0, "b"))
    running, number = await send(pool, fake)  # its frame comes after that one
    fake.accept(number)
    fake.frame((number, "x"))
    await until(lambda: running.text == "x")
    async with asyncio.timeout(20):
        assert (await anext(events)).text == "b"
    await events.aclose()
    running.task.cancel()
