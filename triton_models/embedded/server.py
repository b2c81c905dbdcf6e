"""Runs one tritonserver process, from its start until everything that belongs to it has ended."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from triton_models.embedded.client import TritonClient
from triton_models.embedded.errors import ServerError, StoppedError
from triton_models.embedded.installation import Installation
from triton_models.embedded.log import ServerLog
from triton_models.embedded.ports import HOST, Ports
from triton_models.embedded.rundir import RunDirectory
from triton_models.embedded.warden import GRACE_S, SIGNAL_STATUS

_START_TIMEOUT_S = 60.0
_EXIT_TIMEOUT_S = 2
"""How long tritonserver itself waits for running streams when it is asked to stop."""
_CLEANING_S = 2.0


class TritonServer:
    """Starts tritonserver without models, under a warden, and stops it.

    One object serves for all restarts: the ports and the run directory stay the same.
    """

    def __init__(
        self,
        installation: Installation,
        run: RunDirectory,
        repository: Path,
        ports: Ports,
        log: ServerLog,
        *,
        arguments: Sequence[str] = (),
    ) -> None:
        """Store what to start; `arguments` are additional command-line arguments of tritonserver."""
        self.ports = ports
        self._installation = installation
        self._run = run
        self._repository = repository
        self._log = log
        self._arguments = arguments
        self._warden: subprocess.Popen[bytes] | None = None

    def start(self, stop: threading.Event) -> TritonClient:
        """Start the process, wait until it is live and return a client of it.

        Call it from a thread that outlives the server: the warden ends when that thread does.

        Raises:
            ServerError: it ended (the message has the last error in its log), or is not live after a minute.
            StoppedError: `stop` was set while waiting.
        """
        reader, writer = os.pipe()
        self._warden = subprocess.Popen(  # noqa: S603 - our own command
            [
                *(sys.executable, "-m", f"{__package__}.warden"),
                *(str(os.getpid()), str(self._run.path)),
                *self._command(),
            ],
            env=self._installation.environment(os.environ, temporary=self._run.temporary),
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            start_new_session=True,  # so that a terminal's Ctrl-C reaches us alone
        )
        os.close(writer)
        self._log.follow(reader)
        client = TritonClient(f"{HOST}:{self.ports.grpc}")
        try:
            self._wait_live(client, stop)
        except BaseException:
            client.close()
            self.stop()
            raise
        return client

    def alive(self) -> bool:
        """Whether the process runs, which does not mean that it answers."""
        return self._warden is not None and self._warden.poll() is None

    @property
    def crashed(self) -> bool:
        """Whether a signal ended it, and not its own decision."""
        status = None if self._warden is None else self._warden.poll()
        return status is not None and (status < 0 or status > SIGNAL_STATUS)

    def end_reason(self) -> str:
        """Describe how a server that is no longer alive ended."""
        self._log.drain()
        if self._warden is None:
            return "tritonserver was not started"
        status = self._warden.returncode
        if status is not None and status < 0:
            return f"the warden of tritonserver was killed by signal {-status}"
        if status is not None and status > SIGNAL_STATUS:
            number = status - SIGNAL_STATUS
            uncaught = self._log.uncaught if number == signal.SIGABRT else None
            why = f": uncaught {uncaught}" if uncaught else ""
            return f"tritonserver was killed by signal {number}{why}"
        return f"tritonserver ended with status {status}: {self._log.complaint()}"

    def stubs(self, entry: str) -> list[psutil.Process]:
        """Return the living stub processes of a repository entry."""
        script = f"{self._repository / entry}{os.sep}"
        return [
            process
            for process in self._run.processes()
            if _argument(process, 0).endswith("triton_python_backend_stub")
            and _argument(process, 1).startswith(script)
        ]

    def kill_stubs(self, entry: str) -> None:
        """Kill the stub processes of a repository entry."""
        for stub in self.stubs(entry):
            with contextlib.suppress(psutil.NoSuchProcess):
                stub.kill()

    def stop(self) -> None:
        """Stop the server and all that belongs to it, including running streams, within seven seconds."""
        if self._warden is not None:
            self._warden.terminate()
            self._finish(self._warden, GRACE_S + _CLEANING_S)

    def kill(self) -> None:
        """Kill a server that hangs, or clean up after one that died, with all that belongs to it."""
        if self._warden is not None:
            self._run.kill_processes()
            self._finish(self._warden, _CLEANING_S)

    def _finish(self, warden: subprocess.Popen[bytes], timeout_s: float) -> None:
        try:
            warden.wait(timeout_s)
        except subprocess.TimeoutExpired:
            warden.kill()
            warden.wait()
        # A warden that ended normally leaves nothing to do here; one that was killed does.
        self._run.kill_processes()
        self._run.remove_leftovers()
        self._log.drain()

    def _wait_live(self, client: TritonClient, stop: threading.Event) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not client.live(timeout_s=1.0):
            if not self.alive():
                raise ServerError(self.end_reason())
            if stop.wait(0.05):
                raise StoppedError
            if time.monotonic() > deadline:
                raise ServerError(f"tritonserver is not live after {_START_TIMEOUT_S:.0f} s")
        # If ours could not bind the port, what answers there is another process's server.
        if not self.alive():
            raise ServerError(self.end_reason())

    def _command(self) -> list[str]:
        return [
            str(self._installation.server),
            f"--model-repository={self._repository}",
            f"--backend-directory={self._run.backends}",
            f"--backend-config=python,shm-region-prefix-name={self._run.shared_memory_prefix}",
            "--model-control-mode=explicit",
            f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
            f"--http-address={HOST}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={HOST}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={HOST}",
            f"--metrics-port={self.ports.metrics}",
            *self._arguments,
        ]


def _argument(process: psutil.Process, index: int) -> str:
    try:
        arguments = process.cmdline()
    except psutil.Error:
        return ""
    return arguments[index] if index < len(arguments) else ""


def runs(process: psutil.Process) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
