"""Lets another process take a gateway's place, with its listening sockets, which are thus never closed.

    SIGUSR2 ──▶ this process starts its own command again, with its sockets
                the successor reaches its models, accepts connections, and says so
                this process accepts none any more, and ends when those that it has are closed

Sockets are passed on as systemd passes those of a `.socket` unit, and its are taken, too: LISTEN_FDS of them
from descriptor 3 on, with their names in LISTEN_FDNAMES, for the process LISTEN_PID (sd_listen_fds(3),
https://www.freedesktop.org/software/systemd/man/latest/sd_listen_fds.html). One that is called `ready` is not
a socket, but a pipe in which the successor writes that it is. A service manager is told at NOTIFY_SOCKET
(sd_notify(3), in the same place) that the gateway is ready, and which process it is by now.

Knows nothing of what is served.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

HandOver = Callable[[], Awaitable[bool]]
"""Lets another process take over; returns whether it has."""
PROGRAM: Final = ("-P", "-m", "gateway.process.handover")
READY_WITHIN_S = 60.0
_FIRST: Final = 3
"""The first descriptor that is passed on (SD_LISTEN_FDS_START)."""
_READY: Final = "ready"
_SOCKET: Final = "socket"
_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_END_WITHIN_S = 10.0
"""How long a successor that is not ready in time may take to end."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_log = logging.getLogger(__name__)


class Inherited:
    """What this process got from the one that started it.

    Args:
        sockets: that listen, or hold an address.
        ready: descriptor of the pipe to a process that goes on until this one is ready, and keeps the other
            end open until it has ended; None: there is none.
    """

    def __init__(self, sockets: Sequence[socket.socket] = (), ready: int | None = None) -> None:
        self._sockets = list(sockets)
        self._ready = ready
        self._before: int | None = None
        """The same, once that process knows that this one is ready."""
        self.succeeds = ready is not None
        """Whether another process serves until this one is ready."""

    @classmethod
    def from_environment(cls) -> "Inherited":
        """Take what the environment tells of, and leave nothing of that to further processes."""
        variables = {name: os.environ.pop(name, "") for name in _VARIABLES}
        if variables["LISTEN_PID"] != str(os.getpid()):
            return cls()
        names = variables["LISTEN_FDNAMES"].split(":")
        sockets, ready = [], None
        for number in range(int(variables["LISTEN_FDS"])):
            descriptor = _FIRST + number
            os.set_inheritable(descriptor, False)  # noqa: FBT003 - positional only
            if names[number : number + 1] == [_READY]:
                ready = descriptor
            elif stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                sockets.append(socket.socket(fileno=descriptor))
        return cls(sockets, ready)

    def take(self, address: Any) -> list[socket.socket]:
        """Return the sockets of this address, as `socket.getsockname` has it, and forget them."""
        found: dict[int, socket.socket] = {}
        others = []
        for each in self._sockets:
            if each.getsockname() != address:
                others.append(each)
            elif found.setdefault(_identity(each), each) is not each:
                each.close()
        self._sockets = others
        return [*found.values()]

    def close_others(self) -> None:
        """Close the sockets that nobody took."""
        for each in self._sockets:
            _log.warning("an inherited socket is not used", extra={"address": str(each.getsockname())})
            each.close()
        self._sockets.clear()

    def tell_ready(self) -> None:
        """Tell the process before this one, and the service manager, that this one serves."""
        if self._ready is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended meanwhile
                os.write(self._ready, b"\n")
            self._before, self._ready = self._ready, None
        notify("READY=1")

    def outlast(self, within_s: float) -> None:
        """Wait until the process before this one has ended, but for so long at most.

        A service manager that stops this one would kill it in the middle of its last answers.
        """
        if self._before is not None:
            end = select.poll()
            end.register(self._before, 0)  # for the error that nobody can read it any more
            end.poll(within_s * 1000)


def _identity(listener: socket.socket) -> int:
    """Return what a socket has in common with its duplicates."""
    return os.fstat(listener.fileno()).st_ino


