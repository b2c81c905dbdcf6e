"""A gateway is replaced under load by SIGUSR2, again and again: no request is lost, no connection refused."""

import asyncio
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.chaos_clients import Case, Clients, Ending, Manner, Result
from bench.resume import answers, bodies
from tests.e2e.test_rolling import Load
from tests.e2e.up_process import UpProcess
from tests.ports import free_ports
from tests.processes import answers as is_up
from tests.processes import wait_ended
from tests.replaceable import WITHIN_S, ReplaceableGateway

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODEL = "chatglm3"
PORT, KSERVE_PORT, METRICS_PORT = free_ports(3)
URL = f"http://127.0.0.1:{PORT}"
CLIENTS = 6
NEWCOMERS = 3
TOKENS = 40
"""Of the shortest answer."""
KINDS = 6
MEANWHILE = 2 * CLIENTS
"""Answers between two replacements."""
TIMES = 2
"""So that what replaced another is replaced, too."""
LATE = ("CANCELLED", "UNAVAILABLE")
"""How gRPC itself ends a call that comes in the moment in which its server stops (docs/operations.md)."""


@pytest.fixture
def gateway(up: UpProcess, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ReplaceableGateway]:
    settings = {
        "upstreams": [up.triton_grpc],
        "port": PORT,
        "kserve_grpc_port": KSERVE_PORT,
        "metrics_address": f"127.0.0.1:{METRICS_PORT}",
        "workers": getattr(request, "param", 1),
    }
    made = ReplaceableGateway(tmp_path / "config.yaml", settings, TRITONGATE_REPOSITORY_KEY=up.repository_key)
    try:
        made.wait_for(made.is_ready)
        yield made
    finally:
        made.close()


async def newcomer(load: Load, statuses: list[object]) -> None:
    """Ask in short requests, each over a connection of its own."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for number in itertools.count():
        if load.over:
            return
        method, path = ("GET", "/v1/models") if number % 4 else ("POST", "/v1/chat/completions")
        async with httpx.AsyncClient(base_url=URL, timeout=WITHIN_S) as http:
            try:
                asked = await http.request(method, path, json=None if method == "GET" else body)
                statuses.append(asked.status_code)
            except httpx.TransportError as error:
                statuses.append(repr(error))
        await asyncio.sleep(0.02)


def is_late(result: Result) -> bool:
    return result.manner is Manner.KSERVE and result.detail.startswith(LATE)


@pytest.mark.parametrize("gateway", [1, 2], indirect=True)
async def test_nothing_is_lost_while_a_gateway_is_replaced(gateway: ReplaceableGateway) -> None:
    requests = bodies(KINDS, TOKENS, MODEL)
    right = await answers(URL, requests)
    assert [answer.error for answer in right] == [None] * KINDS
    clients = Clients(URL, f"127.0.0.1:{KSERVE_PORT}", MODEL)
    kserve = [await clients.learn(f"{number}") for number in range(3)]
    load = Load(list(itertools.starmap(Case, zip(requests, right, strict=True))), kserve, [clients])
    statuses: list[object] = []
    asking = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
    asking += [asyncio.create_task(newcomer(load, statuses)) for _ in range(NEWCOMERS)]
    await load.answers(MEANWHILE)
    left = []
    for _ in range(TIMES):
        left += await gateway.replace()
        await load.answers(MEANWHILE)
    load.over = True
    await asyncio.gather(*asking)
    await clients.close()
    lost = [result for result in load.results if result.ending is not Ending.ANSWERED]
    assert [result for result in lost if not is_late(result)] == []
    # All have one channel, whose calls fail together until it has connected again: once a replacement.
    answered = [each.ending is Ending.ANSWERED for each in load.results if each.manner is Manner.KSERVE]
    assert [well for well, _ in itertools.groupby(answered)].count(False) <= TIMES
    assert set(statuses) == {200}
    manners = {result.manner for result in load.results}
    assert manners == {Manner.STREAMS, Manner.WAITS, Manner.KSERVE, Manner.KSERVE_HTTP}
    assert len({process.pid for process in left}) == len(left)
    assert gateway.main not in left
    assert not await asyncio.to_thread(wait_ended, left, WITHIN_S)
    assert is_up(f"http://127.0.0.1:{METRICS_PORT}/metrics")
    last = [gateway.main, *gateway.workers()]
    gateway.main.terminate()
    assert not await asyncio.to_thread(wait_ended, last, WITHIN_S)


async def test_a_successor_that_fails_leaves_the_gateway_as_it_was(gateway: ReplaceableGateway) -> None:
    gateway.configure({"no_such_setting": 1})
    gateway.main.send_signal(signal.SIGUSR2)
    await gateway.until(lambda: gateway.said("not handed over: the successor ended") == 1)
    assert "no_such_setting" in gateway.output
    assert gateway.is_ready()
    assert gateway.said("handed over") == 0
    assert await asyncio.to_thread(gateway.stop) == 0


def test_up_hands_nothing_over(demo_up: UpProcess) -> None:
    demo_up.process.send_signal(signal.SIGUSR2)
    demo_up.wait_for(lambda: "SIGUSR2 is ignored" in demo_up.output)
    assert demo_up.is_ready()
