"""An engine that has no room for a while: what must pass passes, and nothing is taken for dead."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Self

import openai
import pytest

from tests.e2e.mix_server import RUNNING, Mix
from tests.e2e.stream_client import StreamClient
from tests.e2e.up_process import slowed, wait_until
from wire.meta import Meta

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

FULL_S = 20.0
"""Longer than three probes without an answer in time take to have an engine loaded anew."""
CLIENTS = 40
TOKENS = 600
"""The engine is slowed, so that it is full without taking a processor; these outlast a moment without."""
MODEL = "line"
AT_ONCE_S = 10.0
"""Far less than the wait behind a full engine, far more than a busy machine needs."""
HEARTBEAT_S = 2.0


class Feeders:
    """Clients that ask again as soon as they are answered, so that the engine stays full until they leave."""

    def __init__(self, base_url: str) -> None:
        self.answers = 0
        self.errors: list[Exception] = []
        self._base_url = base_url
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    async def _run(self) -> None:
        async with openai.AsyncOpenAI(
            base_url=self._base_url + "/v1", api_key="x", max_retries=0, timeout=200
        ) as sdk:
            clients = [asyncio.create_task(self._feed(sdk)) for _ in range(CLIENTS)]
            await asyncio.to_thread(self._over.wait)
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def _feed(self, sdk: openai.AsyncOpenAI) -> None:
        while True:
            try:
                await sdk.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": "你好"}],
                    max_tokens=TOKENS,
                    extra_body={"ignore_eos": True},
                )
                self.answers += 1
            except openai.APIError as error:
                self.errors.append(error)


def control(triton: StreamClient, **sampling: object) -> Meta:
    """Send a probe or a cancel ahead of everything, and hold that it is answered at once."""
    began = time.monotonic()
    ((_, meta),) = triton.stream(MODEL, **sampling)
    assert time.monotonic() - began < AT_ONCE_S
    return meta


def skip_heartbeats(stream: Iterator[tuple[str, Meta]]) -> None:
    """Read to the end of a stream that must not have anything else."""
    for text, meta in stream:
        assert (text, meta) == ("", Meta())


def test_a_full_engine_still_answers_for_itself(mix: Mix) -> None:
    triton = mix.triton

    errors = mix.gateway.gauge("tritongate_upstream_errors_total")
    rounds = 0
    with Feeders(mix.gateway.base_url) as feeders, slowed(mix.server.stub(MODEL)):
        wait_until(lambda: control(triton, probe=True).probe.waiting >= CLIENTS - RUNNING - 2)
        until = time.monotonic() + FULL_S
        while time.monotonic() < until or rounds < 3:
            rounds += 1
            # Where one has just ended, the next takes its place in the following step.
            wait_until(lambda: control(triton, probe=True).probe.running == RUNNING)
            report = control(triton, probe=True).probe
            assert report.running <= RUNNING
            assert report.waiting > 0
            assert report.heartbeat_age_s < AT_ONCE_S  # a minute would make it stuck
            assert mix.gateway.is_ready()
            request_id = f"waits-{rounds}"
            waiting = triton.stream(MODEL, "你好", request_id=request_id, max_tokens=480)
            metas = (meta for _, meta in waiting if meta != Meta())  # a slow start has heartbeats, too
            assert next(metas).accepted is not None
            began = time.monotonic()
            assert next(waiting)[1] == Meta(), "a request that waits is kept alive by heartbeats"
            assert time.monotonic() - began < HEARTBEAT_S + AT_ONCE_S
            assert control(triton, cancel=request_id).cancelled is True
            with pytest.raises(RuntimeError, match="tritongate:cancelled:"):
                skip_heartbeats(waiting)
        wait_until(lambda: feeders.answers > 0)
    assert feeders.errors == []
    assert mix.gateway.gauge("tritongate_upstream_healthy", model=MODEL) == 1
    assert mix.gateway.gauge("tritongate_upstream_errors_total") == errors
    wait_until(lambda: mix.idle(MODEL))
