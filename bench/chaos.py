"""Kills, stops and slows three Tritons at random under mixed clients, and checks that every promise holds.

`python -m bench.chaos --seconds 60 --clients 24`; the seed that it prints repeats what is done to them.
In float32 every answer must be the undisturbed one, whatever happened to the Triton that was writing it. It
prints how the requests ended and what was left afterwards, and exits with 1 if anything does not hold.
"""

import asyncio
import collections
import contextlib
import os
import random
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
import psutil

from bench.chaos_clients import Case, Clients, Ending, KserveCase, Manner, Result
from bench.gpu.servers import free_port, up
from bench.resume import answers, bodies

_REPLICAS = 3
_CASES = 36
_KSERVE_CASES = 12
_TOKENS = 120
"""Of the shortest answer."""
_REQUEST_TIMEOUT_S = 100
_THINKS_S = 0.3
"""Longest pause of a client between two requests; after a refusal it is at least a second."""
_PAUSE_S = (1.0, 6.0)
"""Between two disturbances."""
_STOPPED_S = (0.2, 14.0)
"""A stopped server; the gateway gives up a silent one after ten seconds."""
_SLOWED_S = 8.0
_SLICE_S = 0.05
"""A slowed process runs so long, and then stands still twice as long."""
_SETTLED_S = 120.0
_MORE_TASKS = 4
_MORE_DESCRIPTORS = 8
"""Channels that come and go."""
_MORE_MEMORY_MIB = 64
_MIB = 2**20
_SHARED = Path("/dev/shm")  # noqa: S108 - where the regions are
_FAULTS_OF_CODE = ("Traceback (most recent call last)", "was never retrieved", "was never awaited")


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the gateway's process has."""

    tasks: int
    descriptors: int
    memory_mib: int


