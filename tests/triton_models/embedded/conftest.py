"""A started `python -m triton_models.embedded`, with the fake model, and its process tree."""

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from tests.processes import alive, children_of
from triton_models.embedded.warden import command_lines, environments
from triton_models.entries import ModelEntry, write_entry
from wire import events

MODEL = "fake"
FAKE_MODEL = Path(__file__).with_name("fake_model.py")
TIMEOUT_S = 60.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's mount point

E = TypeVar("E")


class Tree:
    """A started process and every process that it is known to have had below it."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder = folder
        self._known: dict[int, psutil.Process] = {}
        self._parent = folder / f"tritongate-{os.getuid()}"
        self._runs: list[Path] = []
        self._others = environments()
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def living(self) -> list[psutil.Process]:
        """Return the living processes below this one, those that lost their parent included."""
        self._known.update((process.pid, process) for process in children_of(self.process.pid))
        return [process for process in self._known.values() if alive(process)]

    def find(self, part: str) -> psutil.Process:
        """Return the one living process whose program, or Python module, ends in `part`."""
        found = [process for process in self.living() if any(a.endswith(part) for a in process.cmdline()[:4])]
        assert len(found) == 1, found
        return found[0]

    def wait_gone(self, timeout_s: float = 60.0) -> None:
        """Hold that, in time, no process, no shared memory and no folder is left."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None or self.living() or self._own_environments():
            assert time.monotonic() < deadline, [process.cmdline() for process in self.living()]
            time.sleep(0.05)
        for run in self._runs:
            assert not list(SHARED_MEMORY.glob(f"tritongate_{run.name}_*"))
            assert not run.exists()
        assert not list(self._parent.glob("*")), "a run that was not noted left something"

    def note_run(self) -> None:
        """Remember the run directory that exists now."""
        self._runs = list(self._parent.iterdir())
        assert len(self._runs) == 1
        assert list(SHARED_MEMORY.glob(f"tritongate_{self._runs[0].name}_*"))
        assert environments() - self._others

    def _own_environments(self) -> set[Path]:
        """Return the folders in /tmp that came with this tree, unless other servers run: see the warden."""
        serving = any(words[0].endswith("tritonserver") for words in command_lines().values())
        return set() if serving else environments() - self._others

    def close(self) -> None:
        """Stop it, and kill what a failed test left."""
        remaining = self.living()
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
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Embedded(Tree):
    """`python -m triton_models.embedded` and what it said."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        super().__init__(folder, [sys.executable, "-m", "triton_models.embedded", *arguments])
        self.seen: list[events.Event] = []
        self._events: queue.Queue[events.Event | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(events.decode_event(line))
        self._events.put(None)

    def wait_for(self, *kinds: type[E], timeout_s: float = TIMEOUT_S) -> E:
        """Return the next event of these kinds."""
        deadline = time.monotonic() + timeout_s
        while True:
            event = self._events.get(timeout=max(0.01, deadline - time.monotonic()))
            assert event is not None, f"it ended without {kinds}: {self.seen}"
            self.seen.append(event)
            if isinstance(event, kinds):
                self.living()
                if isinstance(event, events.Ready):
                    self.note_run()
                return event

    def pass_over(self) -> None:
        """Take all events that have come."""
        with contextlib.suppress(queue.Empty):
            while (event := self._events.get_nowait()) is not None:
                self.seen.append(event)

    @property
    def ready(self) -> events.Ready:
        """The addresses."""
        return next(event for event in self.seen if isinstance(event, events.Ready))


def write_fake(folder: Path) -> tuple[Path, Path]:
    """Write a repository with the entry `fake`; return it and its checkpoint."""
    repository, checkpoint = folder / "repository", folder / "checkpoint"
    repository.mkdir()
    checkpoint.mkdir()
    write_entry(repository, model=ModelEntry(name=MODEL, checkpoint=str(checkpoint)))
    shutil.copy(FAKE_MODEL, repository / MODEL / "1" / "model.py")
    return repository, checkpoint


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Callable[..., Embedded]]:
    """Start one with the arguments given; stopped at the end of the test, whatever happens."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Embedded:
            started = Embedded(tmp_path, *arguments)
            stack.callback(started.close)
            return started

        yield start


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Callable[[list[str]], Tree]]:
    """Start any command; stopped at the end of the test, whatever happens."""
    with contextlib.ExitStack() as stack:

        def start(command: list[str]) -> Tree:
            started = Tree(tmp_path, command)
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
