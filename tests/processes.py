"""Processes that tests start, those below them, and whether they have ended.

A process that has exited but that nobody has reaped, a zombie, has ended: in a container without an init,
nobody ever reaps orphans.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import httpx
import psutil

from tests.tied import tied

_ENDED = {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
_INTERVAL_S = 0.02
START_S = 200.0
"""For whatever starts on a slow machine beside other tests: some twenty times what it takes on a free one."""
_ANSWER_S = 20.0
_STARTER = ThreadPoolExecutor(1, "starter")
"""What is tied ends with the thread that started it: this one, whichever thread of a test asks for it."""


def alive(process: psutil.Process | int) -> bool:
    """Whether the process, or the one with this id, has not ended."""
    try:
        if isinstance(process, int):
            process = psutil.Process(process)
        return process.is_running() and process.status() not in _ENDED
    except psutil.NoSuchProcess:
        return False


def children_of(pid: int) -> list[psutil.Process]:
    """Return the living processes below this one, at any depth; none if it is gone itself."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in below if alive(process)]


def wait_ended(processes: Collection[psutil.Process | int], timeout_s: float) -> list[psutil.Process | int]:
    """Wait until all have ended, for so long at most; return those that have not."""
    deadline = time.monotonic() + timeout_s
    while (living := [process for process in processes if alive(process)]) and time.monotonic() < deadline:
        time.sleep(_INTERVAL_S)
    return living


def command_of(process: psutil.Process) -> list[str]:
    """Return its command line; nothing if it has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def kill_tritons(processes: Collection[psutil.Process]) -> None:
    """Kill the tritonservers among these, and their models' processes."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("triton") and process.name() != "tritongate":
                process.kill()


def answers(url: str) -> bool:
    """Whether a GET of this URL is answered by 200; not if nobody listens there."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=_ANSWER_S).status_code == httpx.codes.OK
    return False


class Command:
    """A program that a test started: what it writes, every process that it ever had below it, and its end.

    It does not outlive the tests, and is in a session of its own: a terminal's Ctrl-C is not for it.

    Args:
        words: its command line.
        env: variables, beside those of the tests.
    """

    def __init__(self, *words: object, env: Mapping[str, str] | None = None) -> None:
        self.output = ""
        """What it has written so far, errors included."""
        self.process = _STARTER.submit(
            lambda: subprocess.Popen(
                tied(*words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        ).result()
        self._known: dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.output += line.decode(errors="replace")

    def wait_for(self, holds: Callable[[], bool], timeout_s: float = START_S) -> None:
        """Wait until something holds, as long as the process lives."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(_INTERVAL_S)
        self.tree()

    def tree(self) -> list[psutil.Process]:
        """Return the living processes below this one, and remember them: an orphan stays findable."""
        self._known |= {process.pid: process for process in children_of(self.process.pid)}
        return [process for process in self._known.values() if alive(process)]

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """End it by a signal; hold that it ends in time and leaves no process; return its status."""
        self.tree()
        self.process.send_signal(number)
        status = self.process.wait(timeout_s)
        assert not self.tree(), [command_of(process) for process in self.tree()]
        return status

    def ended(self) -> int | None:
        """Return its status, once it has ended and what it wrote has been read; None while it runs."""
        status = self.process.poll()
        if status is not None:
            self._reader.join(_ANSWER_S)
        return status

    def close(self) -> None:
        """End whatever is left, a failed test's processes included.

        A tritonserver would take two or three seconds to end in its own way, which `stop` is for.
        """
        left = self.tree()
        if self.process.poll() is None:
            self.process.terminate()
            kill_tritons([psutil.Process(self.process.pid), *left])
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_ANSWER_S)
        self.process.kill()
        self.process.wait()
        for process in [*left, *self.tree()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._kill_group()
        self._reader.join(_ANSWER_S)

    def _kill_group(self) -> None:
        """Kill what is left of its session, once it has ended itself.

        What a dying tritonserver still started is nobody's child, but in its group. The number of an empty
        group may be that of another process by now.
        """
        if self.process.poll() is not None and not psutil.pid_exists(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
