"""A tritonserver of anybody's on a repository of ours: everything loaded as it starts, no supervisor."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.e2e.up_process import metric, wait_until
from tests.ports import free_ports
from tests.tied import tied
from triton_models.embedded.installation import find_installation

START_S = 100.0


@dataclass(frozen=True)
class StockServer:
    """A running server."""

    grpc: str
    http: str
    metrics: str
    process: psutil.Process
    stub: psutil.Process
    shared_memory_prefix: str

    def gauge(self, name: str, **labels: str) -> float:
        """Return the sum of an engine metric's samples that have these labels."""
        return metric(httpx.get(f"http://{self.metrics}/metrics", timeout=20).text, name, **labels)

    def shared_memory_bytes(self) -> int:
        """Return what the server and its stub hold of the memory that they share."""
        regions = Path("/dev/shm").glob(f"{self.shared_memory_prefix}*")  # noqa: S108 - where they are
        return sum(region.stat().st_blocks * 512 for region in regions)


@contextlib.contextmanager
def stock_server(repository: Path, temporary: Path) -> Iterator[StockServer]:
    """Run a server until it says that it is ready, and until the block ends."""
    found = find_installation()
    found.link_backends(temporary / "backends")
    http, grpc, metrics = free_ports(3)
    prefix = f"tritongate_stock_{os.getpid()}_{http}_"
    command = [found.server, f"--model-repository={repository}", f"--backend-directory={temporary}/backends"]
    command += [f"--backend-config=python,shm-region-prefix-name={prefix}", "--exit-timeout-secs=2"]
    for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics)):
        command += [f"--{name}-address=127.0.0.1", f"--{name}-port={port}"]
    process = subprocess.Popen(tied(*command), env=found.environment(os.environ, temporary=temporary))
    tree = [psutil.Process(process.pid)]
    try:
        wait_until(lambda: process.poll() is not None or _ready(http), START_S)
        assert process.poll() is None, "tritonserver did not start"
        tree += tree[0].children(recursive=True)
        (stub,) = [each for each in tree[1:] if "stub" in each.name()]
        local = "127.0.0.1:{}".format
        yield StockServer(local(grpc), local(http), local(metrics), tree[0], stub, prefix)
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for each in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        for region in Path("/dev/shm").glob(f"{prefix}*"):  # noqa: S108 - as above
            region.unlink(missing_ok=True)


def _ready(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5).status_code == 200
    return False
