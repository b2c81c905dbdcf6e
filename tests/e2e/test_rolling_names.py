"""Tritons behind a name come and go under load, and no request fails."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.triton.options import PoolOptions
from gateway.triton.pool import TritonUpstream
from tests.e2e.manifest_triton import MODEL, ManifestTriton
from tests.e2e.test_rolling import PAUSE_S
from tests.gateway.serving import on_socket
from tests.gateway.triton.fake_resolver import NAME, FakeResolver

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CLIENTS = 4
TOKENS = 60


@pytest.fixture
def third(tmp_path: Path) -> Iterator[ManifestTriton]:
    made = ManifestTriton(tmp_path / "triton-2")
    yield made
    made.close()


class Load:
    """Clients that stream answer after answer, and what became of each."""

    def __init__(self, sdk: openai.AsyncOpenAI) -> None:
        self._sdk = sdk
        self.answered = 0
        self.failures: list[str] = []
        self._over = False
        self._clients = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]

    async def _client(self) -> None:
        while not self._over:
            try:
                stream = await self._sdk.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": "你好"}],
                    stream=True,
                    max_tokens=TOKENS,
                    extra_body={"ignore_eos": True},
                )
                chunks = [chunk async for chunk in stream]
            except openai.OpenAIError as error:
                self.failures.append(repr(error))
            else:
                assert chunks[-1].choices[0].finish_reason == "length"
                self.answered += 1
            await asyncio.sleep(PAUSE_S)

    async def answers(self, count: int) -> None:
        """Wait for so many more."""
        enough = self.answered + count
        await until(lambda: self.answered >= enough)

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._clients)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def gateway(resolver: FakeResolver) -> AsyncIterator[tuple[Any, TritonUpstream]]:
    options = PoolOptions(models=[MODEL], resolve=resolver, resolve_interval_s=0.5)
    upstream: Any = TritonUpstream([NAME], options)
    async with on_socket(upstream, log_level="warning") as served:
        yield served, upstream


async def test_all_are_replaced_one_after_the_other(
    fleet: list[ManifestTriton], third: ManifestTriton
) -> None:
    first, second = fleet
    for triton in fleet:  # which may have died since, where processes did not get to run for a second
        await asyncio.to_thread(triton.wait_ready)
    resolver = FakeResolver()
    async with gateway(resolver) as (served, upstream):
        assert (await served.http.get("/health/ready")).status_code == 503
        resolver.records["triton"] = [first.grpc, second.grpc]
        await until(served.gateway.ready)
        await until(lambda: sum(replica.state == "ready" for replica in upstream.replicas()) == 2)
        load = Load(served.sdk)
        await load.answers(20)
        # It ends as it vanishes: what runs there comes to its end, nothing new goes there.
        resolver.records["triton"] = [second.grpc]
        await asyncio.to_thread(first.stop)
        await load.answers(20)
        # Its address is known long before it serves.
        third.start()
        resolver.records["triton"] = [second.grpc, third.grpc]
        await asyncio.to_thread(third.wait_ready)  # this loop is the gateway's, too
        await until(lambda: third.grpc in {r.upstream for r in upstream.replicas() if r.state == "ready"})
        resolver.records["triton"] = OSError("the resolver is down meanwhile")
        await load.answers(20)
        resolver.records["triton"] = [third.grpc]
        await asyncio.to_thread(second.stop)
        await load.answers(20)
        await load.end()
        assert load.failures == []
        await until(lambda: [replica.upstream for replica in upstream.replicas()] == [third.grpc])
