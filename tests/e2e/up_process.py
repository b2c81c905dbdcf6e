"""`tritongate up` as a process: how the end-to-end tests reach everything behind one command."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.ports import free_ports
from tests.tied import tied

GOLDEN = Path(__file__).parents[1] / "golden"

TRITONGATE = Path(sys.executable).with_name("tritongate")
READY_TIMEOUT_S = 100.0
STOP_TIMEOUT_S = 10.0
"""Ten are promised; the others are for a machine that several tests share."""
ABORTED = "tritonserver was killed by signal 6: uncaught boost::interprocess::lock_exception"
"""What is said of a server that did not survive the death of a stub (divergence 16)."""
UNCAUGHT = "terminate called after throwing an instance of 'boost::interprocess::lock_exception'"
"""What such a server says itself; also one that gave up a stub's start (ARCHITECTURE.md)."""
RESTARTS = 2
"""By the tests, of a server that aborted so before it was ready, as something else does in production."""


def aborted(server: "subprocess.Popen[bytes]", log: str) -> bool:
    """Whether a tritonserver ended in the way that only a new start helps against."""
    return server.poll() == -signal.SIGABRT and UNCAUGHT in log


class UpProcess:
    """One run of `tritongate up`, its addresses, its output, and every process it ever had."""

    python = sys.executable

    def __init__(self, *arguments: str, command: Path = TRITONGATE) -> None:
        self.port, http, grpc, metrics = free_ports(4)
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.kserve_http = f"http://127.0.0.1:{http}"
        self.kserve_grpc = f"127.0.0.1:{grpc}"
        self.triton_metrics = f"http://127.0.0.1:{metrics}/metrics"
        ports = {"--port": self.port, "--kserve-http-port": http, "--kserve-grpc-port": grpc}
        ports["--metrics-port"] = metrics
        flags = [text for name, port in ports.items() for text in (name, str(port))]
        self._known: dict[int, psutil.Process] = {}
        self.output = ""
        self.process = subprocess.Popen(
            tied(command, "up", *flags, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TRITONGATE_LOG_LEVEL": "warning", "TRITONGATE_WORKERS": "1"},
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.output += line.decode()

    def wait_ready(self) -> "UpProcess":
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self.is_ready():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)
        self.tree()
        return self

    def is_ready(self) -> bool:
        try:
            return httpx.get(self.base_url + "/health/ready", timeout=20).status_code == 200
        except httpx.TransportError:
            return False

    def tree(self) -> list[psutil.Process]:
        """Return the living processes below this one, and remember them: an orphan stays findable."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._known[process.pid] = process
        return [process for process in self._known.values() if lives(process)]

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

    def stop(self) -> int:
        """End it as Ctrl-C does; hold that it takes its time limit only and leaves no process."""
        self.tree()
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(STOP_TIMEOUT_S)
        assert not self.tree(), [command_of(process) for process in self.tree()]
        return status

    def close(self) -> None:
        """End whatever a failed test left."""
        remaining = self.tree()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
        for process in [*remaining, *self.tree()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> list[str]:
    """Return its command line; nothing if it has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """Keep it from running for a moment."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


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
