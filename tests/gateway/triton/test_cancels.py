"""A model of ours is told that a request is cancelled, and the request's stream then ends by itself.

A stream that is reset at the moment of its final response would keep the model from ever being unloaded, so
what is counted here is resets.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import DeadlineError, GatewayError
from gateway.triton import client, dialects
from gateway.triton.dialects.chatglm import CHATGLM
from tests.gateway.triton.fake_channel import FakeChannels
from tests.gateway.triton.fake_triton import (
    FakeTriton,
    accepted,
    finished,
    generation,
    hanging,
    refusing,
    reply,
    until,
)
from tests.gateway.triton.running import collect, send, started
from wire.request import attempt_id, traced_id

Serve = Callable[..., Any]
ANSWER_S = 0.03


async def leave(pool: Any, **changes: Any) -> None:
    events = pool.generate(generation(**changes))
    await anext(events)
    await events.aclose()


async def test_whoever_leaves_a_stream_has_the_model_told(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    events = await started(await serve(triton), fake)
    ended = triton.half_closed
    await events.aclose()
    await until(lambda: triton.half_closed >= ended + 2)  # the request's, and the one that told
    assert [traced_id(name) for name in triton.told] == ["req-1"]
    assert (triton.resets, fake.closed) == (0, 0)


@pytest.mark.parametrize("waits", [False, True], ids=["between two responses", "in a wait"])
async def test_so_has_who_leaves_an_answer_that_is_not_streamed(
    triton: FakeTriton, serve: Serve, *, waits: bool
) -> None:
    pool = await serve(triton)
    triton.model.answer = hanging(accepted())
    ended = triton.half_closed
    if waits:
        task = asyncio.create_task(collect(pool, generation()))
        await until(lambda: bool(triton.requests))
        task.cancel()
        await asyncio.wait({task})
    else:
        await leave(pool)
    await until(lambda: triton.half_closed >= ended + 2)
    assert (len(triton.told), triton.resets) == (1, 0)


async def test_the_deadline_resets_no_stream_either(triton: FakeTriton, serve: Serve) -> None:
    """The engine ends a late request at the same moment."""
    pool = await serve(triton)
    triton.model.answer = hanging(accepted())
    with pytest.raises(DeadlineError):
        await collect(pool, generation(deadline=asyncio.get_running_loop().time() + 0.5))
    ended = triton.half_closed
    # A probe's stream may end before the model is told.
    await until(lambda: bool(triton.told) and not triton.running and triton.half_closed >= ended + 1)
    assert triton.resets == 0


async def test_a_refusal_resets_nothing(triton: FakeTriton, serve: Serve) -> None:
    pool = await serve(triton)
    triton.model.answer = refusing("tritongate:queue_full: no room")
    for stream in (False, True):
        ended = triton.half_closed
        with pytest.raises(GatewayError):
            await collect(pool, generation(stream=stream))
        await until(lambda ended=ended: triton.half_closed > ended)
    assert (triton.told, triton.resets) == ([], 0)


async def test_clients_that_leave_at_any_moment_reset_nothing(triton: FakeTriton, serve: Serve) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        for _ in range(3):
            await asyncio.sleep(ANSWER_S / 3)
            yield reply()
        yield finished("x", 1)

    pool = await serve(triton)
    triton.model.answer = answer
    dice = random.Random(0)
    ends = [0]

    async def ask() -> None:
        task = asyncio.create_task(collect(pool, generation()))
        await asyncio.sleep(dice.uniform(0, 1.5 * ANSWER_S))
        task.cancel()
        await asyncio.wait({task})
        ends[0] += task.cancelled()

    for _ in range(50):
        await asyncio.gather(*(ask() for _ in range(8)))
    assert ends[0] > 0
    await until(lambda: not triton.running)
    assert len(triton.told) > 0
    assert triton.resets == 0


async def test_a_stream_that_ends_late_behind_its_final_response_is_not_reset(
    triton: FakeTriton, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_EOF_WAIT_S", 0.02)
    pool = await serve(triton)
    ends = asyncio.Event()

    async def answer(_request: Any, _context: Any) -> AsyncIterator[Any]:
        yield accepted()
        yield finished()
        await ends.wait()

    triton.model.answer = answer
    await collect(pool, generation())  # which does not wait for it for long
    assert triton.running
    await asyncio.sleep(0.3)
    ends.set()
    await until(lambda: not triton.running)
    assert triton.resets == 0


async def test_what_is_left_unread_is_read_until_the_stream_ends(triton: FakeTriton, serve: Serve) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        while True:
            yield reply("x" * 2**16)

    pool = await serve(triton)
    triton.model.answer = answer
    ended = triton.half_closed
    await leave(pool)
    await until(lambda: triton.half_closed >= ended + 2)
    assert triton.resets == 0


async def test_of_two_attempts_with_one_id_the_one_that_is_left_ends(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton)
    events = await started(pool, fake)
    stays, number = await send(pool, fake)
    fake.accept(number)
    await events.aclose()
    await until(lambda: bool(triton.told))
    fake.frame((number, "a"))
    fake.finish(number, 1)
    await stays.task
    assert (stays.text, len(triton.told), triton.resets) == ("a", 1, 0)


async def test_a_model_that_knew_nothing_of_the_request_yet_is_told_again(
    triton: FakeTriton, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_AGAIN_S", 0.02)
    monkeypatch.setattr(client, "_LEAVE_S", 60.0)
    pool = await serve(triton)
    triton.model.answer, triton.model.obeys = hanging(accepted()), False
    await leave(pool)
    await until(lambda: len(triton.told) >= 3)
    assert triton.resets == 0
    triton.model.obeys = True
    await until(lambda: not triton.running)
    assert (len(set(triton.told)), triton.resets) == (1, 0)


async def test_a_model_that_does_not_end_it_in_time_has_the_stream_reset(
    triton: FakeTriton, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_LEAVE_S", 0.5)
    pool = await serve(triton)
    triton.model.answer, triton.model.obeys = hanging(accepted()), False
    await leave(pool)
    await until(lambda: triton.resets == 1)


async def test_a_model_that_is_unloading_ends_its_streams_itself(triton: FakeTriton, serve: Serve) -> None:
    pool = await serve(triton)
    goes_on = asyncio.Event()

    async def answer(_request: Any, _context: Any) -> AsyncIterator[Any]:
        yield accepted()
        await goes_on.wait()
        yield finished()

    triton.model.answer = answer
    events = pool.generate(generation())
    await anext(events)
    triton.model.state = "UNLOADING"
    await events.aclose()
    await asyncio.sleep(0.3)
    goes_on.set()
    await until(lambda: not triton.running)
    assert (triton.told, triton.resets) == ([], 0)


async def test_a_closed_pool_waits_for_no_model(
    triton: FakeTriton, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_LEAVE_S", 1000.0)
    pool = await serve(triton)
    triton.model.answer, triton.model.obeys = hanging(accepted()), False
    await leave(pool)
    await until(lambda: bool(triton.told))
    await asyncio.wait_for(pool.close(), 30)
    await until(lambda: triton.resets >= 1)
    assert triton.resets <= 2  # a call that tells may be on its way, too


async def test_a_foreign_model_is_cancelled_by_its_stream(
    triton: FakeTriton, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialects, "CHATGLM", replace(CHATGLM, cancel=None))
    pool = await serve(triton)
    triton.model.answer = hanging(accepted())
    await leave(pool)
    await until(lambda: triton.resets == 1)
    assert triton.told == []


def test_an_attempts_id_is_its_own_and_has_the_requests() -> None:
    assert len({attempt_id("r") for _ in range(100)}) == 100
    longest = "r" * 128
    for given in ("r", longest):
        made = attempt_id(given)
        assert len(made) <= 128
        assert given.startswith(traced_id(made))
    assert traced_id(attempt_id("req-1")) == traced_id("req-1") == "req-1"
