"""Answers over a delta channel that nobody reads any more, or reads too slowly, and what closes channels."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.errors import ClientGoneError, UnavailableError
from gateway.generation import Delta
from gateway.triton import delta_channel
from tests.gateway.triton.asking import asked, begun
from tests.gateway.triton.fake_channel import FakeChannels
from tests.gateway.triton.fake_triton import FakeTriton, until

Serve = Callable[..., Any]


async def test_closing_a_generation_cancels_its_own_call_and_not_the_channel(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton)
    events = await begun(pool, fake)
    await events.aclose()
    await asyncio.wait_for(triton.cancelled.wait(), 60)
    assert fake.closed == 0
    fake.frame((0, "nobody's"))
    asking, number = await asked(pool, fake)
    fake.accept(number)
    fake.frame((number, "a"))
    fake.finish(number, 1)
    await asking.task
    assert asking.text == "a"


async def test_a_slow_reader_stalls_nobody_and_is_given_up_beyond_a_bound(
    triton: FakeTriton, fake: FakeChannels, serve: Serve, observer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_channel, "BUFFER_LIMIT_BYTES", 1000)
    pool = await serve(triton)
    slow = await begun(pool, fake)  # and from here on the client reads nothing
    fast, number = await asked(pool, fake)
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
    events = await begun(pool, fake)
    for character in "abc":
        fake.frame((0, character))
    asking, number = await asked(pool, fake)  # its frame comes after those
    fake.accept(number)
    fake.frame((number, "x"))
    await until(lambda: asking.text == "x")
    assert await anext(events) == Delta(pieces=("abc",), tokens=3)
    await events.aclose()
    asking.task.cancel()


async def test_the_channel_is_closed_when_the_model_takes_no_more_requests_and_with_the_pool(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton, idle_timeout_s=100)
    asking, number = await asked(pool, fake)
    triton.model.state = "UNAVAILABLE"
    await until(lambda: not pool.model("m").ready)
    fake.accept(number)
    fake.frame((number, "a"))
    await until(lambda: asking.text == "a")
    assert fake.closed == 0, "one is still on it"
    fake.finish(number, 1)
    await asking.task
    await until(lambda: fake.closed == 1)
    triton.model.state = "READY"
    await until(lambda: pool.model("m").ready)
    await asked(pool, fake)
    assert len(fake.ids) == 2
    await pool.close()
    await until(lambda: fake.closed == 2)


async def test_running_generations_end_when_the_pool_is_closed(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton)
    asking, number = await asked(pool, fake)
    fake.accept(number)
    fake.frame((number, "a"))
    await until(lambda: asking.text == "a")
    await pool.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        await asyncio.wait_for(asking.task, 60)
