"""Kills, stops, slows and cuts off three Tritons under mixed clients, and checks that every promise holds.

`python -m bench.chaos --seconds 60 --clients 24`; the seed that it prints repeats what is done to them.
In float32 every answer must be the undisturbed one, whatever happened to the Triton that was writing it. Only
the death of a gateway process may end one, by the end of its connection. No request may be refused while a
Triton was healthy all the time. It prints how the requests ended and what was left afterwards, and exits with
1 if anything does not hold.
"""

import asyncio
import bisect
import collections
import contextlib
import itertools
import math
import os
import random
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
import psutil

from bench.chaos_clients import Case, Clients, Ending, KserveCase, Manner, Result
from bench.chaos_relay import Relay, network
from bench.chaos_stack import WORKERS, Holdings, Stack, flags_of
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
"""A stopped server, or a network that is cut or stands still; the gateway gives up a silent Triton after ten
seconds."""
_SLOWED_S = 8.0
_SLICE_S = 0.05
"""A slowed process runs so long, and then stands still twice as long."""
_NOTICED_S = 5.0
"""So long after what was done to a Triton, the gateway may still call it healthy though it is not."""
_RESUMES = 3
"""So often the gateway resumes one answer: a request that its servers die of must not take down many."""
_FAILED = r'"upstream failed: \w+", "request_id": "(chaos-\d+)"'
"""A line of the gateway's log for each Triton that failed a request."""
_REPLACED_S = 15.0
"""So long a process of the gateway may be missing."""
_LOOK_S = 0.5
_UNSEEN_S = 3.0
"""Nothing is claimed of a time in which nobody looked for longer."""
_SETTLED_S = 120.0
_ENDED_S = 20.0
_MORE_TASKS = 4
_MORE_DESCRIPTORS = 8
"""Channels that come and go."""
_MORE_MEMORY_MIB = 64
_FAULTS_OF_CODE = ("Traceback (most recent call last)", "was never retrieved", "was never awaited")


Act = Callable[[Any, float], Awaitable[None]]
"""Does something to a process or a relay, for so many seconds if it lasts."""
_KILL_WORKER = "kill a gateway process"


class Health:
    """Which Tritons every process of the gateway called healthy, over time."""

    def __init__(self, stack: Stack) -> None:
        self._numbers = {relay.address: relay.number for relay in stack.relays}
        self._url = stack.url
        self._seen: list[tuple[float, frozenset[int]]] = []

    async def watch(self) -> None:
        """Look for ever."""
        async with httpx.AsyncClient(base_url=self._url, timeout=_UNSEEN_S) as http:
            while True:
                healthy: frozenset[int] = frozenset()
                with contextlib.suppress(httpx.HTTPError):
                    healthy = self._healthy((await http.get("/metrics")).text)
                self._seen.append((time.monotonic(), healthy))
                await asyncio.sleep(_LOOK_S)

    def throughout(self, began: float, ended: float) -> frozenset[int]:
        """Return the Tritons that were healthy at every look, from one before to one after."""
        times = [at for at, _ in self._seen]
        first, last = bisect.bisect_left(times, began) - 1, bisect.bisect_right(times, ended)
        if first < 0 or last >= len(times):
            return frozenset()
        looks = times[first : last + 1]
        if any(later - earlier > _UNSEEN_S for earlier, later in itertools.pairwise(looks)):
            return frozenset()
        return frozenset.intersection(*(healthy for _, healthy in self._seen[first : last + 1]))

    def _healthy(self, exposition: str) -> frozenset[int]:
        pattern = r'(?m)^tritongate_upstream_healthy\{.*upstream="([^"]+)".*\} 1(?:\.0)?$'
        votes = collections.Counter(re.findall(pattern, exposition))
        return frozenset(number for address, number in self._numbers.items() if votes[address] == WORKERS)


@dataclass(frozen=True, slots=True)
class Deed:
    """What was done, and until when it lasted, by `time.monotonic`."""

    name: str
    began: float
    ended: float
    triton: int | None
    """To which Triton; None: to none that ran."""


