"""An upgrade under load: each Triton and each gateway is replaced in turn, and no request fails.

Too long for every day, so not found by itself: `python -m pytest -s tests/e2e/upgrade_drill.py`.

The Tritons run as `deploy/kubernetes` has them: the same command, restrictions included, ended by SIGTERM,
and the next one only when the last has been ready for `minReadySeconds`. As pods do, each comes back with
another address, which the gateways find by one name: their `/etc/hosts` is one of this test's, in a mount
namespace of their own, so that this needs root.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.manifest_triton import MODEL, RESTRICTED_KEY, ManifestTriton, stateful_set
from tests.e2e.up_process import TRITONGATE
from tests.ports import free_ports

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount namespace, and so root"),
]

CLIENTS = 6
TOKENS = 120
DRAIN_S = 30


class Fleet:
    """Two Tritons and two gateways; `endpoints` are the gateways that clients are sent to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._grpc_port = free_ports(1)[0]
        self._tritons: dict[str, ManifestTriton] = {}
        self._started = 0
        self._gateways: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = {f"gateway-{number}": free_ports(1)[0] for number in range(2)}
        self._hosts = folder / "hosts"
        self.names = ("triton-0", "triton-1", *self._ports)
        self.endpoints: list[str] = []

    def url(self, gateway: str) -> str:
        return f"http://127.0.0.1:{self._ports[gateway]}"

    def start(self, name: str) -> None:
        if name in self._ports:
            self._start_gateway(name)
            return
        self._started += 1
        host = f"127.0.7.{self._started}"
        triton = ManifestTriton(self._folder / f"{name}-{host}", host=host, grpc_port=self._grpc_port)
        self._tritons[name] = triton
        self._write_hosts()
        triton.start()

    def _write_hosts(self) -> None:
        addresses = [triton.grpc.partition(":")[0] for triton in self._tritons.values()]
        lines = ["127.0.0.1 localhost", *(f"{address} triton" for address in addresses)]
        self._hosts.write_text("\n".join(lines) + "\n")

    def _start_gateway(self, name: str) -> None:
        command = [str(TRITONGATE), "serve", "--upstreams", f"dns:///triton:{self._grpc_port}"]
        command += ["--port", str(self._ports[name]), "--drain-s", str(DRAIN_S), "--log-level", "info"]
        inside = f'mount --bind {self._hosts} /etc/hosts && exec "$@"'
        key = {"TRITONGATE_REPOSITORY_KEY": f"admin-key={RESTRICTED_KEY}"}
        key["TRITONGATE_PLAIN_REPOSITORY_KEY"] = "true"  # as in the manifests
        with (self._folder / f"{name}.log").open("ab") as log:
            self._gateways[name] = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", inside, "sh", *command],
                env=os.environ | key,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    async def ready(self, name: str) -> None:
        if name in self._tritons:
            await asyncio.to_thread(self._tritons[name].wait_ready)
            return
        deadline = time.monotonic() + 100
        async with httpx.AsyncClient() as client:
            while True:
                assert self._gateways[name].poll() is None, self.log(name)
                assert time.monotonic() < deadline, self.log(name)
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(self.url(name) + "/health/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.2)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-4000:]

    async def stop(self, name: str) -> float:
        """End a process by SIGTERM, as an orchestrator does; return the seconds that it took."""
        if name in self._tritons:
            seconds = await asyncio.to_thread(self._tritons[name].stop)
            self._tritons.pop(name).close()
            self._write_hosts()  # a pod's address is there until the pod is gone
            return seconds
        began = time.monotonic()
        self._gateways[name].send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(self._gateways[name].wait, 80) == 0, self.log(name)
        return time.monotonic() - began

    def close(self) -> None:
        for process in self._gateways.values():
            process.kill()
            process.wait()
        for triton in self._tritons.values():
            triton.close()


class Load:
    """Clients that ask without a pause, and what became of each request."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.answered = 0
        self.failures: list[str] = []
        self.over = False

    async def client(self, number: int) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            while not self.over:
                endpoint = self._fleet.endpoints[number % len(self._fleet.endpoints)]
                try:
                    failure = await self._ask(http, endpoint)
                except httpx.HTTPError as error:
                    failure = repr(error)
                if failure is None:
                    self.answered += 1
                else:
                    self.failures.append(failure)

    async def _ask(self, http: httpx.AsyncClient, endpoint: str) -> str | None:
        body = {"model": MODEL, "stream": True, "max_tokens": TOKENS, "ignore_eos": True}
        body["messages"] = [{"role": "user", "content": "你好"}]
        # A connection for each, as a balancer makes them: one that is kept would stay with its gateway.
        headers = {"Connection": "close"}
        async with http.stream(
            "POST", endpoint + "/v1/chat/completions", json=body, headers=headers
        ) as answer:
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
        if answer.status_code != 200 or not lines or lines[-1] != "data: [DONE]":
            return f"{answer.status_code} {lines[-2:]}"
        document: Any = json.loads(lines[-2].removeprefix("data: "))
        return None if document["choices"][0]["finish_reason"] == "length" else lines[-2]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    try:
        yield fleet
    finally:
        fleet.close()


async def test_every_part_is_replaced_and_no_request_fails(fleet: Fleet) -> None:
    for name in fleet.names:
        fleet.start(name)
        await fleet.ready(name)
    fleet.endpoints = [fleet.url(f"gateway-{number}") for number in range(2)]
    load = Load(fleet)
    clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
    await asyncio.sleep(1)
    told = []
    for name in fleet.names:
        before = load.answered
        if name.startswith("gateway"):
            # What an orchestrator does first; the manifests' preStop gives it time.
            fleet.endpoints.remove(fleet.url(name))
            await asyncio.sleep(0.5)
        seconds = await fleet.stop(name)
        fleet.start(name)
        await fleet.ready(name)
        if name.startswith("gateway"):
            fleet.endpoints.append(fleet.url(name))
        await asyncio.sleep(stateful_set()["minReadySeconds"] if name.startswith("triton") else 1)
        told.append(f"{name}: stopped in {seconds:.1f} s, {load.answered - before} answered meanwhile")
        assert load.answered > before, told
    load.over = True
    await asyncio.gather(*clients)
    sys.stdout.write("\n".join([*told, f"{load.answered} answered, {len(load.failures)} failed\n"]))
    assert not load.failures, load.failures[:5]
