"""One tritonserver process, from its start until all that belongs to it has ended: its ports, its log."""

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from triton_models.embedded import warden
from triton_models.embedded.client import TritonClient
from triton_models.embedded.errors import ServerError
from triton_models.embedded.installation import Installation
from triton_models.embedded.models import private_arguments
from triton_models.embedded.warden import GRACE_S, SIGNAL_STATUS, RunDirectory

HOST = "127.0.0.1"
"""The only address that is ever bound: in explicit mode, anyone who may load models can run code."""

_KEY = "tritongate-key"
_START_TIMEOUT_S = 60.0
_START_INTERVAL_S = 0.02
_STUB = "triton_python_backend_stub"
_EXIT_TIMEOUT_S = 2
"""How long tritonserver itself waits for running streams when it is asked to stop."""
_CLEANING_S = 6.0

_MAX_LOG_BYTES = 4 * 1024 * 1024
_TAIL_BYTES = 64 * 1024
ERROR = re.compile(r'^E\d{4} [\d:.]+ \d+ [^\]]+\] "?(.*?)"?$', re.MULTILINE)
"""An error message in the server's log. The next ones: a line of any kind; the type of a C++ exception that
nobody caught, as the runtime names it before it aborts a process; the percentage of a tqdm bar; its total."""
LINE = re.compile(r"^\s*(\S.*?)\s*$", re.MULTILINE)
UNCAUGHT = re.compile(r"^terminate called after throwing an instance of '(.+)'", re.MULTILINE)
PROGRESS = re.compile(r"(\d{1,3})%\|")
SIZE = re.compile(r"\d%\|[^|]*\|[^/]*/([\d.]+[kMGT]?) ")


class Ports(NamedTuple):
    """Port numbers on `HOST`; in a request, 0 means any free port."""

    grpc: int = 0
    metrics: int = 0

    def choose(self) -> "Ports":
        """Return these with each 0 replaced by a free port.

        The ports are free when this returns; another process may still take one before the server does.

        Raises:
            ServerError: a port requested by number is in use, may not be bound, or was requested twice.
        """
        chosen = []
        with contextlib.ExitStack() as held:  # both open at the same time, so that they are not equal
            for name, port in self._asdict().items():
                try:
                    listener = held.enter_context(socket.create_server((HOST, port)))
                except OSError as error:
                    why = f"{os.strerror(error.errno or 0)}; --{name}-port chooses another port"
                    raise ServerError(
                        f"Triton's {name} port {port} is not available on {HOST}: {why}"
                    ) from error
                chosen.append(listener.getsockname()[1])
        return Ports(*chosen)


def new_key() -> str:
    """Return a key that nobody knows, as KEY=VALUE."""
    return f"{_KEY}={secrets.token_hex(16)}"