class Disturbance:
    """What is done to the servers, the network and the gateway; `dice` decide, of nothing else."""

    def __init__(self, stack: Stack, dice: random.Random) -> None:
        self.deeds: list[Deed] = []
        self._stack = stack
        self._dice = dice
        self._began = time.monotonic()

    @property
    def done(self) -> collections.Counter[str]:
        """How often each was done."""
        return collections.Counter(deed.name for deed in self.deeds)

    async def run(self, seconds: float) -> None:
        """Disturb for so long, and leave nothing stopped."""
        async with asyncio.TaskGroup() as lasting:
            while (left := self._began + seconds - time.monotonic()) > 0:
                await asyncio.sleep(min(left, self._dice.uniform(*_PAUSE_S)))
                lasting.create_task(self._disturb())

    def killed_a_worker(self, result: Result) -> bool:
        """Whether a process of the gateway died, or had not long been dead, while the request ran."""
        return any(
            deed.name == _KILL_WORKER and result.began - _REPLACED_S <= deed.began <= result.ended
            for deed in self.deeds
        )

    def since_a_worker_died(self, result: Result) -> float:
        """Return the seconds from the last such death to the end of the request; infinity: there was none."""
        died = (deed.began for deed in self.deeds if deed.name == _KILL_WORKER)
        return min((result.ended - began for began in died if began <= result.ended), default=math.inf)

    def spared(self, tritons: frozenset[int], result: Result) -> bool:
        """Whether to one of these Tritons nothing was done while the request ran, nor shortly before."""
        touched = {
            deed.triton
            for deed in self.deeds
            if deed.began <= result.ended and deed.ended + _NOTICED_S >= result.began
        }
        return bool(tritons - touched)

    def _disturb(self) -> Coroutine[Any, Any, None]:
        stack = self._stack
        whats: dict[str, tuple[Callable[[], Sequence[Any]], Act]] = {
            "kill a server": (stack.servers, _kill),
            "kill a stub": (stack.stubs, _kill),
            "end a server": (stack.servers, _end),
            "kill a supervisor": (stack.supervisors, _kill),
            "stop a server": (stack.servers, _stop),
            "stop a stub": (stack.stubs, _stop),
            "slow a server": (stack.servers, _slow),
            "slow a stub": (stack.stubs, _slow),
            "cut a network": (lambda: stack.relays, _cut),
            "hold a network": (lambda: stack.relays, _hold),
            _KILL_WORKER: (stack.one_of_all_workers, _kill),
        }
        name = self._dice.choice(list(whats))
        which, seconds = self._dice.random(), self._dice.uniform(*_STOPPED_S)
        find, act = whats[name]
        return self._act(name, find, act, which, seconds)

    async def _act(
        self, name: str, find: Callable[[], Sequence[Any]], act: Act, which: float, seconds: float
    ) -> None:
        found = find()
        if not found:
            return
        victim = found[int(which * len(found))]
        is_relay = isinstance(victim, Relay)
        triton = victim.number if is_relay else self._stack.number_of(victim)
        fixed: dict[Act, float] = {_kill: 0.0, _end: 0.0, _slow: _SLOWED_S}
        seconds = fixed.get(act, seconds)
        now = time.monotonic()
        self.deeds.append(Deed(name, now, now + seconds, triton))
        lasts = f" for {seconds:.1f} s" if seconds else ""
        who = f"of {triton}" if is_relay else f"{victim.pid}, of {triton}"
        click.echo(f"{now - self._began:6.1f} s  {name} ({who}){lasts}")
        with contextlib.suppress(psutil.NoSuchProcess):
            await act(victim, seconds)


async def _kill(process: psutil.Process, _seconds: float) -> None:
    process.kill()


async def _end(process: psutil.Process, _seconds: float) -> None:
    process.terminate()


async def _stop(process: psutil.Process, seconds: float) -> None:
    process.suspend()
    try:
        await asyncio.sleep(seconds)
    finally:
        process.resume()


async def _slow(process: psutil.Process, seconds: float) -> None:
    for _ in range(int(seconds / (3 * _SLICE_S))):
        await _stop(process, 2 * _SLICE_S)
        await asyncio.sleep(_SLICE_S)


