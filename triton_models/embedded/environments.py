"""The `python_env_*` folders, one per tritonserver, and which server owns a new one.

The Python backend makes its folder when it is loaded, with a server's first entry; the folder's place is
fixed and its name says nothing. So servers take turns: from before the request that makes a folder until the
folder exists, which takes a moment, no other server is asked to load its first entry.
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
"""Who waits longer for a turn goes without: any user may hold the lock, and for ever."""
_POLL_S = 0.02


class EnvironmentClaim:
    """As a context, from before a server is asked for its first entry until that is loaded, or earlier.

    `found` is called, in a thread of this class, with the names of the folders that appeared: one, unless a
    server that takes no turns was started in the same moment. It is not called where none appeared.
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
        """Wait until the folder is there; False if it is not in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _watch(self) -> None:
        try:
            over = False
            while not over:
                over = self._over.wait(_POLL_S)  # and one look more
                if appeared := environments() - self._before:
                    self._found(appeared)
                    return
        finally:
            if self._turn is not None:
                os.close(self._turn)  # which gives it back


def environments() -> set[str]:
    """Return the names of this user's folders."""
    names = set()
    for folder in _ENVIRONMENTS.glob("python_env_*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                names.add(folder.name)
    return names


def remove_empty(names: set[str]) -> None:
    """Remove folders that nothing was unpacked in."""
    for name in names:
        with contextlib.suppress(OSError):
            (_ENVIRONMENTS / name).rmdir()


def _take_turn() -> int | None:
    """Lock the folder of folders; return what holds the lock, None where it may not be read."""
    try:
        turn = os.open(_ENVIRONMENTS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    deadline = time.monotonic() + _TURN_S
    while not _locked(turn) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return turn


def _locked(descriptor: int) -> bool:
    """Lock it; False while somebody else has it locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: nobody waits there
    return True
