"""What `bench.chaos` disturbs: the gateway, its Tritons and the network between them, and what they hold."""

import contextlib
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from bench.chaos_relay import Relay

WORKERS = 2
"""Processes of the gateway, each of which has its own view of the Tritons."""
_MIB = 2**20
_SHARED = Path("/dev/shm")  # noqa: S108 - where the regions are


@dataclass(frozen=True, slots=True)
class Holdings:
    """The most that a process of the gateway has."""

    tasks: int
    descriptors: int
    memory_mib: int


class Stack:
    """The gateway, and the Tritons that it started."""

    def __init__(self, url: str, log: Path, tasks: Path, relays: Sequence[Relay]) -> None:
        self.url = url
        self.log = log
        self.relays = relays
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
            self.prefixes.update(flags_of(each, r"--backend-config=python,shm-region-prefix-name=(.*)"))
        return found

    def stubs(self) -> list[psutil.Process]:
        """Return the processes of models."""
        return self._below(r"^\S*triton_python_backend_stub( |$)")

    def workers(self) -> list[psutil.Process]:
        """Return the gateway's processes."""
        return self._below(r"-m bench.chaos_gateway$")

    def one_of_all_workers(self) -> list[psutil.Process]:
        """Return the same; none while one is missing already: then nobody would serve."""
        found = self.workers()
        return found if len(found) == WORKERS else []

    def number_of(self, process: psutil.Process) -> int | None:
        """Return the number of the Triton that a process belongs to; None: of none that runs."""
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            for each in (process, *process.parents(), *process.children(recursive=True)):
                for port in flags_of(each, r"--grpc-port=(\d+)"):
                    ports = [str(relay.upstream[1]) for relay in self.relays]
                    return ports.index(port)
        return None

    def supervisors(self) -> list[psutil.Process]:
        """Return what starts the tritonservers."""
        return self._below(r"-m triton_models.embedded$")

    def metric(self, name: str) -> float:
        """Return the sum of the samples of a metric of the gateway."""
        return sum_of(httpx.get(self.url + "/metrics", timeout=60).text, name)

    def requests(self, model: str) -> float:
        """Return how many requests for the model the gateway has counted, whatever became of them."""
        text = httpx.get(self.url + "/metrics", timeout=60).text
        asked = "\n".join(line for line in text.splitlines() if f'model="{model}"' in line)
        return sum_of(asked, "tritongate_requests_total")

    def engines_run(self) -> float:
        """Return how many requests run in all engines."""
        total = 0.0
        for server in self.servers():
            for port in flags_of(server, r"--metrics-port=(\d+)"):
                text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
                total += sum_of(text, "tritongate_engine_requests_running")
                total += sum_of(text, "tritongate_engine_requests_waiting")
        return total

    def holdings(self) -> Holdings:
        """Return what the gateway's processes have now, all of which must serve."""
        workers, tasks = self.workers(), []
        for each in workers:
            path = self._tasks / str(each.pid)
            path.unlink(missing_ok=True)
            each.send_signal(signal.SIGUSR1)
            while not path.exists():
                time.sleep(0.01)
            tasks.append(int(path.read_text(encoding="ascii")))
        return Holdings(
            max(tasks),
            max(each.num_fds() for each in workers),
            max(each.memory_info().rss for each in workers) // _MIB,
        )

    def left_in_memory(self) -> list[str]:
        """Return the shared memory of all servers that there have been."""
        return [each.name for prefix in self.prefixes for each in _SHARED.glob(f"{prefix}*")]


def flags_of(process: psutil.Process, pattern: str) -> list[str]:
    """Return what the group of the pattern is in each word of the command line that matches."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return [found[1] for word in process.cmdline() if (found := re.fullmatch(pattern, word))]
    return []


def sum_of(exposition: str, name: str) -> float:
    """Return the sum of the samples of a metric."""
    return sum(float(found) for found in re.findall(rf"(?m)^{name}(?:\{{.*\}})? (\S+)$", exposition))
