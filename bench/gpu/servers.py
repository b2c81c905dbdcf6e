"""Starts, waits for and stops the servers that are compared. Each runs alone on the GPU."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

READY_S = 420.0
_STOP_S = 20.0


class ServerError(Exception):
    """A server did not become ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The address of a running server, and its model's name."""

    url: str
    model: str
    started_s: float
    """Time that it took to become ready."""


@contextlib.contextmanager
def ours(checkpoint: Path, log: Path, arguments: Sequence[str]) -> Iterator[Server]:
    """Run `tritongate up` on the checkpoint with additional `arguments`, on free ports.

    Raises:
        ServerError: it did not become ready; the message has the end of its output.
    """
    began = time.monotonic()
    with up(f"--model=glm={checkpoint}", *arguments, log=log) as url:
        yield Server(url=url, model="glm", started_s=time.monotonic() - began)


@contextlib.contextmanager
def process(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command that writes to `log` until the block ends, and end all that it has started."""
    with log.open("wb") as output:
        running = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)  # stubs and engines' processes, if they hang
        running.wait()


@contextlib.contextmanager
def up(*arguments: str, log: Path, program: Sequence[str] = ()) -> Iterator[str]:
    """Run `tritongate up` on free ports and yield its base URL.

    Args:
        arguments: further ones of its command line.
        log: gets its output.
        program: what is run instead of the installed `tritongate`.

    Raises:
        ServerError: it did not become ready; the message has the end of its output.
    """
    command = [*(program or [str(Path(sys.executable).with_name("tritongate"))]), "up"]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command += ["--port", str(port)]
    for name in ("kserve-http", "kserve-grpc"):
        command += [f"--{name}-port", str(free_port())]
    command += ["--metrics-port", "0"]  # any free ones, of as many replicas as there are
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *arguments], stdout=output, stderr=output)
    try:
        while not answers(url + "/health/ready"):
            if process.poll() is not None or time.monotonic() - began > READY_S:
                raise ServerError(f"tritongate up is not ready:\n{_end_of(log)}")
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Another server. Its script starts it and returns when it answers; called with `stop`, it stops it."""

    script: Path
    arguments: tuple[str, ...]
    url: str
    model: str
    python: str
    """The Python interpreter in which it is installed, passed to the script as `PY`."""
    log: Path


@contextlib.contextmanager
def other(program: Program) -> Iterator[Server]:
    """Run another server.

    Raises:
        ServerError: its script failed; the message has the end of the script's output.
    """
    environment = os.environ | {"PY": program.python}
    began = time.monotonic()
    try:
        with program.log.open("wb") as output:
            done = subprocess.run(
                [program.script, *program.arguments],
                stdout=output,
                stderr=output,
                env=environment,
                check=False,
            )
        if done.returncode:
            raise ServerError(f"{program.script.name} failed:\n{_end_of(program.log)}")
        yield Server(url=program.url, model=program.model, started_s=time.monotonic() - began)
    finally:
        subprocess.run([program.script, "stop"], env=environment, check=False, stdout=subprocess.DEVNULL)


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def answers(url: str) -> bool:
    """Return whether a GET of `url` is answered with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - our own address
            return bool(answer.status == 200)  # noqa: PLR2004 - HTTP's OK
    except (urllib.error.URLError, OSError):
        return False


def _end_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-3000:]
