"""A resolver to test against: what names lead to is what the test says."""

import asyncio
from collections.abc import Sequence

from gateway.core.events import Delta
from gateway.triton.pool import TritonUpstream
from gateway.triton.replicas import ReplicaState
from tests.gateway.triton.fake_triton import FakeTriton, generation, until

NAME = "dns:///triton:8001"
"""Of the host `triton`."""


class FakeResolver:
    """Stands for `gateway.triton.resolver.resolve`."""

    def __init__(self, **records: Sequence[str] | OSError) -> None:
        self.records = records
        """By host: its addresses, or why nobody can say."""
        self.looks = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        self.looks += 1
        await asyncio.sleep(0)
        found = self.records.get(host, ())
        if isinstance(found, OSError):
            raise found
        return list(found)


def addresses(pool: TritonUpstream, state: ReplicaState | None = None) -> list[str]:
    return [each.upstream for each in pool.replicas() if state in (None, each.state)]


def health(pool: TritonUpstream) -> dict[str, bool]:
    """Return of each Triton whether its model takes requests."""
    return {each.upstream: each.state is ReplicaState.READY for each in pool.replicas()}


async def ready_on(pool: TritonUpstream, *tritons: FakeTriton) -> None:
    await until(
        lambda: sorted(addresses(pool, ReplicaState.READY)) == sorted(each.address for each in tritons)
    )


async def ask(pool: TritonUpstream, model: str = "m") -> str:
    events = [event async for event in pool.generate(generation(model=model))]
    return "".join(event.text for event in events if isinstance(event, Delta))