class ServerLog:
    """The file to which the servers and their stubs write, one server after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        """For their output."""
        self._server = self._begin = 0
        """Where the output of the latest server begins, and that of which `last` tells."""

    def mark(self, *, server: bool = False) -> None:
        """Forget what was written so far: what follows is of another load, or of another `server`."""
        self._begin = os.fstat(self.file).st_size
        if server:
            self._server = self._begin

    def trim(self) -> None:
        """Bound the size: put what there is into a second file, in place of what that held.

        A full disk, or somebody who removed the file, loses the log's past; the server goes on.
        """
        if os.fstat(self.file).st_size > _MAX_LOG_BYTES:
            with contextlib.suppress(OSError):
                shutil.copyfile(self.path, self.path.with_name(f"{self.path.name}.1"))
            os.ftruncate(self.file, 0)  # the next line comes at the beginning: all writers append
            self._server = self._begin = 0

    def last(self, pattern: re.Pattern[str], *, of_server: bool = False) -> str | None:
        """Return what was written last that fits the pattern: its group.

        `of_server`: by the latest server, before `mark`, too. A load may begin while a server dies.
        """
        begin = max(self._server if of_server else self._begin, os.fstat(self.file).st_size - _TAIL_BYTES)
        found = pattern.findall(os.pread(self.file, _TAIL_BYTES, begin).decode(errors="replace"))
        return str(found[-1]) if found else None


@dataclass
class TritonServer:
    """Starts tritonserver without models, under a warden, and stops it.

    One object serves for all restarts: the ports, the key and the run directory stay the same.
    """

    installation: Installation
    run: RunDirectory
    """Where the backends and the log are."""
    repository: Path
    """The model repository."""
    ports: Ports
    """Those that are 0 are chosen at each start until one succeeds."""
    arguments: Sequence[str] = ()
    """More of tritonserver's."""
    key: str = field(default_factory=new_key)
    """What the server requires for everything but inference and health, as KEY=VALUE."""

    def __post_init__(self) -> None:
        self.log = ServerLog(self.run.log)
        self._requested = self.ports
        self._warden: subprocess.Popen[bytes] | None = None

    async def start(self) -> TritonClient:
        """Start the process, wait until it is live and return a client of it.

        Call it from a thread that outlives the server, since the warden ends when that thread does. Whatever
        happens, call `stop` afterwards.

        Raises:
            ServerError: a requested port is in use, it ended (the message has the last error in its log), or
                it is not live after a minute.
        """
        self.ports = self._requested.choose()
        self.log.mark(server=True)
        warden_command = [sys.executable, "-I", "-S", warden.__file__, str(os.getpid()), str(self.run.path)]
        self._warden = subprocess.Popen(  # noqa: S603, ASYNC220 - our own command; returns at once
            [*warden_command, *self._command()],
            env=self.installation.environment(os.environ, temporary=self.run.temporary),
            stdin=subprocess.DEVNULL,
            stdout=self.log.file,
            stderr=self.log.file,
            start_new_session=True,  # so that a terminal's Ctrl-C reaches us alone
        )
        client = TritonClient(f"{HOST}:{self.ports.grpc}", self.key)
        try:
            await self._wait_live(client)
        except BaseException:
            await client.aclose()
            raise
        self._requested = self.ports  # from now on, clients may know them
        return client

    def end(self) -> ServerError | None:
        """Return how the process ended; None while it runs, which does not mean that it answers."""
        status = None if self._warden is None else self._warden.poll()
        if status is None:
            return None
        if status < 0:
            return ServerError(f"the warden of tritonserver was killed by signal {-status}", transient=True)
        if (number := status - SIGNAL_STATUS) > 0:
            why = ""
            if number == signal.SIGABRT:  # who ends itself so says why, but not always in those words
                uncaught, said = (self.log.last(each, of_server=True) for each in (UNCAUGHT, LINE))
                why = f": uncaught {uncaught}" if uncaught else f": {said}" if said else ""
            return ServerError(f"tritonserver was killed by signal {number}{why}", transient=True)
        why = self.log.last(ERROR) or self.log.last(LINE) or "it said nothing"
        # Another process can take a free port after we choose it and before the server binds it.
        chosen = self.ports != self._requested
        return ServerError(f"tritonserver ended with status {status}: {why}", transient=chosen)

    def stubs(self, entry: str) -> set[int]:
        """Return the living stub processes of a repository entry."""
        model = f"{self.repository / entry}{os.sep}"
        found = self.run.processes().items()
        return {pid for pid, words in found if f"{_STUB} {model}" in " ".join(words[:2])}

    def stop(self) -> None:
        """Stop the server, if it runs, and remove all that belongs to it, within ten seconds."""
        if self._warden is None:
            return
        self._warden.terminate()
        try:
            self._warden.wait(GRACE_S + _CLEANING_S)
        except subprocess.TimeoutExpired:
            self._warden.kill()
            self._warden.wait()
        self.run.clean()  # a warden that ended normally has done it; one that was killed has not

    async def _wait_live(self, client: TritonClient) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        live = False
        # The end is looked for last: another process may answer, on a port that ours could not bind.
        while (end := self.end()) is None and not live:
            if time.monotonic() > deadline:
                raise ServerError(f"tritonserver is not live after {_START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(_START_INTERVAL_S)
            with contextlib.suppress(OSError):  # gRPC would wait longer and longer before it tries again
                socket.create_connection((HOST, self.ports.grpc), timeout=1.0).close()
                live = await client.live(timeout_s=1.0)
        if end is not None:
            raise end

    def _command(self) -> list[str]:
        return [
            str(self.installation.server),
            f"--model-repository={self.repository}",
            f"--backend-directory={self.run.backends}",
            f"--backend-config=python,shm-region-prefix-name={self.run.shared_memory_prefix}",
            "--model-control-mode=explicit",
            f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
            f"--grpc-address={HOST}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={HOST}",
            f"--metrics-port={self.ports.metrics}",
            *private_arguments(self.key),
            *self.arguments,
        ]
