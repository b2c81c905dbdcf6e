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
from dataclasses import dataclass
from pathlib import Path

from triton_models.embedded import warden
from triton_models.embedded.client import TritonClient
from triton_models.embedded.errors import ServerError
from triton_models.embedded.installation import Installation
from triton_models.embedded.warden import GRACE_S, SIGNAL_STATUS, RunDirectory, command_line, kill

HOST = "127.0.0.1"
"""The only address that is ever bound: in explicit mode, anyone who may load models can run code."""

_RESTRICTED = "shared-memory,model-repository,statistics,trace,logging"
"""The protocols that need the key. Health, metadata, configurations and inference do not."""
_KEY = "tritongate-key"
_START_TIMEOUT_S = 60.0
_START_INTERVAL_S = 0.02
_EXIT_TIMEOUT_S = 2
"""How long tritonserver itself waits for running streams when it is asked to stop."""
_CLEANING_S = 2.0
_PORT_ATTEMPTS = 3

_MAX_LOG_BYTES = 4 * 1024 * 1024
_TAIL_BYTES = 64 * 1024
_ERROR = re.compile(r'E\d{4} [\d:.]+ \d+ [^\]]+\] "?(.*?)"?')
_INFORMATION = re.compile(r"[IW]\d{4} [\d:.]+ \d+ ")
_UNCAUGHT = re.compile(r"^terminate called after throwing an instance of '(.+)'", re.MULTILINE)
"""What the C++ runtime says before it aborts a process."""
_PROGRESS = re.compile(r"(\d{1,3})%\|")
"""A tqdm bar, such as the checkpoint reader draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Port numbers on `HOST`; in a request, 0 means any free port."""

    grpc: int = 0
    metrics: int = 0

    def choose(self) -> "Ports":
        """Return these with each 0 replaced by a free port.

        The ports are free when this returns; another process may still take one before the server does.

        Raises:
            ServerError: a port requested by number is in use, may not be bound, or was requested twice.
        """
        with contextlib.ExitStack() as held:  # both open at the same time, so that they are not equal
            chosen = []
            for name, port in (("grpc", self.grpc), ("metrics", self.metrics)):
                listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                # A port whose last connections are in TIME_WAIT is free; one with a listener is not.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    listener.bind((HOST, port))
                    listener.listen()
                except OSError as error:
                    raise ServerError(
                        f"Triton's {name} port {port} is not available on {HOST}: {error.strerror}"
                    ) from error
                chosen.append(listener.getsockname()[1])
        return Ports(grpc=chosen[0], metrics=chosen[1])


class ServerLog:
    """The file to which a server and its stubs write. It says in one line why one of them failed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin = 0
        """Where the output of the present server begins."""
        self._load_begin = 0

    def open(self) -> int:
        """Return a descriptor for the output of the next server; what earlier ones wrote stays."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._begin = self._load_begin = os.fstat(descriptor).st_size
        return descriptor

    def trim(self) -> None:
        """Bound the size: put what there is into a second file, in place of what that held.

        A full disk loses the log's past, and a log that somebody removed is left alone: the server goes on.
        """
        if self._size() <= _MAX_LOG_BYTES:
            return
        with contextlib.suppress(OSError):
            shutil.copyfile(self.path, self.path.with_name(f"{self.path.name}.1"))
        with contextlib.suppress(OSError):
            os.truncate(self.path, 0)  # the next line comes at the beginning: all writers append
        self._begin = self._load_begin = 0

    def begin_load(self) -> None:
        """Forget the last progress bar."""
        self._load_begin = self._size()

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @property
    def progress(self) -> float | None:
        """The value of the most recent progress bar of this load, 0 to 1; None if there was none."""
        bars = _PROGRESS.findall(self._tail(self._load_begin))
        return min(int(bars[-1]), 100) / 100 if bars else None

    @property
    def last_error(self) -> str | None:
        """The server's latest error message."""
        found = [error[1] for line in self._lines() if (error := _ERROR.fullmatch(line)) is not None]
        return found[-1] if found else None

    @property
    def complaint(self) -> str:
        """In one line, what went wrong: the server's last error, else its last line of unknown form."""
        if (error := self.last_error) is not None:
            return error
        other = [line for line in self._lines() if not (_INFORMATION.match(line) or _PROGRESS.search(line))]
        return other[-1] if other else "it said nothing"

    @property
    def uncaught(self) -> str | None:
        """The type of the C++ exception that ended the server, or one of its stubs; None if none did."""
        found = _UNCAUGHT.findall(self._tail(self._begin))
        return found[-1] if found else None

    def _lines(self) -> list[str]:
        return [line.strip() for line in self._tail(self._begin).splitlines() if line.strip()]

    def _tail(self, begin: int) -> str:
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace")
        return ""


