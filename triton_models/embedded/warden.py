"""What a server can leave behind on the machine, and the process that removes it, whichever process dies.

    python -I -S warden.py PARENT_PID RUN_DIRECTORY COMMAND...

The warden, with its single thread, runs tritonserver as its child. On a signal (the kernel sends one when the
supervisor dies) it asks the server to stop, waits a while, then kills the server, its stubs and what these
started, and removes their shared memory. If the warden itself is killed, the kernel kills the server, and the
supervisor or the next start finds the stubs by their command line. It imports few modules, to need little
memory.
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

_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM})

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's mount point; Boost's regions are files there
_ENVIRONMENTS = Path("/tmp")  # noqa: S108 - fixed in the Python backend, whatever TMPDIR says
_KEPT, _KEPT_LOGS = ".log", 5
"""How the logs of failed starts end, and how many are kept."""
_KILL_ROUNDS = 4
_KILL_S = 5.0
_KILL_INTERVAL_S = 0.02

_PR_SET_PDEATHSIG = 1
"""The signal for when the *thread* that started this process ends; survives exec."""
_PR_SET_CHILD_SUBREAPER = 36


class RunDirectory:
    """A folder below `<temporary>/tritongate-<uid>`, locked as long as the process that created it lives.

    What belongs to its server is recognised: processes by the path of this folder's backends in their command
    line, regions of shared memory by a prefix made of this folder's name.
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
        for log in sorted(parent.glob(f"*{_KEPT}"))[:-_KEPT_LOGS]:
            log.unlink(missing_ok=True)
        for path in parent.iterdir():
            if path.suffix == _KEPT:
                continue
            stale = cls(path)
            if stale._acquire():
                stale.clean()
                stale.remove()
        while True:
            run = cls(parent / os.urandom(4).hex())
            run.path.mkdir(mode=0o700)
            # Until it is locked, another start may take it for stale, and remove it.
            if run._acquire() and run.path.exists():
                break
        for folder in (run.repository, run.temporary):
            folder.mkdir()
        return run

    def processes(self) -> dict[int, list[str]]:
        """Return the command lines of the living server, its stubs and its warden, but not of this process.

        Each has the backend directory, which only this run uses, in its command line.
        """
        # Not the run folder's path: that would match a program that reads the log.
        own, this = str(self.backends), os.getpid()
        found = command_lines()
        return {pid: words for pid, words in found.items() if pid != this and any(own in w for w in words)}

    def clean(self) -> None:
        """Kill the processes of this folder, except this process, and remove what a killed server leaves."""
        for _ in range(_KILL_ROUNDS):  # repeated: the server may have started another stub
            if not (remaining := self.processes()):
                break
            kill(remaining)
        for region in _SHARED_MEMORY.glob(f"{self.shared_memory_prefix}*"):
            region.unlink(missing_ok=True)
        remove_environments()

    def keep_log(self) -> Path:
        """Move the log out of the folder, to where later starts leave it; return where it is.

        Raises:
            OSError: it cannot be moved.
        """
        kept = self.path.with_name(f"failed-{time.time_ns()}{_KEPT}")
        return self.log.replace(kept)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _acquire(self) -> bool:
        """Try to take the lock; False while its owner lives. The kernel releases it when that ends."""
        with contextlib.suppress(OSError):
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._lock)
            else:
                return True
        return False


def environments() -> set[Path]:
    """Return the `python_env_*` folders: each tritonserver has one from its first load of a model."""
    return set(_ENVIRONMENTS.glob("python_env_*"))


def remove_environments() -> None:
    """Remove empty `python_env_*` folders, which servers leave that were killed.

    Nothing tells whose a folder is. So they stay while any tritonserver runs, and go with the last one.
    """
    found = environments()  # first: a server that starts meanwhile makes its own only later
    if not any(words[0].endswith("tritonserver") for words in command_lines().values()):
        for folder in found:
            with contextlib.suppress(OSError):  # somebody else's, or something was unpacked into it
                folder.rmdir()


def command_lines() -> dict[int, list[str]]:
    """Return the arguments of every living process."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return {pid: words for pid in pids if (words := command_line(pid))}


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
    status = 0
    if os.getppid() == parent:  # else it died before the kernel was asked to signal us
        status = _wait(_start(command))
    _end_children()
    run.clean()
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
    while True:
        match signal.sigwait(_SIGNALS):
            case signal.SIGTERM | signal.SIGINT:
                os.kill(server, signal.SIGTERM)
                signal.setitimer(signal.ITIMER_REAL, GRACE_S)
            case signal.SIGALRM:
                os.kill(server, signal.SIGKILL)
            case _:
                # Adopted stubs are reaped here, too; only the server's own status matters.
                while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                    if ended[0] == server:
                        code = os.waitstatus_to_exitcode(ended[1])
                        return code if code >= 0 else SIGNAL_STATUS - code


def _end_children() -> None:
    """Kill and reap what the server has left, and what that had started, for five seconds at most.

    No command line tells of a process that is about to exit, and it may still hold its GPU's memory.
    """
    deadline = time.monotonic() + _KILL_S
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < deadline:
            for pid in _children():
                with contextlib.suppress(PermissionError):  # another user's by now
                    os.kill(pid, signal.SIGKILL)  # not reaped yet: the number is still its own
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
            time.sleep(_KILL_INTERVAL_S)


def _children() -> list[int]:
    """Return the processes whose parent is this one; none if the kernel keeps no list."""
    own = os.getpid()
    with contextlib.suppress(OSError):
        return list(map(int, Path(f"/proc/{own}/task/{own}/children").read_bytes().split()))
    return []


def _prctl(option: int, value: int) -> None:
    """Set an attribute of this process: see prctl(2). None of those used here can fail."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
