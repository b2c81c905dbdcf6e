"""Measures the whole path on this machine with `tritongate up`: load, gateway, gRPC, Triton, engine."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from bench.gpu.servers import free_port
from bench.load import LoadPool, Workload, closed_loop
from bench.load_rows import LoadRow

_READY_S = 120.0
_STOP_S = 15.0


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[str]:
    """Run `tritongate up` on free ports and yield its base URL.

    Raises:
        RuntimeError: it did not become ready.
    """
    port = free_port()
    flags = ["--port", str(port)]
    for name in ("http", "grpc", "metrics"):
        flags += [f"--triton-{name}-port", "0"]
    command = [str(Path(sys.executable).with_name("tritongate")), "up", *flags, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _await_ready(process, url)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + _READY_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url + "/health/ready").is_success:
                return
        time.sleep(0.2)
    raise RuntimeError("tritongate up did not become ready")


def measure(*arguments: str, clients: tuple[int, ...], new_tokens: int, rounds: int) -> Iterator[LoadRow]:
    """Start a server, and measure it with each number of clients in turn."""
    with running(*arguments) as url, LoadPool(1) as pool:
        model = httpx.get(url + "/v1/models").json()["data"][0]["id"]
        workload = Workload(url=url, model=model, out=new_tokens)
        closed_loop(pool, workload, "warm-up", clients=2, requests=2)
        for number in clients:
            yield closed_loop(pool, workload, f"clients {number}", clients=number, requests=number * rounds)