def notify(state: str) -> None:
    """Tell the service manager, if there is one that wants to know."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.connect("\0" + address[1:] if address.startswith("@") else address)
            manager.send(state.encode())
    except OSError:
        _log.exception("the service manager could not be told", extra={"state": state})


async def hand_over(sockets: Sequence[socket.socket]) -> bool:
    """Start this process's own command again; return whether it is ready to serve from `sockets`.

    One that is not within READY_WITHIN_S is ended, and the log says why; so is one whose start is cancelled.
    """
    if os.getpid() == 1:
        _log.error("not handed over: the first process of a container must stay")
        return False
    try:
        process, reading = _start(sockets)
    except OSError:  # for example, no memory for another process
        _log.exception("not handed over: the successor could not be started")
        return False
    _log.info("handing over", extra={"successor": process.pid})
    ready = False
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            ready = await _read(reading) != b""
    except TimeoutError:
        _log.error("not handed over: the successor was not ready in time", extra={"after_s": READY_WITHIN_S})
    else:
        if not ready:
            status = await asyncio.to_thread(process.wait)
            _log.error("not handed over: the successor ended", extra={"status": status})
    finally:
        if not ready:
            os.close(reading)
            await asyncio.shield(asyncio.to_thread(_end, process))
    if ready:  # the pipe stays open until this process ends: see `Inherited.outlast`
        notify(f"MAINPID={process.pid}")
    return ready


def _start(sockets: Sequence[socket.socket]) -> "tuple[subprocess.Popen[bytes], int]":
    """Start the successor; return it, and the descriptor from which its word can be read.

    Raises:
        OSError: it could not be started.
    """
    reading, writing = os.pipe()
    passed = {writing: _READY} | {each.fileno(): _SOCKET for each in sockets}
    words = [f"{name}={descriptor}" for descriptor, name in passed.items()]
    command = [sys.executable, *PROGRAM, *words, "--", *_own_command()]
    try:
        return subprocess.Popen(command, pass_fds=tuple(passed)), reading  # noqa: S603 - our own command
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)


def _own_command() -> list[str]:
    """Return the command line of this process; a script names its interpreter itself, another one perhaps."""
    if os.access(sys.argv[0], os.X_OK):
        return [os.path.abspath(sys.argv[0]), *sys.argv[1:]]  # noqa: PTH100 - no link is followed
    return [sys.executable, *sys.orig_argv[1:]]


async def _read(descriptor: int) -> bytes:
    """Read one byte from a pipe; nothing if all that could write have ended."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
        return os.read(descriptor, 1)
    finally:
        loop.remove_reader(descriptor)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_END_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def caught_signals() -> Iterator[asyncio.Queue[int]]:
    """Collect the signals above in a queue; not SIGHUP if it is ignored, as under nohup."""
    loop = asyncio.get_running_loop()
    caught: asyncio.Queue[int] = asyncio.Queue()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        loop.add_signal_handler(number, caught.put_nowait, number)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def until_stopped(signals: "asyncio.Queue[int]", hand_over: HandOver | None) -> bool:
    """Wait until this process is to stop serving; return whether another one has taken over.

    Args:
        signals: those that arrive.
        hand_over: what SIGUSR2 asks for; None: nothing can.
    """
    while await signals.get() == signal.SIGUSR2:
        if hand_over is None:
            _log.warning("SIGUSR2 is ignored: only `tritongate serve` can hand over to another process")
            continue
        starting = asyncio.ensure_future(hand_over())
        stop = asyncio.create_task(next_end(signals))
        await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
        handed_over = starting.done() and starting.result()
        if stop.done() and not handed_over:
            starting.cancel()
            await asyncio.wait({starting})
            return False
        stop.cancel()
        if handed_over:
            return True
    return False


async def next_end(signals: "asyncio.Queue[int]") -> int:
    """Return the next signal that ends this process."""
    while (number := await signals.get()) == signal.SIGUSR2:
        pass
    return number


async def second_end(signals: "asyncio.Queue[int]") -> int:
    """Return the next signal that cuts a drain short: no SIGHUP, as one lost terminal may send two."""
    while (number := await next_end(signals)) == signal.SIGHUP:
        pass
    return number


def main(words: list[str]) -> None:
    """Become another program, with descriptors as systemd has them: `NAME=NUMBER... -- PROGRAM ARGUMENTS...`.

    Only a process of its own can do that: descriptors get other numbers, and LISTEN_PID is its own.
    """
    end = words.index("--")
    names, _, descriptors = zip(*(word.partition("=") for word in words[:end]), strict=True)
    # First out of the way of one another.
    high = [fcntl.fcntl(int(each), fcntl.F_DUPFD_CLOEXEC, _FIRST + len(names)) for each in descriptors]
    for each in descriptors:
        os.close(int(each))
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, _FIRST + number)
    values = (str(os.getpid()), str(len(names)), ":".join(names))
    os.environ.update(zip(_VARIABLES, values, strict=True))
    os.execvp(words[end + 1], words[end + 1 :])  # noqa: S606 - there is no shell


if __name__ == "__main__":
    main(sys.argv[1:])
