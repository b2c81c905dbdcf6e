"""A model that the real Triton does not have now: unknown, dead, unloaded or still loading."""

import asyncio

import pytest

from gateway.errors import UnavailableError
from gateway.triton.errors import Fault
from gateway.triton.pool import TritonUpstream
from gateway.triton.replicas import ReplicaState
from tests.e2e.scripted_triton import (
    Scripted,
    ask,
    asking,
    failure,
    ready,
    stream_failure,
    until,
    upstream_of,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


async def test_a_model_that_triton_does_not_know(scripted: Scripted) -> None:
    async with upstream_of(scripted, models=["other"]) as upstream:
        await until(lambda: upstream.replicas()[0].state is ReplicaState.NOT_READY)
        with pytest.raises(UnavailableError):
            [event async for event in upstream.generate(asking("hello", model="other"))]
    client = scripted.connect()
    try:
        assert (await stream_failure(client, "other", [1, 1])).fault is Fault.NOT_READY
    finally:
        await client.close()


async def test_a_stub_that_dies_and_is_brought_back(upstream: TritonUpstream) -> None:
    error = await failure(upstream, "die")
    assert type(error) is UnavailableError
    assert error.retry_after_s
    assert type(await failure(upstream, "hello")) is UnavailableError
    await ready(upstream)
    assert await ask(upstream, "hello")


async def test_an_unloaded_model(upstream: TritonUpstream, scripted: Scripted) -> None:
    client = scripted.connect()
    try:
        await client.unload("m")
        assert (await stream_failure(client, "m", [1, 1])).fault is Fault.NOT_READY
        assert not await client.ready("m")
        await until(lambda: not upstream.model("m").ready)
        assert type(await failure(upstream, "hello")) is UnavailableError
    finally:
        await client.load("m", timeout_s=60)
        await client.close()
    await ready(upstream)


async def test_a_model_that_is_being_loaded(scripted: Scripted) -> None:
    """503 while it loads, also to a gateway that is started meanwhile; then it serves."""
    hold = scripted.entry / "hold"
    client = scripted.connect()
    loading = None
    try:
        async with upstream_of(scripted) as upstream:
            await ready(upstream)
            hold.touch()
            await client.unload("m")
            loading = asyncio.create_task(client.load("m", timeout_s=60))
            await until(lambda: upstream.replicas()[0].state is ReplicaState.NOT_READY)
            error = await failure(upstream, "hello")
            assert type(error) is UnavailableError
            assert error.retry_after_s
            async with upstream_of(scripted, models=["m"]) as late:
                await until(lambda: late.replicas()[0].state is ReplicaState.NOT_READY)
                assert type(await failure(late, "hello")) is UnavailableError
                hold.unlink()
                await ready(late)
                await ready(upstream)
                assert await ask(late, "hello")
                assert await ask(upstream, "hello")
    finally:
        hold.unlink(missing_ok=True)
        if loading is not None:
            await loading
        await client.close()
