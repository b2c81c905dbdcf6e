"""Runs tritonserver as its child and cleans up after it, whichever process dies first.

    python -m triton_models.embedded.warden PARENT_PID RUN_DIRECTORY COMMAND...

It is a separate process, because the supervisor can be killed, too. It has a single thread. On a signal (the
kernel sends one when the supervisor dies) it asks the server to stop, waits a while, then kills the server
and its stubs, and removes their shared memory. If the warden itself is killed, the kernel kills the server,
and the supervisor or the next start finds the stubs by their command line (rundir.py).
"""

import os
import signal
import sys
import time
from pathlib import Path

from triton_models.embedded import prctl
from triton_models.embedded.rundir import RunDirectory

GRACE_S = 3.5
"""From the request to stop until the server is killed; longer than tritonserver's own exit timeout."""

SIGNAL_STATUS = 128
"""The warden's exit status is this plus N if signal N ended the server, as in a shell."""

_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
_STOPS = frozenset({signal.SIGTERM, signal.SIGINT})
_TICK_S = 1.0


def main(arguments: list[str]) -> int:
    """Run the command until it ends; return its exit status, or `SIGNAL_STATUS` + N if signal N ended it."""
    parent, run, command = int(arguments[0]), RunDirectory(Path(arguments[1])), arguments[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    prctl.signal_on_parent_death(signal.SIGTERM)
    prctl.adopt_orphans()
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
        prctl.signal_on_parent_death(signal.SIGKILL)
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
        while (ended := _reap())[0] != 0:
            if ended[0] == server:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else SIGNAL_STATUS - code


def _reap() -> tuple[int, int]:
    return os.waitpid(-1, os.WNOHANG)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
