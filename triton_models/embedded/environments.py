"""The `python_env_*` folders, one per tritonserver: finds out which server made which.

The Python backend creates its folder when it is loaded, together with a server's first entry. The parent
folder is fixed, and the name does not tell which server it belongs to. So servers take turns: from just
before the request that creates a folder until the folder exists, a short time, no other server is asked to
load its first entry.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

_ENVIRONMENTS = Path("/tmp")  # noqa: S108 - fixed in the Python backend, whatever TMPDIR says
_TURN_S = 20.0
"""Longest wait for a turn, in seconds; after it, go on without: any user can hold the lock, and for ever."""
_POLL_S = 0.02


class EnvironmentClaim:
    """A context manager that finds the folder of a server; enter it before the server loads its first entry.

    Leave it when that entry is loaded. `found` is called, in a thread of this class, with the names of the
    new folders: one, unless a server that takes no turns was started at the same moment. It is not called if
    none appeared.
    """

    def __init__(self, found: Callable[[set[str]], None]) -> None:
        self._found = found
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="environment", daemon=True)

    def __enter__(self) -> Self:
        self._turn = _take_turn()
        self._before = environments()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the search is over; return False if it is not within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _watch(self) -> None:
        try:
            over = False
            while not over:
                over = self._over.wait(_POLL_S)  # once set, look one last time
                if appeared := environments() - self._before:
                    self._found(appeared)
                    return
        finally:
            if self._turn is not None:
                os.close(self._turn)  # which releases the lock


def environments() -> set[str]:
    """Return the names of this user's `python_env_*` folders."""
    names = set()
    for folder in _ENVIRONMENTS.glob("python_env_*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                names.add(folder.name)
    return names


def remove_empty(names: set[str]) -> None:
    """Remove those of the named folders that are empty: the ones into which nothing was unpacked."""
    for name in names:
        with contextlib.suppress(OSError):
            (_ENVIRONMENTS / name).rmdir()


def _take_turn() -> int | None:
    """Lock the parent folder; return the locked descriptor, or None if the folder cannot be opened."""
    try:
        turn = os.open(_ENVIRONMENTS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    deadline = time.monotonic() + _TURN_S
    while not _locked(turn) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return turn


def _locked(descriptor: int) -> bool:
    """Try to take the lock; False while another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: there is nothing to wait for
    return True
