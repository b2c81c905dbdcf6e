"""Measures the whole path on this machine with `tritongate up`: load, gateway, gRPC, Triton, engine."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx

from bench.gpu.servers import up
from gateway.commands.load import LoadPool, Workload, closed_loop
from gateway.commands.load_rows import LoadRow


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[str]:
    """Run `tritongate up` on free ports and yield its base URL.

    Raises:
        ServerError: it did not become ready; the message has the end of its output.
    """
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        up(*arguments, log=Path(folder) / "up.log") as url,
    ):
        yield url


def measure(*arguments: str, clients: tuple[int, ...], new_tokens: int, rounds: int) -> Iterator[LoadRow]:
    """Start a server, and measure it with each number of clients in turn."""
    with running(*arguments) as url, LoadPool(1) as pool:
        model = httpx.get(url + "/v1/models").json()["data"][0]["id"]
        workload = Workload(url=url, model=model, out=new_tokens)
        closed_loop(pool, workload, "warm-up", clients=2, requests=2)
        for number in clients:
            yield closed_loop(pool, workload, f"clients {number}", clients=number, requests=number * rounds)