async def _cut(relay: Relay, seconds: float) -> None:
    relay.cut()
    try:
        await asyncio.sleep(seconds)
    finally:
        relay.mend()


async def _hold(relay: Relay, seconds: float) -> None:
    relay.hold()
    try:
        await asyncio.sleep(seconds)
    finally:
        relay.mend()


async def _settle(stack: Stack, before: Holdings | None) -> tuple[Holdings | None, list[str]]:
    """Wait until everything is as it should be at rest; return what the gateway has, and what is not so."""
    deadline = time.monotonic() + _SETTLED_S
    has = None
    while True:
        # One after the other, on a thread: with nothing else to do.
        faults = await asyncio.to_thread(_unsettled, stack)
        if not faults:
            has = await asyncio.to_thread(stack.holdings)
        if before is not None and has is not None:
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
            "healthy upstreams": (stack.metric("tritongate_upstream_healthy"), WORKERS * _REPLICAS),
            "requests in flight": (stack.metric("tritongate_requests_in_flight"), 0),
            "requests in engines": (stack.engines_run(), 0),
            "servers": (len(stack.servers()), _REPLICAS),
            "processes of the gateway": (len(stack.workers()), WORKERS),
        }
    except httpx.HTTPError as error:
        return [f"metrics: {error!r}"]
    faults = [f"{name}: {value:g}, not {right}" for name, (value, right) in found.items() if value != right]
    living = {
        prefix
        for server in stack.servers()
        for prefix in flags_of(server, r"--backend-config=python,shm-region-prefix-name=(.*)")
    }
    left = [name for name in stack.left_in_memory() if not name.startswith(tuple(living))]
    return [*faults, *(f"shared memory of a dead server: {name}" for name in left)]


async def _client(
    clients: Clients, dice: random.Random, cases: list[Case], kserve: list[KserveCase], until: float
) -> list[Result]:
    results = []
    while time.monotonic() < until:
        results.append(await clients.ask(dice, cases, kserve))
        refused = results[-1].ending in (Ending.REFUSED, Ending.BROKEN_OFF, Ending.LOST)
        await asyncio.sleep(dice.uniform(0, _THINKS_S) + refused)
    return results


async def _storm(
    stack: Stack, kserve_address: str, count: int, seconds: float, seed: int
) -> tuple[list[Result], list[str]]:
    """Return how all requests ended, and what does not hold otherwise."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
    await _settle(stack, None)  # until every process of the gateway knows every Triton
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
        health = Health(stack)
        watching = asyncio.create_task(health.watch())
        until = time.monotonic() + seconds
        running = [
            asyncio.create_task(
                _client(clients, random.Random(f"{seed} {number}"), cases, kserve, until)  # noqa: S311
            )
            for number in range(count)
        ]
        await disturbance.run(seconds)
        results = [result for each in await asyncio.gather(*running) for result in each]
        await asyncio.sleep(_UNSEEN_S)
        watching.cancel()
    finally:
        await clients.close()
    after, faults = await _settle(stack, before)
    log = stack.log.read_text(encoding="utf-8", errors="replace")
    faults += _undue(results, disturbance, health, log)
    counted = stack.requests(model) - counted
    left = sum(result.ending is Ending.LEFT for result in results)
    # A process that died took its numbers along.
    if not disturbance.done[_KILL_WORKER] and not len(results) - left <= counted <= len(results):
        faults.append(f"{counted:g} requests counted of {len(results)}, of whose clients {left} left")
    resumed = stack.metric("tritongate_resumed_total")
    click.echo(f"done: {dict(disturbance.done)}; {resumed:g} answers resumed, {counted:g} requests counted")
    click.echo(f"the gateway before: {before}")
    click.echo(f"the gateway after:  {after}")
    return results, faults


def _undue(results: list[Result], disturbance: Disturbance, health: Health, log: str) -> list[str]:
    """Return which requests should have been answered, going by the gateway's log, too."""
    faults = []
    failures = collections.Counter(re.findall(_FAILED, log))
    for result in results:
        took = f"{result.ended - result.began:.1f} s"
        said = f"{result.manner}: {result.detail[:400]}, after {took}"
        if result.ending is Ending.LOST and not disturbance.killed_a_worker(result):
            ago = disturbance.since_a_worker_died(result)
            faults.append(f"lost, {ago:.1f} s after the last process of the gateway died: {said}")
        elif result.ending is Ending.BROKEN_OFF and not (
            disturbance.killed_a_worker(result)
            or result.ended - result.began > _REQUEST_TIMEOUT_S - 1
            or failures[result.own] > _RESUMES
        ):
            faults.append(f"broken off, and it could have been resumed: {said}")
        elif result.ending is Ending.REFUSED and disturbance.spared(
            health.throughout(result.began, result.ended), result
        ):
            faults.append(f"refused, and a Triton was healthy all the time: {said}")
        elif result.ending is not Ending.WRONG:
            continue
        faults += [line for line in log.splitlines() if result.own and f'"{result.own}"' in line]
    return faults


