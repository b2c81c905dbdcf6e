"""A started `python -m triton_models.embedded`, with the fake stream entry, and its process tree."""

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from triton_models.embedded.client import TritonClient
from triton_models.entries import ModelEntry, write_entries
from wire import events, names

FAKE_STREAM = Path(__file__).with_name("fake_stream.py")
TIMEOUT_S = 60.0


class Embedded:
    """One process of the embedded server, what it said, and every process it ever had."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.seen: list[events.Event] = []
        self._events: queue.Queue[events.Event | None] = queue.Queue()
        self._known: dict[int, psutil.Process] = {}
        environment = os.environ | {"TMPDIR": str(folder)}
        command = [sys.executable, "-m", "triton_models.embedded", "--exit-with-stdin", *arguments]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._events.put(events.decode_event(line))
        self._events.put(None)

    def wait_for(self, kind: type, timeout_s: float = TIMEOUT_S):
        """Return the next event of this kind."""
        deadline = time.monotonic() + timeout_s
        while True:
            event = self._events.get(timeout=max(0.01, deadline - time.monotonic()))
            assert event is not None, f"it ended without {kind.__name__}: {self.seen}"
            self.seen.append(event)
            if isinstance(event, kind):
                self.tree()
                return event

    def tree(self) -> list[psutil.Process]:
        """Return the living processes below this one, and remember them."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._known[process.pid] = process
        return [process for process in self._known.values() if lives(process)]

    def find(self, part: str) -> psutil.Process:
        """Return the one living process whose command line's program, or its module, ends in `part`."""
        found = [process for process in self.tree() if any(a.endswith(part) for a in process.cmdline()[:3])]
        assert len(found) == 1, found
        return found[0]

    def client(self) -> TritonClient:
        ready = next(event for event in self.seen if isinstance(event, events.Ready))
        return TritonClient(ready.grpc)

    def wait_gone(self, timeout_s: float = 10.0) -> None:
        """Hold that, in time, no process is left and nothing but an empty folder remains."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None or self.tree():
            assert time.monotonic() < deadline, [process.cmdline() for process in self.tree()]
            time.sleep(0.05)
        assert not list(Path("/dev/shm").glob("tritongate_*" + self._run_name() + "*"))

    def _run_name(self) -> str:
        started = next(event for event in self.seen if isinstance(event, events.Starting))
        return Path(started.log).parent.name

    def runs(self) -> list[Path]:
        """Return the run directories that exist."""
        return list((self.folder / f"tritongate-{os.getuid()}").iterdir())

    def close(self) -> None:
        """Stop it, and kill what a failed test left."""
        remaining = self.tree()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.stdin.close()
        self.process.stdout.close()


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def write_fake(folder: Path) -> tuple[Path, Path]:
    """Write a repository with the entry `fake-stream`; return it and its checkpoint."""
    repository, checkpoint = folder / "repository", folder / "checkpoint"
    repository.mkdir()
    checkpoint.mkdir()
    write_entries(repository, model=ModelEntry(name="fake", checkpoint=str(checkpoint)))
    shutil.copy(FAKE_STREAM, repository / names.stream_entry("fake") / "1" / "model.py")
    shutil.rmtree(repository / names.tokenizer_entry("fake"))
    return repository, checkpoint


@pytest.fixture
def start_embedded(tmp_path: Path) -> Iterator:
    """Start it with the arguments given; stopped at the end of the test, whatever happens."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Embedded:
            started = Embedded(tmp_path, *arguments)
            stack.callback(started.close)
            return started

        yield start


@pytest.fixture
def fake_repository(tmp_path: Path) -> tuple[Path, Path]:
    return write_fake(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    """One ready server for the tests of a module; its checkpoint is `shared.folder / "checkpoint"`."""
    folder = tmp_path_factory.mktemp("embedded")
    repository, _ = write_fake(folder)
    embedded = Embedded(folder, "--repository", str(repository))
    try:
        embedded.wait_for(events.Ready)
        yield embedded
    finally:
        embedded.close()
