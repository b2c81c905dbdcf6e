"""A signal at any moment of a start ends it: soon, without a traceback, and with nothing left."""

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.triton_models.embedded.conftest import SHARED_MEMORY, write_fake
from triton_models.embedded.warden import command_lines

pytestmark = pytest.mark.e2e

MOMENTS = 20
"""One in each twentieth of a start and what follows: two neighbours are an eighth of it apart at most."""
AT_ONCE = 3
READY = b'"ready"'
STOP_S = 8.0
"""As long as `tritongate up` waits before it kills."""


class Start:
    """One start, with the fake model and a folder for temporary files of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir()
        repository, _ = write_fake(folder)
        self.runs = folder / f"tritongate-{os.getuid()}"
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, *options, "-m", "triton_models.embedded", "--repository", str(repository)],
            env=os.environ | {"TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def read(self, until: bytes, within_s: float) -> bytes:
        """Return what it says, until it says this or the time is over."""
        assert self.process.stdout is not None
        said, deadline = b"", time.monotonic() + within_s
        while until not in said:
            readable = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not readable or not (more := os.read(self.process.stdout.fileno(), 65536)):
                break
            said += more
        return said

    def end(self, number: int) -> None:
        """Send the signal, and hold what the module's first line says."""
        runs = [path.name for path in self.runs.iterdir()] if self.runs.exists() else []
        self.process.send_signal(number)
        try:
            _, errors = self.process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert b"Traceback" not in errors, errors.decode()
        # Before there is anything to clean up, the signal ends it in its own way.
        assert self.process.returncode in {0, -number}
        left = [words for words in command_lines().values() if str(self.folder) in " ".join(words)]
        assert not left
        assert not [each for run in runs for each in SHARED_MEMORY.glob(f"tritongate_{run}_*")]
        assert not (self.runs.exists() and list(self.runs.iterdir()))


def test_a_signal_at_any_moment_of_a_start(tmp_path: Path) -> None:
    complete = Start(tmp_path / "complete")
    began = time.monotonic()
    assert READY in complete.read(READY, 60)
    whole_s = time.monotonic() - began
    complete.end(signal.SIGTERM)
    rng = random.Random(16)

    def interrupt(moment: int) -> None:
        with contextlib.ExitStack() as stack:
            start = Start(tmp_path / str(moment))
            stack.callback(start.process.kill)
            said = start.read(READY, 1.2 * whole_s * (moment + rng.random()) / MOMENTS)
            # Until it says something, Python itself may be starting, which answers a SIGINT with a traceback.
            start.end(signal.SIGINT if said and moment % 2 else signal.SIGTERM)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(interrupt, range(MOMENTS)))


def test_an_interrupt_while_it_imports(tmp_path: Path) -> None:
    start = Start(tmp_path / "importing", "-X", "importtime")
    assert start.process.stderr is not None
    while b" click" not in start.process.stderr.readline():
        pass
    start.end(signal.SIGINT)
