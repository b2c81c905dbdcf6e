"""`tritongate up --replicas 2`: one gateway, two Tritons, of which one goes, and no answer with it."""

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bench.resume import Answer, answers, bodies
from tests.e2e.up_process import UpProcess, metric, slowed, wait_until
from tests.processes import command_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

REPLICAS = 2
CLIENTS = 36
TOKENS = 120
"""Of the shortest answer."""
FEW_CLIENTS, MANY_TOKENS = 9, 700
"""One of each kind, and so long that a server that ends cannot finish them."""
BEGUN = 0.75
"""Share of the answers that have begun before a server is lost; each server has half of them."""
WITHIN_S = 100.0
PATH = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "model": "chatglm3-demo",
    "messages": [{"role": "user", "content": "你好"}],
    "ignore_eos": True,
}


@dataclass(frozen=True)
class Server:
    """One of the Tritons."""

    process: psutil.Process
    metrics: str
    region: str
    """What the names of its shared-memory regions begin with."""

    def gauge(self, name: str, **labels: str) -> float:
        text = httpx.get(f"http://127.0.0.1:{self.metrics}/metrics", timeout=20).text
        return metric(text, f"tritongate_engine_{name}", **labels)


def servers(up: UpProcess) -> list[Server]:
    found = [
        (process, words) for process in up.tree() if (words := command_of(process))[:1] and is_server(words)
    ]
    return [
        Server(
            process,
            flag(words, r"--metrics-port=(\d+)"),
            flag(words, "--backend-config=python,shm-region-prefix-name=(.*)"),
        )
        for process, words in found
    ]


def is_server(words: list[str]) -> bool:
    return words[0].endswith("bin/tritonserver")


def flag(words: list[str], pattern: str) -> str:
    (value,) = [found[1] for word in words if (found := re.fullmatch(pattern, word))]
    return str(value)


@pytest.fixture(scope="module")
def up() -> Iterator[UpProcess]:
    """For all tests here, in order: each leaves both servers up or on their way, and the last one ends it."""
    process = UpProcess(
        *("--replicas", str(REPLICAS), "--metrics-port", "0", "--device", "cpu", "--dtype", "float32"),
        *("--draft-tokens", "0"),  # each token of an answer takes its step
    )
    try:
        process.wait_ready()
        wait_until(lambda: process.gauge("tritongate_upstream_healthy") == REPLICAS)
        yield process
    finally:
        process.close()


async def answered(client: httpx.AsyncClient, tokens: int) -> int:
    answer = await client.post(PATH, json={**ASK, "max_tokens": tokens})
    return int(answer.raise_for_status().json()["usage"]["completion_tokens"])


async def test_a_dead_model_and_an_ended_server_cost_no_answer(up: UpProcess) -> None:
    requests = bodies(FEW_CLIENTS, MANY_TOKENS, ASK["model"])
    async with asyncio.timeout(3 * WITHIN_S):
        undisturbed = await answers(up.base_url, requests)
        assert [answer.error for answer in undisturbed] == [None] * FEW_CLIENTS
        for lose in (kill_model, end_server):
            await lose_answers(lose, up, requests, undisturbed)
    assert up.gauge("tritongate_requests_in_flight") == 0


async def test_one_of_two_dies_under_load_and_no_answer_with_it(up: UpProcess) -> None:
    """Streamed and not, greedy and sampled, with choices, log-probabilities, a schema: as without it."""
    await asyncio.to_thread(wait_until, lambda: up_and_idle(up), WITHIN_S)
    killed: list[Server] = []
    kept: list[Server] = []
    before = up.gauge("tritongate_resumed_total")
    requests = bodies(CLIENTS, TOKENS, ASK["model"])
    async with (
        asyncio.timeout(3 * WITHIN_S),
        httpx.AsyncClient(base_url=up.base_url, timeout=WITHIN_S) as client,
    ):
        undisturbed = await answers(up.base_url, requests)
        assert [answer.error for answer in undisturbed] == [None] * CLIENTS
        assert up.gauge("tritongate_resumed_total") == before

        def kill(server: Server) -> None:
            killed[:], kept[:] = [server], [each for each in servers(up) if each != server]
            server.process.kill()

        await lose_answers(kill, up, requests, undisturbed)
        assert up.gauge("tritongate_requests_in_flight") == 0

        await asyncio.to_thread(
            wait_until, lambda: up.gauge("tritongate_upstream_healthy") == REPLICAS, WITHIN_S
        )
        (other,) = kept
        back = [each for each in servers(up) if each != other]
        assert [each.metrics for each in back] == [each.metrics for each in killed]
        assert other in servers(up)
        await asyncio.gather(*(answered(client, 50) for _ in range(8)))
        for each in (*back, other):
            await asyncio.to_thread(
                wait_until, lambda each=each: each.gauge("requests_total", finish_reason="length") >= 4
            )
    regions = [each.region for each in (*killed, *kept)]
    assert all(region_files(region) for region in regions)
    assert up.stop() == 0
    assert not any(region_files(region) for region in regions)


async def lose_answers(
    lose: Callable[[Server], None], up: UpProcess, requests: list[dict[str, Any]], undisturbed: list[Answer]
) -> None:
    """Check that the answers are the same when a server is lost, and that some were resumed.

    On a busy machine, a slowed server may have accepted none of them when it is lost: then once more.
    """
    before = up.gauge("tritongate_resumed_total")
    for _ in range(3):
        await asyncio.to_thread(wait_until, lambda: up_and_idle(up), WITHIN_S)
        disturbed = await answers_despite(lose, up, requests)
        pairs = zip(undisturbed, disturbed, strict=True)
        assert [former.differs(later) for former, later in pairs] == [None] * len(requests)
        if up.gauge("tritongate_resumed_total") > before:
            return
    pytest.fail("no answer was resumed")


def model_of(server: Server) -> psutil.Process:
    """Return its stub; one that was killed stays a zombie, without a command."""
    (stub,) = [
        each
        for each in server.process.children(recursive=True)
        if "triton_python_backend_stub" in (command_of(each) or [""])[0]
    ]
    return stub


async def answers_despite(
    lose: Callable[[Server], None], up: UpProcess, requests: list[dict[str, Any]]
) -> list[Answer]:
    """Ask all at once, and lose one of the servers that are at it, which ends no answer until then."""
    server = servers(up)[0]
    first_token = "tritongate_time_to_first_token_seconds_count"
    enough = up.gauge(first_token) + BEGUN * len(requests)
    with contextlib.ExitStack() as slow:
        slow.enter_context(slowed(model_of(server)))

        async def disturb() -> None:
            await asyncio.to_thread(wait_until, lambda: up.gauge(first_token) >= enough)
            # On a slow machine, the server may have been lost already: Triton gave its slowed model up.
            with contextlib.suppress(psutil.NoSuchProcess):
                await asyncio.to_thread(lose, server)
            await asyncio.to_thread(slow.close)

        return await answers(up.base_url, requests, disturb)


def kill_model(server: Server) -> None:
    model_of(server).kill()


def end_server(server: Server) -> None:
    """End it; its model is slowed until then, and finishes no answer meanwhile."""
    server.process.terminate()
    server.process.wait(WITHIN_S)


def up_and_idle(up: UpProcess) -> bool:
    with contextlib.suppress(httpx.TransportError):  # of a server that is being started again
        both = servers(up) if up.gauge("tritongate_upstream_healthy") == REPLICAS else []
        return len(both) == REPLICAS and not any(each.gauge("requests_running") for each in both)
    return False


def region_files(prefix: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{prefix}*"))  # noqa: S108 - where they are
