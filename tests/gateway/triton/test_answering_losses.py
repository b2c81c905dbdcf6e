"""What is missing from an answer over a delta channel, or too much, and channels that are lost."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import UnavailableError, UpstreamProtocolError
from gateway.generation import Accepted
from tests.gateway.triton.asking import Asked, asked
from tests.gateway.triton.conftest import FAST
from tests.gateway.triton.fake_channel import FakeChannels
from tests.gateway.triton.fake_triton import FakeTriton, reply, until
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
    asking, number = await asked(await serve(triton), fake, n=choices)
    answer(fake, number)
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(asking.task, 60)


async def test_a_delta_too_many_is_no_answer_either(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    asking, number = await asked(await serve(triton), fake)
    fake.accept(number)
    fake.frame((number, "a"))
    fake.frame((number, "b"))
    await until(lambda: asking.text == "ab")
    fake.finish(number, 1)
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(asking.task, 60)


async def test_a_missing_delta_is_noticed_by_the_count(
    triton: FakeTriton, fake: FakeChannels, serve: Serve, observer: Any
) -> None:
    asking, number = await asked(await serve(triton), fake)
    fake.accept(number)
    fake.frame((number, "a"))
    fake.frame()
    fake.finish(number, 2)
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(asking.task, 60)
    assert asking.text == "a"
    assert asking.deltas[-1].usage is None
    assert observer.errors == [("m", triton.address, "protocol")]


async def test_a_delta_that_is_missing_from_a_frame_still_to_come_is_noticed_with_that_frame(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    asking, number = await asked(await serve(triton), fake)
    fake.accept(number)
    fake.frame((number, "a"))
    fake.finish(number, 2, frame=2)
    await until(lambda: asking.text == "a")
    await asyncio.sleep(0.05)
    assert not asking.task.done()
    fake.frame()
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(asking.task, 60)


async def test_a_request_of_which_nothing_is_heard_is_given_up(
    triton: FakeTriton, fake: FakeChannels, serve: Serve, observer: Any
) -> None:
    pool = await serve(triton, idle_timeout_s=3)
    asking, number = await asked(pool, fake)
    fake.accept(number)
    while not asking.task.done():
        fake.frame()
        await asyncio.sleep(0.05)
    with pytest.raises(UnavailableError, match="stopped answering"):
        await asking.task
    assert observer.errors == [("m", triton.address, "silent")]
    await asyncio.wait_for(triton.cancelled.wait(), 60)


async def test_requests_of_a_lost_channel_are_sent_again_or_end(
    triton: FakeTriton, fake: FakeChannels, serve: Serve, observer: Any
) -> None:
    pool = await serve(triton, health=replace(FAST, backoff_first_s=60, backoff_limit_s=60))
    (begun, one), (accepted, two), (untouched, _) = [await asked(pool, fake) for _ in range(3)]
    fake.accept(one)
    fake.accept(two)
    fake.frame((one, "par"))
    await until(lambda: begun.text == "par" and bool(accepted.events))
    fake.lose()
    with pytest.raises(UnavailableError, match="was lost"):
        await asyncio.wait_for(begun.task, 60)
    await asyncio.wait_for(asyncio.gather(accepted.task, untouched.task), 60)
    for again in (accepted, untouched):
        assert again.text == "Hello"
        assert sum(isinstance(event, Accepted) for event in again.events) == 1
    assert fake.plain == 2, "sent again plainly, while the channel was closed"
    assert observer.errors == [("m", triton.address, "channel_lost")] * 3
    assert pool.model("m").ready, "the model is well"
    await until(lambda: len(fake.ids) == 1)


async def test_a_channel_that_only_the_model_knows_to_be_lost_is_opened_anew(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton)
    asking, number = await asked(pool, fake)
    fake.accept(number)
    fake.finish(number, 0, text="x")
    await asking.task
    fake.ids[-1] = "something else"  # as after the model was loaded anew
    again = Asked(pool)
    await asyncio.wait_for(again.task, 60)
    assert again.text == "Hello"
    await until(lambda: fake.closed == 1)