@contextlib.contextmanager
def _running(flags: tuple[str, ...], folder: Path) -> Iterator[tuple[Stack, str]]:
    """Run three Tritons and their gateway, and a relay in between for each."""
    log, tasks, tritons, port = folder / "up.log", folder / "tasks", folder / "tritons", free_port()
    tasks.mkdir()
    arguments = ["--replicas", str(_REPLICAS), "--device", "cpu", "--dtype", "float32"]
    arguments += ["--workers", str(WORKERS)]
    arguments += ["--kserve-grpc-port", str(port), "--request-timeout-s", str(_REQUEST_TIMEOUT_S)]
    program = (sys.executable, "-m", "bench.chaos_gateway")
    arguments += ["--log-level", "warning", *flags]
    with network(_REPLICAS, tritons) as relays:
        addresses = " ".join(relay.address for relay in relays)
        os.environ |= {"CHAOS_TASKS": str(tasks), "CHAOS_TRITONS": str(tritons), "CHAOS_RELAYS": addresses}
        with up(*arguments, log=log, program=program) as url:
            yield Stack(url, log, tasks, relays), f"127.0.0.1:{port}"


def _table(results: list[Result]) -> None:
    counts = collections.Counter((result.manner, result.ending) for result in results)
    click.echo(f"\n{'':18}" + "".join(f"{ending:>12}" for ending in Ending))
    for manner in Manner:
        click.echo(f"{manner:18}" + "".join(f"{counts[manner, ending]:12}" for ending in Ending))
    totals = collections.Counter(result.ending for result in results)
    click.echo(f"{'all':18}" + "".join(f"{totals[ending]:12}" for ending in Ending))
    said = collections.Counter(
        re.sub(r"chaos-\d+: ", "", result.detail)[:160]
        for result in results
        if result.ending in (Ending.REFUSED, Ending.BROKEN_OFF, Ending.LOST)
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
        _table(results)
        faults += [f"process {each.pid} is left" for each in _left([*stack.processes.values()])]
        faults += [f"shared memory is left: {name}" for name in stack.left_in_memory()]
        log = stack.log.read_text(encoding="utf-8", errors="replace")
    faults += [f"in the log, {log.count(sign)} times: {sign}" for sign in _FAULTS_OF_CODE if sign in log]
    wrong = [result for result in results if result.ending is Ending.WRONG]
    for result in wrong:
        faults.append(f"{result.manner}: {result.detail[:400]}")
    if not any(result.ending is Ending.ANSWERED for result in results):
        faults.append("nothing was answered")
    for fault in faults:
        click.echo(f"DOES NOT HOLD: {fault}")
    if faults:
        click.echo(f"the log ends:\n{log[-3000:]}")
        sys.exit(1)
    click.echo("everything holds")


def _left(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return which of the gateway's processes do not end within `_ENDED_S` of it."""
    deadline = time.monotonic() + _ENDED_S
    while (living := [each for each in processes if _runs(each)]) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return living


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


if __name__ == "__main__":
    main()
