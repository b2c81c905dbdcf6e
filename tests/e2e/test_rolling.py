"""A rolling upgrade under load: each Triton and each gateway is replaced in turn, and no request is lost.

The Tritons run as `deploy/kubernetes` has them: the same command, restrictions included, and ended by
SIGTERM. Each comes back at its address; `test_rolling_names` has those that come back at another.
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from bench.chaos_clients import Case, Clients, Ending, KserveCase, Manner, Result
from bench.resume import answers, bodies
from tests.e2e.manifest_triton import MODEL, RESTRICTED_KEY, ManifestTriton
from tests.e2e.serve_process import ServeProcess
from tests.e2e.up_process import wait_until
from tests.ports import free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CLIENTS = 6
TOKENS = 60
"""Of the shortest answer."""
KINDS = 9
MEANWHILE = 2 * CLIENTS
"""Answers between two replacements."""
PAUSE_S = 0.6
"""Between two answers to a client: what is started meanwhile needs the processors, too."""
WITHIN_S = 100.0


class Gateway:
    """A gateway, and the clients that ask it."""

    def __init__(self, tritons: list[ManifestTriton]) -> None:
        port = free_ports(1)[0]
        self.process = ServeProcess(
            ",".join(triton.grpc for triton in tritons),
            "--kserve-grpc-port",
            str(port),
            key=f"admin-key={RESTRICTED_KEY}",
        )
        self.kserve = f"127.0.0.1:{port}"

    def sees_all(self) -> bool:
        return self.process.gauge("tritongate_upstream_healthy") == 2

    def clients(self) -> Clients:
        """Make some; inside the event loop."""
        return Clients(self.process.base_url, self.kserve, MODEL)


@dataclass
class Load:
    """Clients that ask again and again, streamed and not and over both protocols of KServe."""

    cases: list[Case]
    kserve: list[KserveCase]
    asked: list[Clients]
    """Those of the gateways that are in the balancer."""
    results: list[Result] = field(default_factory=list)
    running: Counter[Clients] = field(default_factory=Counter)
    over: bool = False

    async def client(self, number: int) -> None:
        dice = random.Random(number)
        while not self.over:
            clients = dice.choice(self.asked)
            self.running[clients] += 1
            self.results.append(await self._ask(clients, dice))
            self.running[clients] -= 1
            await asyncio.sleep(PAUSE_S)

    async def _ask(self, clients: Clients, dice: random.Random) -> Result:
        if dice.random() < 0.4:
            return await clients.infer(dice, dice.choice(self.kserve), vanishes=False)
        case = dice.choice(self.cases)
        return await clients.chat(dice, case, Manner.STREAMS if case.body["stream"] else Manner.WAITS)

    async def answers(self, count: int) -> None:
        """Wait for so many more."""
        wanted = len(self.results) + count
        await until(lambda: len(self.results) >= wanted)

    async def end_of(self, clients: Clients) -> None:
        """Wait until none of them runs that are asked no more."""
        await until(lambda: not self.running[clients])


async def until(holds: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, holds, WITHIN_S)


@pytest.fixture
def gateways(fleet: list[ManifestTriton]) -> Iterator[list[Gateway]]:
    for triton in fleet:
        triton.wait_ready()
    made: list[Gateway] = []
    try:
        made.extend(Gateway(fleet) for _ in range(2))
        yield made
    finally:
        for gateway in made:
            gateway.process.close()


async def test_each_part_is_replaced_and_no_request_is_lost(
    fleet: list[ManifestTriton], gateways: list[Gateway]
) -> None:
    for gateway in gateways:
        await until(gateway.sees_all)
    load = await begin(gateways)
    asking = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
    made = list(load.asked)
    await load.answers(MEANWHILE)
    for triton in fleet:
        await asyncio.to_thread(triton.stop)
        await load.answers(MEANWHILE)
        triton.start()
        await asyncio.to_thread(triton.wait_ready)
        for gateway in gateways:
            await until(gateway.sees_all)
        await load.answers(MEANWHILE)
    for number, gateway in enumerate(list(gateways)):
        leaving = load.asked.pop(0)
        # What an orchestrator does: it waits until nothing comes any more. `test_drain` has what comes later.
        await load.end_of(leaving)
        assert await asyncio.to_thread(gateway.process.stop) == 0
        gateways[number] = await asyncio.to_thread(Gateway, fleet)
        await until(gateways[number].sees_all)
        load.asked.append(gateways[number].clients())
        made.append(load.asked[-1])
        await leaving.close()
        await load.answers(MEANWHILE)
    load.over = True
    await asyncio.gather(*asking)
    for each in made:
        await each.close()
    assert [result for result in load.results if result.ending is not Ending.ANSWERED] == []
    asked = {result.manner for result in load.results}
    assert asked == {Manner.STREAMS, Manner.WAITS, Manner.KSERVE, Manner.KSERVE_HTTP}


async def begin(gateways: list[Gateway]) -> Load:
    """Return a load that knows the right answers."""
    requests = bodies(KINDS, TOKENS, MODEL)
    right = await answers(gateways[0].process.base_url, requests)
    assert [answer.error for answer in right] == [None] * KINDS
    asked = [gateway.clients() for gateway in gateways]
    kserve = [await asked[0].learn(f"{number}") for number in range(3)]
    cases = list(itertools.starmap(Case, zip(requests, right, strict=True)))
    return Load(cases, kserve, asked)
