"""An engine that has no room for a while: what must pass passes, and nothing is taken for dead."""

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
import openai
import pytest

from tests.e2e.repository_server import RepositoryServer, gateway, is_ready
from tests.e2e.stream_client import StreamClient
from tests.e2e.up_process import GOLDEN, metric, wait_until
from triton_models.entries import ModelEntry, write_entry
from wire.meta import Meta

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

FULL_S = 20.0
"""Longer than three probes without an answer in time take to have an engine loaded anew."""
RUNNING, WAITING = 2, 60
CLIENTS = 40
AT_ONCE_S = 10.0
"""Far less than the wait behind a full engine, far more than a busy machine needs."""
HEARTBEAT_S = 2.0


@dataclass
class Narrow:
    """`tritongate serve` in front of a Triton whose engine runs two sequences at a time."""

    base_url: str
    triton: StreamClient


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Narrow]:
    options = {"max_running": RUNNING, "max_waiting": WAITING}
    write_entry(tmp_path, model=ModelEntry(name="glm", checkpoint=str(GOLDEN / "chatglm3"), options=options))
    with (
        RepositoryServer(tmp_path) as server,
        gateway(server.ready.grpc, key=server.ready.repository_key) as base_url,
    ):
        triton = StreamClient(server.ready.grpc)
        yield Narrow(base_url, triton)
        triton.close()


class Feeders:
    """Clients that ask again as soon as they are answered, so that the engine stays full."""

    def __init__(self, base_url: str) -> None:
        self.answers = 0
        self.errors: list[Exception] = []
        self._base_url = base_url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        async with openai.AsyncOpenAI(
            base_url=self._base_url + "/v1", api_key="x", max_retries=0, timeout=200
        ) as sdk:
            await asyncio.gather(*(self._feed(sdk) for _ in range(CLIENTS)))

    async def _feed(self, sdk: openai.AsyncOpenAI) -> None:
        while not self._stop.is_set():
            try:
                await sdk.chat.completions.create(
                    model="glm",
                    messages=[{"role": "user", "content": "你好"}],
                    max_tokens=480,
                    extra_body={"ignore_eos": True},
                )
                self.answers += 1
            except openai.APIError as error:
                self.errors.append(error)


def control(triton: StreamClient, **sampling: object) -> Meta:
    """Send a probe or a cancel ahead of everything, and hold that it is answered at once."""
    began = time.monotonic()
    ((_, meta),) = triton.stream("glm", **sampling)
    assert time.monotonic() - began < AT_ONCE_S
    return meta


def skip_heartbeats(stream: Iterator[tuple[str, Meta]]) -> None:
    """Read to the end of a stream that must not have anything else."""
    for text, meta in stream:
        assert (text, meta) == ("", Meta())


def test_a_full_engine_still_answers_for_itself(narrow: Narrow) -> None:
    triton = narrow.triton
    rounds = 0
    with Feeders(narrow.base_url) as feeders:
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
            assert is_ready(narrow.base_url)
            request_id = f"waits-{rounds}"
            waiting = triton.stream("glm", "你好", request_id=request_id, max_tokens=480)
            assert next(waiting)[1].accepted is not None
            began = time.monotonic()
            assert next(waiting)[1] == Meta(), "a request that waits is kept alive by heartbeats"
            assert time.monotonic() - began < HEARTBEAT_S + AT_ONCE_S
            assert control(triton, cancel=request_id).cancelled is True
            with pytest.raises(RuntimeError, match="tritongate:cancelled:"):
                skip_heartbeats(waiting)
    assert feeders.errors == []
    assert feeders.answers > 0
    exposition = httpx.get(narrow.base_url + "/metrics", timeout=60).text
    assert metric(exposition, "tritongate_upstream_healthy", model="glm") == 1
    assert metric(exposition, "tritongate_upstream_errors_total") == 0
