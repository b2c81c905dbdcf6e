"""Real Triton over a repository of a test's own entries, and gateways in front of it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import httpx
import pytest

from tests.e2e.up_process import metric, wait_until
from tests.ports import free_ports
from tests.tied import tied
from wire.events import Ready, decode_event

ANSWERS_WITHIN_S = 20.0


class RepositoryServer:
    """The embedded server on a repository, without a gateway; as a context it runs."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._stack = contextlib.ExitStack()
        self.ready: Ready

    def __enter__(self) -> Self:
        with self._stack:
            self.ready = self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> Ready:
        command = [sys.executable, "-m", "triton_models.embedded", "--exit-with-stdin"]
        process = subprocess.Popen(
            [*command, "--repository", str(self._repository)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._stack.callback(process.stdout.close)
        self._stack.callback(process.wait, 60)
        self._stack.callback(process.stdin.close)
        for line in process.stdout:
            event = decode_event(line)
            if isinstance(event, Ready):
                return event
        pytest.fail("the embedded Triton ended before it was ready")

    def gauge(self, name: str, **labels: str) -> float:
        """Return the sum of an engine metric's samples that have these labels."""
        exposition = httpx.get(f"http://{self.ready.metrics}/metrics", timeout=20).text
        return metric(exposition, name, **labels)


@contextlib.contextmanager
def gateway(triton_grpc: str, *arguments: str, key: str | None = None) -> Iterator[str]:
    """Run `tritongate serve` in front of a Triton; yields its base URL once every model is ready.

    Args:
        triton_grpc: its address.
        arguments: of `serve`.
        key: the setting `repository_key`; None: as in the environment.
    """
    port = free_ports(1)[0]
    command = [Path(sys.executable).with_name("tritongate"), "serve", "--upstreams", triton_grpc]
    environment = os.environ | {"TRITONGATE_WORKERS": "1"}
    environment |= {} if key is None else {"TRITONGATE_REPOSITORY_KEY": key}
    words = tied(*command, "--port", port, "--log-level", "warning", *arguments)
    process = subprocess.Popen(words, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_ready(url))
        yield url
    finally:
        process.terminate()
        process.wait(60)


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url + "/health/ready", timeout=ANSWERS_WITHIN_S).status_code == 200
    return False
