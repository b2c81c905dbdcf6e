"""Several gateway processes behind one port: starts them, replaces those that end, and stops them all.

    this process ──order──▶ worker 0, worker 1, …    each a whole gateway, with a listener of its own

The kernel distributes connections among the listeners. This process holds those for HTTP too, so that
connections waiting for a worker that died are served by its replacement; if that dies soon as well, they are
reset, and new ones go to the other workers. It serves nothing itself, so it does not import
`gateway.process.server`, which is most of the time and the memory that a start takes. Signals work as in
`gateway.process.server`, and are passed on as SIGUSR1; after the first, no worker is replaced. SIGUSR2 is
passed on once another process serves. Workers are deaf to SIGTERM, SIGINT and SIGHUP: a terminal or a service
manager sends them to every process, and with what is passed on, one would count as two.

A worker is `python -m gateway.process.workers`. It reads its order (settings, sockets, place), one line of
JSON, from standard input, and writes one line to standard output when every model is ready. When standard
input ends, because the parent died or closed it, the worker stops as on SIGUSR1.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from pydantic import SecretStr

from gateway.core.backoff import Backoff
from gateway.http.tls import Certificate, Pair
from gateway.limits.counters import mark_begun, mark_ended, new_table
from gateway.process.handover import (
    HandOver,
    Inherited,
    caught_signals,
    hand_over,
    second_end,
    until_stopped,
)
from gateway.process.listeners import BACKLOG, Listeners, base_url, bind_gateway, listen_gateway
from gateway.settings import FILE_OF, Settings
from gateway.settings.values import revealed
from gateway.telemetry.logs import configure_logging
from gateway.telemetry.metrics import Place, answers

_STEADY_S = 60.0
"""A worker that lived longer than this is replaced after the shortest pause."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_STUCK_S = 5.0
"""How much longer than it should a worker may take to end, before it is killed."""
_ASK_EVERY_S = 5.0
_MISSES = 5
"""Unanswered questions in a row that mean a worker hangs: half a minute or so."""
_MISSES_AT_START = 30
"""The same until its first answer: it imports and starts meanwhile."""
PROGRAM: Sequence[str] = ("-P", "-m", "gateway.process.workers")
"""Of a worker, for Python; -P: no modules from the working directory, which may be anyone's."""