class Stack:
    """The gateway, and the Tritons that it started."""

    def __init__(self, url: str, log: Path, tasks: Path) -> None:
        self.url = url
        self.log = log
        self._tasks = tasks
        (self.gateway,) = psutil.Process().children()
        self.prefixes: set[str] = set()
        """What the names of all servers' shared memory began with."""
        self.processes: dict[int, psutil.Process] = {}
        """All that were ever seen below the gateway."""

    def _below(self, pattern: str) -> list[psutil.Process]:
        below = self.gateway.children(recursive=True)
        self.processes |= {each.pid: each for each in below}
        found = []
        for each in below:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if re.search(pattern, " ".join(each.cmdline()[:3])):
                    found.append(each)
        return sorted(found, key=lambda each: each.pid)

    def servers(self) -> list[psutil.Process]:
        """Return the tritonservers."""
        found = self._below(r"bin/tritonserver( |$)")
        for each in found:
            self.prefixes.update(_flags(each, r"--backend-config=python,shm-region-prefix-name=(.*)"))
        return found

    def stubs(self) -> list[psutil.Process]:
        """Return the processes of models."""
        return self._below(r"^\S*triton_python_backend_stub( |$)")

    def supervisors(self) -> list[psutil.Process]:
        """Return what starts the tritonservers."""
        return self._below(r"-m triton_models.embedded$")

    def metric(self, name: str) -> float:
        """Return the sum of the samples of a metric of the gateway."""
        return _sum(httpx.get(self.url + "/metrics", timeout=60).text, name)

    def requests(self, model: str) -> float:
        """Return how many requests for the model the gateway has counted, whatever became of them."""
        text = httpx.get(self.url + "/metrics", timeout=60).text
        asked = "\n".join(line for line in text.splitlines() if f'model="{model}"' in line)
        return _sum(asked, "tritongate_requests_total")

    def engines_run(self) -> float:
        """Return how many requests run in all engines."""
        total = 0.0
        for server in self.servers():
            for port in _flags(server, r"--metrics-port=(\d+)"):
                text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
                total += _sum(text, "tritongate_engine_requests_running")
                total += _sum(text, "tritongate_engine_requests_waiting")
        return total

    def holdings(self) -> Holdings:
        """Return what the gateway's process has now."""
        self._tasks.unlink(missing_ok=True)
        self.gateway.send_signal(signal.SIGUSR1)
        while not self._tasks.exists():
            time.sleep(0.01)
        tasks = int(self._tasks.read_text(encoding="ascii"))
        return Holdings(tasks, self.gateway.num_fds(), self.gateway.memory_info().rss // _MIB)

    def left_in_memory(self) -> list[str]:
        """Return the shared memory of all servers that there have been."""
        return [each.name for prefix in self.prefixes for each in _SHARED.glob(f"{prefix}*")]


def _flags(process: psutil.Process, pattern: str) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return [found[1] for word in process.cmdline() if (found := re.fullmatch(pattern, word))]
    return []


def _sum(exposition: str, name: str) -> float:
    return sum(float(found) for found in re.findall(rf"(?m)^{name}(?:\{{.*\}})? (\S+)$", exposition))


class Disturbance:
    """What is done to the servers; `dice` decide, of nothing else."""

    def __init__(self, stack: Stack, dice: random.Random) -> None:
        self.done: collections.Counter[str] = collections.Counter()
        self._stack = stack
        self._dice = dice
        self._began = time.monotonic()

    async def run(self, seconds: float) -> None:
        """Disturb for so long, and leave nothing stopped."""
        async with asyncio.TaskGroup() as lasting:
            while (left := self._began + seconds - time.monotonic()) > 0:
                await asyncio.sleep(min(left, self._dice.uniform(*_PAUSE_S)))
                lasting.create_task(self._disturb())

    def _disturb(self) -> Coroutine[Any, Any, None]:
        stack = self._stack
        whats: dict[str, tuple[Callable[[], list[psutil.Process]], Callable[..., Any]]] = {
            "kill a server": (stack.servers, psutil.Process.kill),
            "kill a stub": (stack.stubs, psutil.Process.kill),
            "end a server": (stack.servers, psutil.Process.terminate),
            "kill a supervisor": (stack.supervisors, psutil.Process.kill),
            "stop a server": (stack.servers, _stop),
            "stop a stub": (stack.stubs, _stop),
            "slow a server": (stack.servers, _slow),
            "slow a stub": (stack.stubs, _slow),
        }
        name = self._dice.choice(list(whats))
        which, seconds = self._dice.random(), self._dice.uniform(*_STOPPED_S)
        find, act = whats[name]
        return self._act(name, find, act, which, seconds)

    async def _act(
        self,
        name: str,
        find: Callable[[], list[psutil.Process]],
        act: Callable[..., Any],
        which: float,
        seconds: float,
    ) -> None:
        found = find()
        if not found:
            return
        victim = found[int(which * len(found))]
        self.done[name] += 1
        lasts = f" for {seconds:.1f} s" if act is _stop else ""
        click.echo(f"{time.monotonic() - self._began:6.1f} s  {name} ({victim.pid}){lasts}")
        with contextlib.suppress(psutil.NoSuchProcess):
            if act is _stop or act is _slow:
                await act(victim, seconds)
            else:
                act(victim)


async def _stop(process: psutil.Process, seconds: float) -> None:
    process.suspend()
    try:
        await asyncio.sleep(seconds)
    finally:
        process.resume()


async def _slow(process: psutil.Process, _seconds: float) -> None:
    for _ in range(int(_SLOWED_S / (3 * _SLICE_S))):
        await _stop(process, 2 * _SLICE_S)
        await asyncio.sleep(_SLICE_S)


async def _settle(stack: Stack, before: Holdings | None) -> tuple[Holdings, list[str]]:
    """Wait until everything is as it should be at rest; return what the gateway has, and what is not so."""
    deadline = time.monotonic() + _SETTLED_S
    while True:
        # One after the other, on a thread: with nothing else to do.
        faults = await asyncio.to_thread(_unsettled, stack)
        has = await asyncio.to_thread(stack.holdings)
        if before is not None:
            for name, most in (
                ("tasks", before.tasks + _MORE_TASKS),
                ("descriptors", before.descriptors + _MORE_DESCRIPTORS),
                ("memory_mib", before.memory_mib + _MORE_MEMORY_MIB),
            ):
                if getattr(has, name) > most:
                    faults.append(f"{name}: {getattr(has, name)}, {getattr(before, name)} before")
        if not faults or time.monotonic() > deadline:
            return has, faults
        await asyncio.sleep(1)


def _unsettled(stack: Stack) -> list[str]:
    try:
        found = {
            "healthy upstreams": (stack.metric("tritongate_upstream_healthy"), _REPLICAS),
            "requests in flight": (stack.metric("tritongate_requests_in_flight"), 0),
            "requests in engines": (stack.engines_run(), 0),
            "servers": (len(stack.servers()), _REPLICAS),
        }
    except httpx.HTTPError as error:
        return [f"metrics: {error!r}"]
    faults = [f"{name}: {value:g}, not {right}" for name, (value, right) in found.items() if value != right]
    living = {
        prefix
        for server in stack.servers()
        for prefix in _flags(server, r"--backend-config=python,shm-region-prefix-name=(.*)")
    }
    left = [name for name in stack.left_in_memory() if not name.startswith(tuple(living))]
    return [*faults, *(f"shared memory of a dead server: {name}" for name in left)]


async def _client(
    clients: Clients, dice: random.Random, cases: list[Case], kserve: list[KserveCase], until: float
) -> list[Result]:
    results = []
    while time.monotonic() < until:
        results.append(await clients.ask(dice, cases, kserve))
        refused = results[-1].ending in (Ending.REFUSED, Ending.BROKEN_OFF)
        await asyncio.sleep(dice.uniform(0, _THINKS_S) + refused)
    return results


async def _storm(
    stack: Stack, kserve_address: str, count: int, seconds: float, seed: int
) -> tuple[list[Result], list[str]]:
    """Return how all requests ended, and what does not hold otherwise."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
    requests = bodies(_CASES, _TOKENS, model)
    right = await answers(stack.url, requests)
    if errors := [each.error for each in right if each.error is not None]:
        raise click.ClickException(f"undisturbed, and yet: {errors[0]}")
    cases = [Case(body, answer) for body, answer in zip(requests, right, strict=True)]
    clients = Clients(stack.url, kserve_address, model)
    try:
        kserve = [await clients.learn(f"{number}") for number in range(_KSERVE_CASES)]
        distinct = {str(case.answer.texts) for case in cases} | {case.text for case in kserve}
        click.echo(f"{len(cases) + len(kserve)} requests with {len(distinct)} different answers")
        before, faults = await _settle(stack, None)
        if faults:
            raise click.ClickException(f"undisturbed, and yet: {'; '.join(faults)}")
        counted = stack.requests(model)
        disturbance = Disturbance(stack, random.Random(seed))  # noqa: S311 - repeatable
        until = time.monotonic() + seconds
        running = [
            asyncio.create_task(
                _client(clients, random.Random(f"{seed} {number}"), cases, kserve, until)  # noqa: S311
            )
            for number in range(count)
        ]
        await disturbance.run(seconds)
        results = [result for each in await asyncio.gather(*running) for result in each]
    finally:
        await clients.close()
    after, faults = await _settle(stack, before)
    counted = stack.requests(model) - counted
    left = sum(result.ending is Ending.LEFT for result in results)
    if not len(results) - left <= counted <= len(results):
        faults.append(f"{counted:g} requests counted of {len(results)}, of whose clients {left} left")
    resumed = stack.metric("tritongate_resumed_total")
    click.echo(f"done: {dict(disturbance.done)}; {resumed:g} answers resumed, {counted:g} requests counted")
    click.echo(f"the gateway before: {before}")
    click.echo(f"the gateway after:  {after}")
    return results, faults


@contextlib.contextmanager
def _running(flags: tuple[str, ...], folder: Path) -> Iterator[tuple[Stack, str]]:
    """Run three Tritons and their gateway, which is one process."""
    log, tasks, port = folder / "up.log", folder / "tasks", free_port()
    os.environ["CHAOS_TASKS"] = str(tasks)
    arguments = ["--replicas", str(_REPLICAS), "--device", "cpu", "--dtype", "float32", "--workers", "1"]
    arguments += ["--kserve-grpc-port", str(port), "--request-timeout-s", str(_REQUEST_TIMEOUT_S)]
    program = (sys.executable, "-m", "bench.chaos_gateway")
    with up(*arguments, "--log-level", "warning", *flags, log=log, program=program) as url:
        yield Stack(url, log, tasks), f"127.0.0.1:{port}"


def _table(results: list[Result]) -> None:
    counts = collections.Counter((result.manner, result.ending) for result in results)
    click.echo(f"\n{'':18}" + "".join(f"{ending:>12}" for ending in Ending))
    for manner in Manner:
        click.echo(f"{manner:18}" + "".join(f"{counts[manner, ending]:12}" for ending in Ending))
    totals = collections.Counter(result.ending for result in results)
    click.echo(f"{'all':18}" + "".join(f"{totals[ending]:12}" for ending in Ending))
    said = collections.Counter(
        result.detail[:160] for result in results if result.ending in (Ending.REFUSED, Ending.BROKEN_OFF)
    )
    for detail, times in said.most_common(8):
        click.echo(f"{times:5} x {detail}")


@click.command()
@click.option("--seconds", default=600, show_default=True, help="of disturbance")
@click.option("--clients", default=200, show_default=True)
@click.option("--seed", type=int, help="of what is done; a new one unless given")
@click.argument("flags", nargs=-1)
def main(seconds: int, clients: int, seed: int | None, flags: tuple[str, ...]) -> None:
    """Disturb three Tritons under load; FLAGS, behind `--`, are further ones of `tritongate up`."""
    seed = secrets.randbelow(10**6) if seed is None else seed
    click.echo(f"seed {seed}, {clients} clients, {seconds} s")
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        with _running(flags, Path(folder)) as (stack, kserve):
            results, faults = asyncio.run(_storm(stack, kserve, clients, seconds, seed))
        _, living = psutil.wait_procs(list(stack.processes.values()), timeout=20)
        faults += [f"process {each.pid} is left" for each in living if _runs(each)]
        faults += [f"shared memory is left: {name}" for name in stack.left_in_memory()]
        log = stack.log.read_text(encoding="utf-8", errors="replace")
    _table(results)
    faults += [f"in the log, {log.count(sign)} times: {sign}" for sign in _FAULTS_OF_CODE if sign in log]
    wrong = [result for result in results if result.ending is Ending.WRONG]
    faults += [f"{result.manner}: {result.detail[:400]}" for result in wrong]
    if not any(result.ending is Ending.ANSWERED for result in results):
        faults.append("nothing was answered")
    for fault in faults:
        click.echo(f"DOES NOT HOLD: {fault}")
    if faults:
        click.echo(f"the log ends:\n{log[-3000:]}")
        sys.exit(1)
    click.echo("everything holds")


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


if __name__ == "__main__":
    main()
