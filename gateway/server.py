"""Runs the gateway in this process: listen, serve, drain, end.

uvicorn speaks HTTP; signals and draining are ours, because on SIGTERM uvicorn refuses connections at once, so
clients would not get a 503. Here the listener stays open until the last running request has ended.

    first SIGTERM or SIGINT   503 for readiness and new requests; running ones have `drain_s` to finish, the
                              rest then ends with an error; exit status 0
    second one                end at once; exit status 128 + signal
"""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn
import uvloop
from fastapi import FastAPI

from gateway.app import create_app
from gateway.drain import Drain
from gateway.fleet import Place
from gateway.kserve.grpc import GrpcServer
from gateway.listeners import Listeners, base_url, bind_gateway, listen_gateway
from gateway.logs import configure_logging
from gateway.protocol import BoundedHttpProtocol
from gateway.resources import Gateway
from gateway.settings import Settings
from gateway.upstream import Upstream

_LAST_WORDS_S = 1.0
"""How long ended requests get to write their error to the client."""

_SWITCH_S = 0.0005
"""Seconds after which a thread that computes lets another have the interpreter; Python's own are 5 ms."""
_FULL_COLLECTION_EVERY = 100
"""Collections of the middle generation; Python's default is 10."""
_READY_POLL_S = 0.02

_log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers; `up` is set once it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


def run(
    settings: Settings,
    *,
    upstream: Upstream | None = None,
    listeners: Listeners | None = None,
    on_ready: Callable[[str], None] | None = None,
    place: Place | None = None,
) -> int:
    """Serve until a signal ends it, and return the process's exit status.

    Must be called on the main thread: signals are handled here for as long as it runs.

    Args:
        settings: of the gateway.
        upstream: serves the models; None: the Tritons of the settings.
        listeners: from `bind_gateway`, so that a taken port is noticed before anything else is started;
            closed at the end. None: those for the settings' host and ports.
        on_ready: called with the base URL once every model is ready.
        place: among the processes of this gateway; None: it is the only one.

    Raises:
        ListenError: an address cannot be listened on.
    """
    configure_logging(settings.log_level, settings.log_format)
    if listeners is None:
        (listeners,) = bind_gateway(settings.host, settings.http_ports(), grpc_port=settings.kserve_grpc_port)
    with contextlib.closing(listeners):
        if place is None:  # else whoever made the place has seen to it
            listen_gateway([listeners])
        app = create_app(settings, upstream, place)
        _shorten_pauses()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(app, settings, listeners, on_ready))


def _shorten_pauses() -> None:
    """Shorten the pauses that would stall every stream at once.

    A full garbage collection over all modules, which never go away, takes a tenth of a second, and as long
    again with some hundred streams, of 400 objects each. It is rare, since requests are freed without it. And
    the thread that delivers gRPC's events should not wait longer than necessary for the event loop's thread.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_COLLECTION_EVERY)
    sys.setswitchinterval(_SWITCH_S)


def make_server(app: FastAPI) -> Server:
    """Make the HTTP server for `app`."""
    return Server(
        uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=int(_LAST_WORDS_S),
        )
    )


async def _serve(
    app: FastAPI, settings: Settings, listeners: Listeners, on_ready: Callable[[str], None] | None
) -> int:
    url = base_url(listeners.http[0])  # uvicorn closes the sockets in the end
    server, grpc_server = make_server(app), GrpcServer(app.state.door, app.state.records)
    with caught_signals() as signals:
        if listeners.grpc is not None:
            await grpc_server.start(listeners.grpc)
        serving = asyncio.create_task(server.serve(sockets=list(listeners.http)))
        up = asyncio.create_task(server.up.wait())
        await asyncio.wait({serving, up}, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            await serving
            return 1
        _log.info("listening", extra={"url": url})
        announcing = asyncio.create_task(_announce(app.state.gateway, url, on_ready))
        stop = asyncio.create_task(signals.get())
        await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
        announcing.cancel()
        if serving.done():
            stop.cancel()
            await serving
            return 1
        draining = asyncio.create_task(_drain(app.state.gateway.drain, settings.drain_s))
        second = asyncio.create_task(signals.get())
        await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
        if second.done():
            draining.cancel()
            server.force_exit = True
            app.state.gateway.drain.end()
        second.cancel()
        server.should_exit = True
        await grpc_server.stop(0 if server.force_exit else _LAST_WORDS_S)
        await serving
        return 128 + second.result() if second.done() and not second.cancelled() else 0


async def _announce(gateway: Gateway, url: str, on_ready: Callable[[str], None] | None) -> None:
    if on_ready is None:
        return
    while not gateway.ready():  # noqa: ASYNC110 - the seam is asked for readiness, it does not announce it
        await asyncio.sleep(_READY_POLL_S)
    on_ready(url)


async def _drain(drain: Drain, drain_s: float) -> None:
    """Let running requests finish; end those that do not within `drain_s`."""
    _log.info("draining", extra={"drain_s": drain_s})
    drain.begin()
    if not await drain.idle(drain_s):
        drain.end()
        await drain.idle(_LAST_WORDS_S)


@contextlib.contextmanager
def caught_signals() -> Iterator["asyncio.Queue[int]"]:
    """Collect SIGTERM and SIGINT in a queue."""
    loop = asyncio.get_running_loop()
    caught: asyncio.Queue[int] = asyncio.Queue()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        loop.add_signal_handler(number, caught.put_nowait, number)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
