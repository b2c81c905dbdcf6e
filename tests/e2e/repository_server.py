"""Real Triton over a repository of a test's own entries."""

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Self

import httpx
import psutil
import pytest

from tests.e2e.up_process import metric
from tests.processes import children_of, command_of, kill_tritons
from wire.events import Ready, decode_event


class RepositoryServer:
    """The embedded server on a repository, without a gateway; as a context it runs."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._stack = contextlib.ExitStack()
        self.ready: Ready
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        with self._stack:
            self.ready = self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> Ready:
        command = [sys.executable, "-m", "triton_models.embedded"]
        self._process = process = subprocess.Popen(
            [*command, "--repository", str(self._repository)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._stack.callback(process.stdout.close)
        self._stack.callback(process.wait, 60)
        self._stack.callback(lambda: kill_tritons(children_of(process.pid)))  # as in `Command.close`
        self._stack.callback(process.stdin.close)
        for line in process.stdout:
            event = decode_event(line)
            if isinstance(event, Ready):
                return event
        pytest.fail("the embedded Triton ended before it was ready")

    def stub(self, entry: str) -> psutil.Process:
        """Return an entry's process."""
        below = children_of(self._process.pid)
        (found,) = [each for each in below if f"/{entry}/1/model.py" in " ".join(command_of(each))]
        return found

    def gauge(self, name: str, **labels: str) -> float:
        """Return the sum of an engine metric's samples that have these labels."""
        exposition = httpx.get(f"http://{self.ready.metrics}/metrics", timeout=20).text
        return metric(exposition, name, **labels)