class TritonServer:
    """Starts tritonserver without models, under a warden, and stops it.

    One object serves for all restarts: the ports, the key and the run directory stay the same.

    Args:
        installation: the wheel's files.
        run: where the backends and the log are.
        repository: the model repository.
        asked: the ports; those that are 0 are chosen at the first start.
        arguments: additional command-line arguments of tritonserver.
    """

    def __init__(
        self,
        installation: Installation,
        run: RunDirectory,
        repository: Path,
        asked: Ports,
        *,
        arguments: Sequence[str] = (),
    ) -> None:
        self.run = run
        self.log = ServerLog(run.log)
        self.key = f"{_KEY}={secrets.token_hex(16)}"
        """What the server requires for everything but inference and health, as KEY=VALUE."""
        self._installation = installation
        self._repository = repository
        self.ports = asked
        """Once it has started, those that it listens on."""
        self._arguments = arguments
        self._warden: subprocess.Popen[bytes] | None = None

    async def start(self) -> TritonClient:
        """Start the process, wait until it is live and return a client of it.

        Call it from a thread that outlives the server: the warden ends when that thread does.

        Raises:
            ServerError: a requested port is in use, it ended (the message has the last error in its log), or
                it is not live after a minute.
        """
        asked = self.ports
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            self.ports = asked.choose()
            try:
                return await self._start()
            except ServerError:
                # Another process can take a free port after we choose it and before the server binds it.
                if self.ports == asked or attempt == _PORT_ATTEMPTS:
                    raise
        raise AssertionError

    def end(self) -> ServerError | None:
        """Return how the process ended; None while it runs, which does not mean that it answers."""
        status = None if self._warden is None else self._warden.poll()
        if status is None:
            return None
        if status < 0:
            return ServerError(f"the warden of tritonserver was killed by signal {-status}", crashed=True)
        if (number := status - SIGNAL_STATUS) > 0:
            uncaught = self.log.uncaught if number == signal.SIGABRT else None
            why = f": uncaught {uncaught}" if uncaught else ""
            return ServerError(f"tritonserver was killed by signal {number}{why}", crashed=True)
        return ServerError(f"tritonserver ended with status {status}: {self.log.complaint}")

    def stubs(self, entry: str) -> set[int]:
        """Return the living stub processes of a repository entry."""
        return {pid for pid, words in self.run.processes().items() if self._is_stub(words, entry)}

    def stub_runs(self, pid: int, entry: str) -> bool:
        """Whether this stub process of a repository entry still runs; costs less than looking for all."""
        return self._is_stub(command_line(pid), entry)

    def kill_stubs(self, entry: str) -> None:
        """Kill the stub processes of a repository entry."""
        kill(self.stubs(entry))

    def stop(self) -> None:
        """Stop the server, if it runs, and remove all that belongs to it, within seven seconds."""
        if self._warden is None:
            return
        self._warden.terminate()
        try:
            self._warden.wait(GRACE_S + _CLEANING_S)
        except subprocess.TimeoutExpired:
            self._warden.kill()
            self._warden.wait()
        # A warden that ended normally leaves nothing to do here; one that was killed does.
        self.run.kill_processes()
        self.run.remove_leftovers()

    def _is_stub(self, words: Sequence[str], entry: str) -> bool:
        return (
            len(words) > 1
            and words[0].endswith("triton_python_backend_stub")
            and words[1].startswith(f"{self._repository / entry}{os.sep}")
        )

    async def _start(self) -> TritonClient:
        output = self.log.open()
        warden_command = [sys.executable, "-I", "-S", warden.__file__, str(os.getpid()), str(self.run.path)]
        self._warden = subprocess.Popen(  # noqa: S603, ASYNC220 - our own command; returns at once
            [*warden_command, *self._command()],
            env=self._installation.environment(os.environ, temporary=self.run.temporary),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that a terminal's Ctrl-C reaches us alone
        )
        os.close(output)
        client = TritonClient(f"{HOST}:{self.ports.grpc}", self.key)
        try:
            await self._wait_live(client)
        except BaseException:
            await client.aclose()
            self.stop()
            raise
        return client

    async def _wait_live(self, client: TritonClient) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        live = False
        # The end is looked for last: another process may answer, on a port that ours could not bind.
        while (end := self.end()) is None and not live:
            if time.monotonic() > deadline:
                raise ServerError(f"tritonserver is not live after {_START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(_START_INTERVAL_S)
            # gRPC waits longer and longer before it tries to connect again.
            live = _listens(self.ports.grpc) and await client.live(timeout_s=1.0)
        if end is not None:
            raise end

    def _command(self) -> list[str]:
        return [
            str(self._installation.server),
            f"--model-repository={self._repository}",
            f"--backend-directory={self.run.backends}",
            f"--backend-config=python,shm-region-prefix-name={self.run.shared_memory_prefix}",
            "--model-control-mode=explicit",
            f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
            "--allow-http=false",
            f"--grpc-address={HOST}",
            f"--grpc-port={self.ports.grpc}",
            # tritonserver (2.51) takes the key from nowhere else, so whoever can list this machine's
            # processes can read it: it is a second fence behind the loopback address.
            f"--grpc-restricted-protocol={_RESTRICTED}:{self.key}",
            f"--metrics-address={HOST}",
            f"--metrics-port={self.ports.metrics}",
            *self._arguments,
        ]


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1.0).close()
    except OSError:
        return False
    return True
