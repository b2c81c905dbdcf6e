"""One server's run folder, and the removal of everything that the server could leave behind on the machine.

A server that ends abnormally leaves processes, shared-memory regions and `/tmp/python_env_*` folders. Each is
recognised as ours: processes by the path of this folder's backends in their command line, regions by a prefix
made of this folder's name, and the `python_env_*` folders (whose place is hard-coded in the backend) because
they appeared while it was our server's turn to create one.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from triton_models.embedded.environments import EnvironmentClaim, remove_empty

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's mount point; Boost's regions are files there
_KILL_ROUNDS = 20
_KILL_WAIT_S = 0.25


class RunDirectory:
    """A folder below `<temporary>/tritongate-<uid>`, locked as long as the process that created it lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._claiming = threading.Lock()
        self._claim: EnvironmentClaim | None = None
        self._loads = 0

    @classmethod
    def create(cls) -> "RunDirectory":
        """Create a new one, after removing those whose process is gone and everything that they left behind.

        Raises:
            OSError: the parent folder cannot be created, or belongs to another user.
        """
        parent = Path(tempfile.gettempdir()) / f"tritongate-{os.getuid()}"
        parent.mkdir(mode=0o700, exist_ok=True)
        # No symbolic link: whoever made it could choose which of this user's folders is emptied below.
        if parent.is_symlink() or parent.stat().st_uid != os.getuid():
            raise PermissionError(f"{parent} belongs to another user")
        for stale in parent.iterdir():
            old = cls(stale)
            if old._acquire():
                old.kill_processes()
                old.remove_leftovers()
                old.remove()
                old._release()
        # Locked before it gets its final name, so that another process that starts never takes it for stale.
        made = Path(tempfile.mkdtemp(prefix=".", dir=tempfile.gettempdir()))
        run = cls(made)
        run._acquire()
        run.path = parent / secrets.token_hex(4)
        made.rename(run.path)
        for folder in (run.repository, run.temporary):
            folder.mkdir()
        return run

    @property
    def repository(self) -> Path:
        """The model repository that is used if none was given."""
        return self.path / "repository"

    @property
    def backends(self) -> Path:
        """The backend directory."""
        return self.path / "backends"

    @property
    def temporary(self) -> Path:
        """TMPDIR of the server and its stubs."""
        return self.path / "tmp"

    @property
    def log(self) -> Path:
        """The server's log."""
        return self.path / "triton.log"

    @property
    def shared_memory_prefix(self) -> str:
        """What the names of the server's shared-memory regions begin with."""
        return f"tritongate_{self.path.name}_"

    def processes(self) -> list[psutil.Process]:
        """Return the living server, its stubs and its warden, but not this process.

        Each has the backend directory, which only this run uses, in its command line.
        """
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # Not by the run folder's path: that would match a program that reads the log.
                named = any(str(self.backends) in argument for argument in process.cmdline())
                if named and process.pid != os.getpid():
                    found.append(process)
        return found

    def kill_processes(self) -> None:
        """Kill the processes of this folder, except this process, and wait until they are gone."""
        for _ in range(_KILL_ROUNDS):  # repeated: the server may have started another stub
            remaining = self.processes()
            if not remaining:
                return
            for process in remaining:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(remaining, timeout=_KILL_WAIT_S)

    @contextlib.contextmanager
    def claim_environments(self) -> Iterator[None]:
        """Record as ours the `python_env_*` folder that the server's first load creates; wraps each load.

        Loads may overlap. Only empty folders are ever removed, and no server needs their contents. But a
        tritonserver (2.51) whose folder is gone may abort when it exits, after all answers have been sent.
        """
        with self._claiming:
            self._loads += 1
            if self._claim is None and not self._claimed():
                self._claim = EnvironmentClaim(self._record).__enter__()
        try:
            yield
        finally:
            with self._claiming:
                self._loads -= 1
                if self._claim is not None and not self._loads:
                    self._claim.__exit__()
                    self._claim = None

    def remove_leftovers(self) -> None:
        """Remove the shared memory and the `python_env_*` folders of a server that is gone."""
        for region in _SHARED_MEMORY.glob(f"{self.shared_memory_prefix}*"):
            region.unlink(missing_ok=True)
        remove_empty(self._claimed())
        self._claims.unlink(missing_ok=True)  # the next server of this run makes its own folder

    def remove(self, *, keep_log: bool = False) -> None:
        """Remove the folder; `keep_log` leaves the log (and the lock) until the next start."""
        if not keep_log:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        for folder in (self.repository, self.backends, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def _claims(self) -> Path:
        return self.path / "environments.json"

    def _record(self, names: set[str]) -> None:
        self._claims.write_text(json.dumps(sorted(names)))

    def _claimed(self) -> set[str]:
        try:
            return set(json.loads(self._claims.read_text()))
        except (OSError, ValueError):  # not written yet, or truncated by a kill
            return set()

    def _acquire(self) -> bool:
        """Try to take the lock; False while its owner lives. The kernel releases it when that ends."""
        try:
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._release()
            return False
        return True

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
