"""What a server can leave behind on the machine, and the process that removes it, whichever process dies.

    python -I -S warden.py PARENT_PID RUN_DIRECTORY COMMAND...

The warden runs tritonserver as its child. It is a separate process, because the supervisor can be killed,
too. It has a single thread. On a signal (the kernel sends one when the supervisor dies) it asks the server to
stop, waits a while, then kills the server and its stubs, and removes their shared memory. If the warden
itself is killed, the kernel kills the server, and the supervisor or the next start finds the stubs by their
command line. This file is run as a script with a few modules of the standard library, to need little memory.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

GRACE_S = 3.5
"""From the request to stop until the server is killed; longer than tritonserver's own exit timeout."""

SIGNAL_STATUS = 128
"""The warden's exit status is this plus N if signal N ended the server, as in a shell."""

_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
_STOPS = frozenset({signal.SIGTERM, signal.SIGINT})
_TICK_S = 1.0

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's mount point; Boost's regions are files there
_ENVIRONMENTS = Path("/tmp")  # noqa: S108 - fixed in the Python backend, whatever TMPDIR says
_KILL_ROUNDS = 4
_KILL_S = 5.0
_KILL_INTERVAL_S = 0.02

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class RunDirectory:
    """A folder below `<temporary>/tritongate-<uid>`, locked as long as the process that created it lives.

    What belongs to its server is recognised: processes by the path of this folder's backends in their command
    line, regions of shared memory by a prefix made of this folder's name, and the `/tmp/python_env_*` folder,
    whose name says nothing, because it appeared when the server loaded its first entry.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.repository = path / "repository"
        """The model repository that is used if none was given."""
        self.backends = path / "backends"
        self.temporary = path / "tmp"
        """TMPDIR of the server and its stubs."""
        self.log = path / "triton.log"
        self.shared_memory_prefix = f"tritongate_{path.name}_"
        """What the names of the server's shared-memory regions begin with."""
        self._claims = path / "environments"
        self._lock: int | None = None

    @classmethod
    def create(cls, temporary: Path) -> "RunDirectory":
        """Create a new one, after removing those whose process is gone and everything that they left behind.

        Raises:
            OSError: the parent folder cannot be created, or belongs to another user.
        """
        parent = temporary / f"tritongate-{os.getuid()}"
        parent.mkdir(mode=0o700, exist_ok=True)
        # No symbolic link: whoever made it could choose which of this user's folders is emptied below.
        if parent.is_symlink() or parent.stat().st_uid != os.getuid():
            raise PermissionError(f"{parent} belongs to another user")
        turn = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # One start at a time, so that nobody takes a folder for stale before its owner has locked it.
            fcntl.flock(turn, fcntl.LOCK_EX)
            for path in parent.iterdir():
                stale = cls(path)
                if stale._acquire():
                    stale.kill_processes()
                    stale.remove_leftovers()
                    stale.remove()
            run = cls(parent / os.urandom(4).hex())
            run.path.mkdir(mode=0o700)
            run._acquire()
        finally:
            os.close(turn)
        for folder in (run.repository, run.temporary):
            folder.mkdir()
        return run

    def processes(self) -> dict[int, list[str]]:
        """Return the command lines of the living server, its stubs and its warden, but not of this process.

        Each has the backend directory, which only this run uses, in its command line.
        """
        # Not the run folder's path: that would match a program that reads the log.
        own = str(self.backends)
        pids = {int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()} - {os.getpid()}
        found = {pid: command_line(pid) for pid in pids}
        return {pid: words for pid, words in found.items() if any(own in word for word in words)}

    def kill_processes(self) -> None:
        """Kill the processes of this folder, except this process, and wait until they are gone."""
        for _ in range(_KILL_ROUNDS):  # repeated: the server may have started another stub
            if not (remaining := self.processes()):
                return
            kill(remaining)

    def claim_environment(self, before: set[str]) -> None:
        """Record as the server's the `python_env_*` folder that was not there `before` its first load.

        Call it during the first load; later calls do nothing. The folder of another server that loads its
        first entry in the same moment is recorded, too. That does little harm: only empty folders are ever
        removed, and a tritonserver (2.51) whose folder is gone aborts at most after all answers have been
        sent.
        """
        if not self._claims.exists() and (appeared := environments() - before):
            self._claims.write_text("\n".join(appeared), encoding="utf-8")

    def remove_leftovers(self) -> None:
        """Remove the shared memory and the `python_env_*` folder of a server that is gone."""
        for region in _SHARED_MEMORY.glob(f"{self.shared_memory_prefix}*"):
            region.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            remove_environments(set(self._claims.read_text(encoding="utf-8").split()))
            self._claims.unlink()  # the next server of this run makes its own folder

    def remove(self, *, keep_log: bool = False) -> None:
        """Remove the folder; `keep_log` leaves the log until the next start."""
        if not keep_log:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        for folder in (self.repository, self.backends, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)

    def _acquire(self) -> bool:
        """Try to take the lock; False while its owner lives. The kernel releases it when that ends."""
        with contextlib.suppress(OSError):
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False


