"""What a generation finds out about its replica, while the replica finds out about itself."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from gateway.triton.channel import Channel
from gateway.triton.health import HealthPolicy, ReplicaState
from gateway.triton.replicas import Replica
from gateway.triton.status import Fault, TritonError
from tests.gateway.triton.fake_triton import reply, until
from tests.gateway.triton.test_replicas import becomes, watched
from wire.meta import Meta


class Asking:
    """An observer that has a request for whatever is called ready."""

    def __init__(self) -> None:
        self.replica: Replica | None = None
        self.formats: list[str] = []

    def upstream_health(self, model: str, upstream: str, *, healthy: bool) -> None:
        if healthy and self.replica is not None:
            self.formats.append(self.replica.serving()[1].chat_format)

    def upstream_error(self, model: str, upstream: str, code: str) -> None:
        raise AssertionError("no generation was made")


async def test_a_probe_that_was_asked_before_a_suspicion_and_answered_after_it(
    triton: Any, fast: HealthPolicy
) -> None:
    """Once let a replica be called ready that no request could be made for."""
    asked, release = asyncio.Event(), asyncio.Event()

    async def slow(request: Any, context: Any) -> AsyncIterator[Any]:
        asked.set()
        await release.wait()
        yield reply(meta=Meta(probe=triton.model.report), final=True)

    channel = Channel(triton.address)
    asking = Asking()
    asking.replica = replica = Replica("m", channel, fast, asking, idle_timeout_s=10)
    watching = asyncio.create_task(replica.watch())
    await until(lambda: replica.state is ReplicaState.READY)
    triton.model.probe = slow
    await asked.wait()
    replica.suspect(TritonError(Fault.UNREACHABLE, "the stream broke off"))
    assert replica.state is ReplicaState.UNREACHABLE
    release.set()
    await until(lambda: replica.state is ReplicaState.READY)
    assert asking.formats == ["chatglm3"] * 2
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    await replica.close()
    await channel.close()


async def test_a_suspicion_is_looked_into_at_once(triton: Any, fast: HealthPolicy) -> None:
    async with watched(triton, replace(fast, interval_s=3600)) as replica:
        await becomes(replica, ReplicaState.READY)
        replica.suspect(TritonError(Fault.SILENT, "nothing came"))
        assert replica.state is ReplicaState.STUCK
        await becomes(replica, ReplicaState.READY)
        replica.suspect(TritonError(Fault.INVALID_REQUEST, "the client's own"))
        assert replica.state is ReplicaState.READY
