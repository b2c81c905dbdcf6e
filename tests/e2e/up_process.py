"""`tritongate up` as a process: how the end-to-end tests reach everything behind one command."""

import contextlib
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from tests.ports import free_ports
from tests.processes import START_S, Command, answers, command_of

GOLDEN = Path(__file__).parents[1] / "golden"

TRITONGATE = Path(sys.executable).with_name("tritongate")
STOP_TIMEOUT_S = 15.0
"""Ten are promised; the others are for a machine that several tests share."""
ABORTED = "tritonserver was killed by signal 6: uncaught boost::interprocess::lock_exception"
"""What is said of a server that did not survive the death of a stub (divergence 16)."""
RUNS_S, STANDS_S = 0.02, 0.2
"""Of a process that is slowed."""
UNCAUGHT = "terminate called after throwing an instance of 'boost::interprocess::lock_exception'"
"""What such a server says itself; also one that gave up a stub's start (docs/internals-triton.md)."""
GIVEN_UP = "Triton has given this process up"
"""What a stub says that did not get to run for a second while it started."""
RESTARTS = 2
"""By the tests, of a server that ended so before it was ready, as something else does in production."""


def starved(status: int | None, log: str) -> bool:
    """Whether a tritonserver with this status ended since it gave a stub up: only a new start helps."""
    return (status == -signal.SIGABRT and UNCAUGHT in log) or (status is not None and GIVEN_UP in log)


class UpProcess(Command):
    """One run of `tritongate up` and its addresses.

    Args:
        arguments: its own.
        command: the program.
        variables: of its environment.
    """

    python = sys.executable

    def __init__(self, *arguments: str, command: Path = TRITONGATE, **variables: str) -> None:
        self.port, http, grpc, metrics = free_ports(4)
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.kserve_http = f"http://127.0.0.1:{http}"
        self.kserve_grpc = f"127.0.0.1:{grpc}"
        self.triton_metrics = f"http://127.0.0.1:{metrics}/metrics"
        ports = {"--port": self.port, "--kserve-http-port": http, "--kserve-grpc-port": grpc}
        ports["--metrics-port"] = metrics
        flags = [text for name, port in ports.items() for text in (name, str(port))]
        usual = {"TRITONGATE_LOG_LEVEL": "warning", "TRITONGATE_WORKERS": "1"}
        super().__init__(command, "up", *flags, *arguments, env=usual | variables)

    def wait_ready(self, timeout_s: float = START_S) -> Self:
        self.wait_for(self.is_ready, timeout_s)
        return self

    def is_ready(self) -> bool:
        return answers(self.base_url + "/health/ready")

    def find(self, *begins: str, contains: str = "") -> psutil.Process:
        """Return the one living process whose first arguments end in `begins`."""

        def fits(command: list[str]) -> bool:
            firsts = zip(command, begins, strict=False)
            return all(word.endswith(end) for word, end in firsts) and contains in " ".join(command)

        found = [process for process in self.tree() if fits(command_of(process))]
        assert len(found) == 1, (begins, contains, [command_of(process) for process in self.tree()])
        return found[0]

    def stubs(self, entry: str) -> list[psutil.Process]:
        return [process for process in self.tree() if f"/{entry}/1/model.py" in " ".join(command_of(process))]

    def stub(self, entry: str) -> psutil.Process:
        return self.find("triton_python_backend_stub", contains=f"/{entry}/")

    def server(self) -> psutil.Process:
        return self.find("bin/tritonserver")

    @property
    def triton_grpc(self) -> str:
        """Address of the private Triton, for what needs no key."""
        return "127.0.0.1:" + self._server_flag("--grpc-port")

    @property
    def repository_key(self) -> str:
        """What the private Triton requires for everything else, as KEY=VALUE."""
        return self._server_flag("--grpc-restricted-protocol").partition(":")[2]

    def _server_flag(self, name: str) -> str:
        (found,) = [word for word in command_of(self.server()) if word.startswith(f"{name}=")]
        return found.partition("=")[2]

    def supervisor(self) -> psutil.Process:
        return self.find("", "-m", "triton_models.embedded")

    def gauge(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples, of the gateway or of the engine, that have these labels."""
        url = (
            self.triton_metrics
            if name.startswith(("tritongate_engine_", "nv_"))
            else self.base_url + "/metrics"
        )
        return metric(httpx.get(url, timeout=20).text, name, **labels)

    def wait_counted(self, model: str) -> None:
        """Wait until the engine has written what it has counted by now, which it does four times a second."""
        now = time.time()
        wait_until(lambda: self.gauge("tritongate_engine_heartbeat_timestamp_seconds", model=model) > now)

    def stop(self, number: int = signal.SIGINT, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """End it as Ctrl-C does."""
        return super().stop(number, timeout_s)


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """Keep it from running for a moment."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@contextlib.contextmanager
def slowed(process: psutil.Process) -> Iterator[None]:
    """Let it run for moments only, until it ends or the block does.

    Triton gives a model's process up that does not move for a second.
    """
    over = threading.Event()

    def slow() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while not over.wait(RUNS_S):
                process.suspend()
                over.wait(STANDS_S)
                process.resume()

    slowing = threading.Thread(target=slow)
    slowing.start()
    try:
        yield
    finally:
        over.set()
        slowing.join()


def metric(exposition: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that have these labels."""
    total = 0.0
    for line in exposition.splitlines():
        found = re.fullmatch(r"([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)", line)
        if found and found[1] == name:
            present = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
            if labels.items() <= present.items():
                total += float(found[3])
    return total


def wait_until(holds: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.05)
