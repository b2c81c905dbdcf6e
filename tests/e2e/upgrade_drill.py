"""An upgrade under load: each Triton and each gateway is replaced in turn, and no request fails.

Too long for every day, so not found by itself: `python -m pytest -s tests/e2e/upgrade_drill.py`.

The Tritons run as `deploy/kubernetes` has them: the same command, restrictions included, ended by SIGTERM,
and the next one only when the last has been ready for `minReadySeconds`.
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
import yaml

from tests.deploy.compose_stack import _TRITONSERVER
from tests.e2e.up_process import GOLDEN, TRITONGATE, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
MODEL = "chatglm3-6b"
CLIENTS = 6
TOKENS = 120
DRAIN_S = 30


def stateful_set() -> Any:
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes/base/triton.yaml").read_text(encoding="utf-8"))
    (found,) = [each["spec"] for each in documents if each["kind"] == "StatefulSet"]
    return found


def triton_arguments(ports: list[int]) -> list[str]:
    """Return the arguments of the manifest's Triton, on ports of this machine."""
    spec = stateful_set()["template"]["spec"]
    here = dict(zip(("--http-port", "--grpc-port", "--metrics-port"), ports, strict=True))
    here |= {"--model": f"{MODEL}={GOLDEN / 'chatglm3'}", "--device": "cpu", "--dtype": "float32"}
    words = [word.replace("$(RESTRICTED_KEY)", "secret") for word in spec["containers"][0]["args"]]
    changed = [f"{name}={here[name]}" if (name := word.partition("=")[0]) in here else word for word in words]
    return [*changed, *(f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics"))]


class Fleet:
    """Two Tritons and two gateways; `endpoints` are the gateways that clients are sent to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._prefix = f"tritongate_upgrade_{os.getpid()}_"
        self.ports = {f"triton-{number}": free_ports(3) for number in range(2)}
        self.ports |= {f"gateway-{number}": free_ports(1) for number in range(2)}
        self.endpoints: list[str] = []

    def url(self, gateway: str) -> str:
        return f"http://127.0.0.1:{self.ports[gateway][0]}"

    def start(self, name: str) -> None:
        if name.startswith("triton"):
            # Each has shared memory of its own, as in containers.
            server = self._folder / name / "tritonserver"
            server.parent.mkdir(exist_ok=True)
            server.write_text(_TRITONSERVER.format(python=sys.executable, prefix=f"{self._prefix}{name}_"))
            server.chmod(0o755)
            program = [sys.executable, str(ROOT / "deploy/docker/start_triton.py")]
            command = [*program, *triton_arguments(self.ports[name])]
        else:
            upstreams = ",".join(f"127.0.0.1:{self.ports[f'triton-{number}'][1]}" for number in range(2))
            command = [str(TRITONGATE), "serve", "--upstreams", upstreams, "--models", MODEL]
            command += [
                "--port",
                str(self.ports[name][0]),
                "--drain-s",
                str(DRAIN_S),
                "--log-level",
                "warning",
            ]
        paths = {"PATH": f"{self._folder / name}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        temporary = {"TMPDIR": str(self._folder), "OMP_NUM_THREADS": "1"}
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, env=os.environ | paths | temporary, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    async def ready(self, name: str) -> None:
        path = "/v2/health/ready" if name.startswith("triton") else "/health/ready"
        deadline = time.monotonic() + 100
        async with httpx.AsyncClient() as client:
            while True:
                assert self._processes[name].poll() is None, self.log(name)
                assert time.monotonic() < deadline, self.log(name)
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(self.url(name) + path)).status_code == 200:
                        return
                await asyncio.sleep(0.2)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-4000:]

    async def stop(self, name: str) -> float:
        """End a process by SIGTERM, as an orchestrator does; return the seconds that it took."""
        began = time.monotonic()
        self._processes[name].send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(self._processes[name].wait, 80)
        # The wheel's server aborts at its very end if another one here removed its folder in /tmp.
        assert status == 0 or name.startswith("triton"), self.log(name)
        return time.monotonic() - began

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        for region in Path("/dev/shm").glob(f"{self._prefix}*"):  # noqa: S108 - where they are
            region.unlink(missing_ok=True)


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
    for name in fleet.ports:
        fleet.start(name)
    for name in fleet.ports:
        await fleet.ready(name)
    fleet.endpoints = [fleet.url(f"gateway-{number}") for number in range(2)]
    load = Load(fleet)
    clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
    await asyncio.sleep(1)
    told = []
    for name in fleet.ports:
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