def environments() -> set[str]:
    """Return the names of this user's `python_env_*` folders: each tritonserver has one."""
    found = set()
    for folder in _ENVIRONMENTS.glob("python_env_*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                found.add(folder.name)
    return found


def remove_environments(names: set[str]) -> None:
    """Remove those of the named folders that are empty: the ones into which nothing was unpacked."""
    for name in names:
        with contextlib.suppress(OSError):
            (_ENVIRONMENTS / name).rmdir()


def command_line(pid: int) -> list[str]:
    """Return a process's arguments, its program first; none if it has exited."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def kill(pids: Iterable[int]) -> None:
    """Kill processes, and wait until their memory and files are freed, for five seconds at most."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_S
    while not all(map(_exited, pids)) and time.monotonic() < deadline:
        time.sleep(_KILL_INTERVAL_S)


def _exited(pid: int) -> bool:
    """Whether there is no such process any more, or only its exit status."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
    return status.rpartition(b")")[2].split()[0] in {b"Z", b"X"}


def main(arguments: list[str]) -> int:
    """Run the command until it ends; return its exit status, or `SIGNAL_STATUS` + N if signal N ended it."""
    parent, run, command = int(arguments[0]), RunDirectory(Path(arguments[1])), arguments[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # Stubs that lose the server become children of this process, in place of init's.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:  # it died before the kernel was asked to signal us
        return 0
    server = _start(command)
    status = _wait(server)
    run.kill_processes()
    run.remove_leftovers()
    if os.getppid() != parent:
        run.remove()
    return status


def _start(command: list[str]) -> int:
    """Start the server; the kernel kills it when this process dies."""
    warden = os.getpid()
    server = os.fork()  # safe: this process has one thread
    if server == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != warden:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        try:
            os.execv(command[0], command)  # noqa: S606 - no shell is wanted
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(127)
    return server


def _wait(server: int) -> int:
    """Wait for the server to end, stopping it if a signal asks for that; return the status as `main` does."""
    kill_at: float | None = None
    while True:
        pause = _TICK_S if kill_at is None else max(0.0, kill_at - time.monotonic())
        received = signal.sigtimedwait(_SIGNALS, pause)
        if received is not None and received.si_signo in _STOPS and kill_at is None:
            os.kill(server, signal.SIGTERM)
            kill_at = time.monotonic() + GRACE_S
        if kill_at is not None and time.monotonic() >= kill_at:
            os.kill(server, signal.SIGKILL)
        # Adopted stubs are reaped here, too; only the server's own status matters.
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            if ended[0] == server:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else SIGNAL_STATUS - code


def _prctl(option: int, value: int) -> None:
    """Set an attribute of this process (prctl(2)); with PDEATHSIG, survives exec.

    That signal comes when the *thread* that started this process ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