_log = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a worker, its listeners, and its place among the workers."""

    settings: dict[str, Any]
    """All settings, secrets in clear text: never log them or put them on a command line."""
    http: list[int]
    """The inherited descriptors of the sockets for HTTP."""
    grpc: str | None
    """The address for gRPC, if there is one."""
    place: Place
    certificate: Pair | None = None
    """What TLS goes on with if its files cannot be used by now; None: there is no TLS."""
    succeeds: bool = False
    """Whether the workers of another process serve until this one is ready."""


_decoder = msgspec.json.Decoder(Order)


def encode_order(
    settings: Settings,
    listeners: Listeners,
    place: Place,
    *,
    certificate: Pair | None = None,
    succeeds: bool = False,
) -> bytes:
    """Return an order as the line that the worker reads."""
    http = [listener.fileno() for listener in listeners.http]
    order = Order(
        settings=settings.model_dump(),
        http=http,
        grpc=listeners.grpc,
        place=place,
        certificate=certificate,
        succeeds=succeeds,
    )
    return msgspec.json.encode(order, enc_hook=_plain) + b"\n"


def decode_order(line: bytes) -> Order:
    """Read what `encode_order` wrote.

    Raises:
        msgspec.MsgspecError: it is not an order.
    """
    return _decoder.decode(line)


def _plain(value: object) -> Any:
    if isinstance(value, SecretStr):
        return revealed(value)
    return str(value)


def prepare(listeners: Sequence[Listeners]) -> None:
    """Import what `run` will need with these, which takes a second if this process is to serve itself."""
    if len(listeners) == 1:
        import gateway.process.server  # noqa: F401, PLC0415 - see above, like those below


def run(
    settings: Settings,
    *,
    listeners: Sequence[Listeners] = (),
    inherited: Inherited | None = None,
    on_ready: Callable[[str], None] | None = None,
    on_stop: Callable[[], None] | None = None,
) -> int:
    """Serve in as many processes as the settings say until a signal; return the exit status.

    Must be called on the main thread.

    Args:
        settings: the gateway's; limits on requests apply to all workers together.
        listeners: from `bind_gateway`, those of each worker; closed at the end. Empty: they are made here.
        inherited: from the process that started this one, which in turn may hand over to another; None: it
            may not.
        on_ready: called with the base URL once every model is ready in every worker.
        on_stop: called when a signal begins the drain.

    Raises:
        ListenError: the address cannot be listened on.
    """
    listeners = listeners or bind_gateway(settings, inherited)
    succeeds = inherited is not None and inherited.succeeds
    may_leave: HandOver | None = None
    if inherited is not None:
        sockets = [each for own in listeners for each in (*own.http, own.reserved) if each is not None]
        may_leave = partial(hand_over, [*dict.fromkeys(sockets)])
    if len(listeners) == 1:
        from gateway.process.server import run as run_alone  # noqa: PLC0415

        return run_alone(
            settings,
            listeners=listeners[0],
            on_ready=on_ready,
            on_stop=on_stop,
            succeeds=succeeds,
            hand_over=may_leave,
        )
    configure_logging(settings.log_level, settings.log_format)
    listen_gateway(listeners)
    with new_places(len(listeners)) as places:
        certificate = None
        if settings.tls_cert and settings.tls_key:
            certificate = Certificate(settings.tls_cert, settings.tls_key)
        workers = [
            _Worker(settings, own, place, certificate=certificate, succeeds=succeeds)
            for own, place in zip(listeners, places, strict=True)
        ]
        return asyncio.run(_run(settings, workers, on_ready, on_stop, may_leave))


@contextlib.contextmanager
def new_places(count: int) -> Iterator[list[Place]]:
    """Make places for so many processes, with what they have in common, of which nothing is on a disk."""
    with contextlib.ExitStack() as stack:
        table = stack.enter_context(new_table())
        applied = {name: os.memfd_create(f"tritongate-{name}") for name in FILE_OF}
        for memory in applied.values():
            stack.callback(os.close, memory)
        lines = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(count)]
        for end in itertools.chain(*lines):
            stack.enter_context(end)
        asks = [ask.fileno() for ask, _ in lines]
        yield [
            Place(number=number, count=count, table=table, applied=applied, asks=asks, asked=asked.fileno())
            for number, (_, asked) in enumerate(lines)
        ]


async def _run(
    settings: Settings,
    workers: Sequence["_Worker"],
    on_ready: Callable[[str], None] | None,
    on_stop: Callable[[], None] | None,
    may_leave: HandOver | None,
) -> int:
    url = base_url(workers[0].listeners.http[0], tls=settings.tls_cert is not None)
    if workers[0].certificate is not None:  # all have the same
        workers[0].certificate.follow()
    with caught_signals() as signals:
        keeping = [asyncio.create_task(worker.keep()) for worker in workers]
        announcing = asyncio.create_task(_announce(workers, url, on_ready))
        beginning = asyncio.create_task(_begin(workers))
        ended: asyncio.Future[Any] = asyncio.gather(*keeping)
        leave = None if may_leave is None else partial(_leave, workers, may_leave)
        first: asyncio.Future[Any] = asyncio.create_task(until_stopped(signals, leave))
        await asyncio.wait([first, ended], return_when=asyncio.FIRST_COMPLETED)
        if first.done() and on_stop is not None:
            on_stop()
        handed_over = first.done() and first.result()
        first.cancel()
        announcing.cancel()
        beginning.cancel()
        for worker in workers:
            worker.end(signal.SIGUSR2 if handed_over else signal.SIGUSR1)
        second: asyncio.Future[Any] = asyncio.create_task(second_end(signals))
        await asyncio.wait(
            [second, ended], timeout=settings.drain_s + _STUCK_S, return_when=asyncio.FIRST_COMPLETED
        )
        status = 128 + second.result() if second.done() else 0
        if status:
            for worker in workers:
                worker.end()
            await asyncio.wait([ended], timeout=_STUCK_S)
        second.cancel()
        for worker in workers:
            worker.kill()
        await ended
        return status


async def _leave(workers: Sequence["_Worker"], may_leave: HandOver) -> bool:
    """Let another process take over; while it starts, the sockets are its own, too."""
    for worker in workers:
        worker.shares = True
    try:
        return await may_leave()
    finally:
        for worker in workers:
            worker.shares = worker.listeners.shared


async def _begin(workers: Sequence["_Worker"]) -> None:
    """Tell the workers when none that is still starting may get a connection: the gateway is ready then."""
    for worker in workers:
        await worker.begun.wait()
    mark_begun(workers[0].place)


async def _announce(workers: Sequence["_Worker"], url: str, on_ready: Callable[[str], None] | None) -> None:
    for worker in workers:
        await worker.ready.wait()
    if on_ready is not None:
        on_ready(url)


class _Worker:
    """Keeps one process running.

    Args:
        settings: the gateway's.
        listeners: the worker's own; closed here when no further process will need them.
        place: its number among the workers.
        certificate: for TLS, followed by this process; None: there is no TLS.
        succeeds: whether the workers of another process serve until this one is ready.
    """

    def __init__(
        self,
        settings: Settings,
        listeners: Listeners,
        place: Place,
        *,
        certificate: Certificate | None = None,
        succeeds: bool = False,
    ) -> None:
        self.ready = asyncio.Event()
        """Set once all its models have been ready."""
        self.begun = asyncio.Event()
        """Set once it was ready, or gets no connections: its process ended again and again, or another
        gateway's serves in its place until it is ready."""
        if succeeds:
            self.begun.set()
        self.listeners = listeners
        self.shares = listeners.shared
        """Whether other processes accept connections from its sockets."""
        self._settings = settings
        self.certificate = certificate
        self.place = place
        self._succeeds = succeeds
        self._process: asyncio.subprocess.Process | None = None
        self._ending = asyncio.Event()

    async def keep(self) -> None:
        """Run the process, and replace it when it ends, until `end`."""
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        loop = asyncio.get_running_loop()
        while not self._ending.is_set():
            began = loop.time()
            status = await self._run()
            if self._ending.is_set():
                break
            if loop.time() - began > _STEADY_S:
                backoff.reset()
            pause_s = backoff.next()
            if pause_s > _FIRST_PAUSE_S:
                self._turn_away()
            _log.error(
                "a worker ended; it is replaced",
                extra={"worker": self.place.number, "status": status, "pause_s": pause_s},
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._ending.wait()

    def _turn_away(self) -> None:
        """Stop listening until the next process does: nobody should wait for one that may not come."""
        self.begun.set()
        if self.shares:
            return
        # One that does not listen is left alone: what it accepts later would be shut down from the beginning.
        for listener in self.listeners.http:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listener.shutdown(socket.SHUT_RDWR)

    def end(self, number: signal.Signals = signal.SIGUSR1) -> None:
        """Pass a signal on, and replace the process no more: the first makes it drain, the second end."""
        self._ending.set()
        self.listeners.close()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process if it has not ended: it is stuck. After `end`."""
        if self._process is not None and self._process.returncode is None:
            _log.error("a worker did not end; it is killed", extra={"worker": self.place.number})
            self._process.kill()

    async def _run(self) -> int:
        """Run one process until it ends; return its status, which is negative if a signal killed it."""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *PROGRAM,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(
                    *(listener.fileno() for listener in self.listeners.http),
                    *(self.place.table, *self.place.applied.values(), *self.place.asks, self.place.asked),
                ),
                start_new_session=True,  # a terminal's Ctrl-C would end it with a traceback while it imports
            )
        except OSError:  # for example, no memory for another process
            _log.exception("a worker could not be started")
            return -1
        self._process = process
        if self._ending.is_set():  # `end` was called while the process started
            process.send_signal(signal.SIGUSR1)
        assert process.stdin is not None  # noqa: S101 - pipes were asked for
        assert process.stdout is not None  # noqa: S101
        succeeds = self._succeeds and not self.ready.is_set()
        last = None if self.certificate is None else self.certificate.newest
        order = encode_order(self._settings, self.listeners, self.place, certificate=last, succeeds=succeeds)
        process.stdin.write(order)
        watching = asyncio.create_task(self._watch(process))
        if await process.stdout.readline():
            self.ready.set()
            self.begun.set()
        status = await process.wait()
        watching.cancel()
        process.stdin.close()
        mark_ended(self.place)
        return status

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill the process if it hangs: its clients would wait for ever."""
        misses, most = 0, _MISSES_AT_START
        while misses < most:
            await asyncio.sleep(_ASK_EVERY_S)
            if await answers(self.place):
                misses, most = 0, _MISSES
            else:
                misses += 1
        _log.error("a worker hangs; it is killed", extra={"worker": self.place.number})
        process.kill()


def main() -> int:
    """Carry out the order on standard input; return the exit status of `gateway.process.server.run`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    # Before a socket listens again: where this fails, nobody should wait for it.
    from gateway.process.server import run as run_alone  # noqa: PLC0415

    order = decode_order(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, name="parent", daemon=True).start()
    listeners = Listeners(
        http=tuple(socket.socket(fileno=descriptor) for descriptor in order.http), grpc=order.grpc
    )
    for listener in listeners.http:
        listener.listen(BACKLOG)  # again, if the end of the worker before has shut it down
    return run_alone(
        Settings(**order.settings),
        listeners=listeners,
        on_ready=lambda _url: print("ready", flush=True),  # noqa: T201 - read by the parent
        place=order.place,
        succeeds=order.succeeds,
        hand_over=_handed_over,
        last=order.certificate,
    )


async def _handed_over() -> bool:
    """The parent sends SIGUSR2 when another process has the sockets."""
    return True


def _end_with_input() -> None:
    # Not by `sys.stdin`, whose lock an interpreter that ends needs: it aborts if a thread is still reading.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGUSR1)


if __name__ == "__main__":
    sys.exit(main())
