"""Requests whose model's process dies under them, and that wait until it is back."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.core.upstream import Tokenization
from gateway.errors import RateLimitError, UnavailableError
from gateway.triton.replicas import ReplicaState
from tests.gateway.triton.fake_triton import (
    FakeTriton,
    accepted,
    generation,
    hello,
    refusing,
    reply,
    two_ids,
    until,
)
from tests.gateway.triton.running import collect, text
from wire.meta import Meta

DEAD = "Stub process 'm_0_0' is not healthy."
GONE = "Request for unknown model: 'm' has no available versions"


def kill(triton: FakeTriton) -> None:
    """The model's process is dead from now on."""
    triton.model.answer = triton.model.probe = triton.model.tokenize = refusing(DEAD)


def repair(triton: FakeTriton) -> None:
    triton.model.answer, triton.model.probe, triton.model.tokenize = hello, None, two_ids
    triton.model.state, triton.model.reason = "READY", ""


async def in_state(pool: Any, state: ReplicaState) -> None:
    await until(lambda: any(replica.state is state for replica in pool.replicas()))


@pytest.mark.parametrize("seen", [[], [accepted()]])
@pytest.mark.parametrize("said", [DEAD, GONE])
async def test_a_request_that_the_death_met_waits_as_one_that_comes_after_it(
    triton: FakeTriton, serve: Any, seen: Any, said: str
) -> None:
    pool = await serve(triton, upstream_wait_s=60.0)
    kill(triton)
    triton.model.answer = refusing(said, *seen)
    asking = asyncio.create_task(collect(pool, generation()))
    await in_state(pool, ReplicaState.STUCK)
    after = asyncio.create_task(collect(pool, generation()))
    await asyncio.sleep(0.5)
    assert len(triton.requests) == 1
    triton.model.state = "LOADING"
    await in_state(pool, ReplicaState.NOT_READY)
    repair(triton)
    assert [text(each) for each in await asyncio.gather(asking, after)] == ["Hello", "Hello"]
    assert len(triton.requests) == 3


async def test_so_does_one_whose_connection_broke_with_its_server(triton: FakeTriton, serve: Any) -> None:
    pool = await serve(triton, upstream_wait_s=60.0)
    release = asyncio.Event()

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        await release.wait()

    triton.model.answer = answer
    asking = asyncio.create_task(collect(pool, generation()))
    await until(lambda: len(triton.requests) == 1)
    await triton.stop()
    await in_state(pool, ReplicaState.UNREACHABLE)
    await asyncio.sleep(0.5)
    assert not asking.done(), asking.exception()
    repair(triton)
    await triton.start()
    assert text(await asking) == "Hello"


async def test_so_does_one_for_tokens(triton: FakeTriton, serve: Any) -> None:
    pool = await serve(triton, upstream_wait_s=60.0)
    kill(triton)
    request = generation()
    asked = Tokenization(request_id="t", model="m", prompt=request.prompt, deadline=request.deadline)
    asking = asyncio.create_task(pool.tokenize(asked))
    await in_state(pool, ReplicaState.STUCK)
    repair(triton)
    assert list((await asking).ids) == [0, 5]


async def test_the_waits_of_one_request_are_counted_together(triton: FakeTriton, serve: Any) -> None:
    """Of a model that dies of each request, and takes a while to come back."""
    pool = await serve(triton, upstream_wait_s=1.0)

    async def die(request: Any, context: Any) -> AsyncIterator[Any]:
        triton.model.probe = refusing(DEAD)
        asyncio.get_running_loop().call_later(0.7, setattr, triton.model, "probe", None)
        async for each in refusing(DEAD)(request, context):
            yield each

    triton.model.answer = die
    with pytest.raises(UnavailableError):
        await collect(pool, generation())
    assert len(triton.requests) < 3


async def test_the_wait_for_a_model_that_stays_dead_ends(triton: FakeTriton, serve: Any) -> None:
    pool = await serve(triton, upstream_wait_s=0.6)
    kill(triton)
    with pytest.raises(UnavailableError, match="stopped answering"):
        async with asyncio.timeout(30):
            await collect(pool, generation())
    assert len(triton.requests) == 1


async def test_without_a_time_to_wait_it_is_an_error_at_once(triton: FakeTriton, serve: Any) -> None:
    pool = await serve(triton, upstream_wait_s=0.0)
    kill(triton)
    with pytest.raises(UnavailableError, match="has died"):
        await collect(pool, generation())


async def test_a_request_that_kills_its_model_is_not_sent_for_ever(triton: FakeTriton, serve: Any) -> None:
    pool = await serve(triton, upstream_wait_s=60.0)
    triton.model.answer = refusing(DEAD)
    with pytest.raises(UnavailableError, match="has died"):
        await collect(pool, generation())
    assert len(triton.requests) == 3


async def test_one_whose_client_has_text_is_not_asked_again(triton: FakeTriton, serve: Any) -> None:
    pool = await serve(triton, upstream_wait_s=60.0, resume=False)
    triton.model.answer = refusing(DEAD, accepted(), reply("Hel", Meta(tokens=1)))
    with pytest.raises(UnavailableError, match="has died"):
        await collect(pool, generation())
    assert len(triton.requests) == 1


async def test_a_full_model_is_not_waited_for(triton: FakeTriton, serve: Any) -> None:
    pool = await serve(triton, upstream_wait_s=60.0)
    triton.model.answer = refusing("tritongate:queue_full: full")
    with pytest.raises(RateLimitError):
        await collect(pool, generation())
    assert len(triton.requests) == 1


async def test_a_dead_one_is_waited_for_though_another_was_unloaded(tritons: Any, serve: Any) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second, upstream_wait_s=60.0)
    await pool.unload("m", upstream=first.address)
    kill(second)
    await in_state(pool, ReplicaState.STUCK)
    asking = asyncio.create_task(collect(pool, generation()))
    await asyncio.wait({asking}, timeout=0.5)
    assert not asking.done(), asking.exception()
    repair(second)
    assert text(await asking) == "Hello"
