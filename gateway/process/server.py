"""One gateway process: its sockets, uvicorn, signals and the drain.

uvicorn speaks HTTP; signals and draining are ours, because on SIGTERM uvicorn refuses connections at once, so
clients would not get a 503. Here the listener stays open until the last running request has ended.

    first SIGTERM, SIGINT or SIGHUP
                              503 for readiness and new requests; running ones have `drain_s` to finish, the
                              rest then ends with an error; exit status 0
    second SIGTERM or SIGINT  end at once; exit status 128 + signal
    SIGUSR1                   as SIGTERM, from the parent of several processes (see `workers.py`)
    SIGUSR2                   another process takes over (see `handover.py`): no more connections; those there
                              are go on for `drain_s`, each until its next answer; exit status 0
"""

import asyncio
import contextlib
import gc
import logging
import resource
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

import uvicorn
import uvloop
from fastapi import FastAPI

from gateway.app import create_app
from gateway.core.upstream import Upstream
from gateway.http.protocol import BoundedHttpProtocol
from gateway.http.record import Gateway
from gateway.http.tls import Certificate, Pair, file_of
from gateway.kserve.grpc import GrpcServer
from gateway.limits.admission import Drain
from gateway.process.handover import HandOver, caught_signals, second_end, until_stopped
from gateway.process.listeners import BACKLOG, Listeners, base_url, listen_gateway
from gateway.settings import Settings
from gateway.telemetry.logs import configure_logging
from gateway.telemetry.metrics import Place

_IDLE_WHEN_LEAVING_S = 8
"""Until an idle connection is closed once another process has taken over, which must not take long: httpx,
which SDKs use, keeps one for 5 s."""

_LAST_WORDS_S = 1.0
"""How long ended requests get to write their error to the client."""

_SWITCH_S = 0.0005
"""Seconds after which a thread that computes lets another have the interpreter; Python's own are 5 ms."""
_YOUNG_OBJECTS = 10_000
"""New objects between two collections of the youngest generation; with Python's own 700, collecting takes a
fifteenth of the time of a gateway that streams."""
_FULL_COLLECTION_EVERY = 100
"""Collections of the middle generation; Python's default is 10."""
_READY_POLL_S = 0.02
_FIRST_LOOK_S = 3.0
"""How long a worker waits for its models before it accepts connections. Those to a process that died wait for
the one that replaces it, which would answer them that it has not reached any Triton yet."""
_GONE_POLL_S = 0.05
_SETTLE_S = 1.0
"""How long connections that were just accepted may take to count: a TLS handshake comes first."""
_OTHER_DESCRIPTORS = 512
"""Of files, of the Tritons, of gRPC's connections, and of those that only probes get."""

_log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers, and with sockets that come and go while it runs.

    `up` is set once the application has started.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and listen on `sockets`."""
        await super().startup(sockets)
        self.up.set()

    async def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections from these, too, which are closed with the others."""

        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        loop = asyncio.get_running_loop()
        for each in sockets:
            self.servers.append(
                await loop.create_server(protocol, sock=each, ssl=self.config.ssl, backlog=BACKLOG)
            )

    def stop_listening(self) -> None:
        """Accept no more connections; those there are go on."""
        for each in self.servers:
            each.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close everything, and end the application, too."""
        await super().shutdown(sockets)
        if self.force_exit:
            # Left out by uvicorn: the end of the event loop would cancel the application's task, which then
            # cleans up as here, but is logged as a failure.
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


def run(
    settings: Settings,
    *,
    listeners: Listeners,
    upstream: Upstream | None = None,
    on_ready: Callable[[str], None] | None = None,
    on_stop: Callable[[], None] | None = None,
    place: Place | None = None,
    succeeds: bool = False,
    hand_over: HandOver | None = None,
    last: Pair | None = None,
) -> int:
    """Serve until a signal ends it, and return the process's exit status.

    Must be called on the main thread: signals are handled here for as long as it runs.

    Args:
        settings: of the gateway.
        listeners: from `bind_gateway`, so that a taken port is noticed before anything else is started;
            closed at the end.
        upstream: serves the models; None: the Tritons of the settings.
        on_ready: called with the base URL once every model is ready.
        on_stop: called when a signal begins the drain.
        place: among the processes of this gateway; None: it is the only one.
        succeeds: whether another process serves until this one accepts connections, which it only does once
            every model is ready.
        hand_over: called at SIGUSR2; None: nobody can take over.
        last: what TLS goes on with if its files cannot be used; None: this is the gateway's first process.

    Raises:
        ListenError: an address cannot be listened on.
    """
    number = None if place is None else place.number
    configure_logging(settings.log_level, settings.log_format, worker=number)
    with contextlib.closing(listeners):
        if place is None:  # else whoever made the place has seen to it
            listen_gateway([listeners])
        connections = _connections_allowed(settings.max_connections)
        settings = settings.model_copy(update={"max_connections": connections})
        app = create_app(settings, upstream, place)
        _shorten_pauses()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            first_look_s = None if succeeds else 0.0 if place is None else _FIRST_LOOK_S
            opens = partial(
                _open,
                gateway=app.state.gateway,
                listeners=listeners,
                first_look_s=first_look_s,
                on_ready=on_ready,
            )
            certificate = None
            if settings.tls_cert and settings.tls_key:
                certificate = Certificate(settings.tls_cert, settings.tls_key, last)
                not_after = app.state.gateway.metrics.certificate_not_after.labels(settings.tls_cert)
                not_after.set_function(lambda: certificate.not_after)
            return runner.run(_serve(app, certificate, opens, on_stop, hand_over))


def _connections_allowed(connections: int) -> int:
    """Let this process open descriptors for so many, as far as it may: often it may far more than it does.

    Returns:
        How many connections that is enough for: beyond its descriptors, each new one would be reset.
    """
    count = connections + _OTHER_DESCRIPTORS
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < count:
        count, enough = most, max(most - _OTHER_DESCRIPTORS, most // 4)
        if enough < connections:
            connections = enough
            extra = {"ulimit": most, "max_connections": connections}
            _log.warning("the limit on open files is too low: there may be fewer connections", extra=extra)
    if resource.RLIM_INFINITY != allowed < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, most))
    return connections


def _shorten_pauses() -> None:
    """Shorten the pauses that would stall every stream at once.

    A full garbage collection over all modules, which never go away, takes a tenth of a second, and as long
    again with some hundred streams, of 400 objects each. It is rare, since requests are freed without it. And
    the thread that delivers gRPC's events should not wait longer than necessary for the event loop's thread.
    """
    gc.collect()
    gc.freeze()
    _, middle, _ = gc.get_threshold()
    gc.set_threshold(_YOUNG_OBJECTS, middle, _FULL_COLLECTION_EVERY)
    sys.setswitchinterval(_SWITCH_S)


def make_server(app: FastAPI, certificate: Certificate | None = None) -> Server:
    """Make the HTTP server for `app`; with TLS if there is a certificate."""
    protocol = partial(
        BoundedHttpProtocol,
        bound=app.state.connections,
        records=app.state.records,
        send_timeout_s=app.state.gateway.settings.send_timeout_s,
    )
    with contextlib.nullcontext() if certificate is None else file_of(certificate.newest) as path:
        config = uvicorn.Config(
            app,
            http=protocol,  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            access_log=False,
            proxy_headers=False,  # whoever is on this machine could write any address into the log
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=int(_LAST_WORDS_S),
            timeout_keep_alive=app.state.gateway.settings.idle_connection_s,
            ssl_certfile=path,
        )
        config.load()  # as long as the file is there
    return Server(config)


async def _serve(
    app: FastAPI,
    certificate: Certificate | None,
    open_: Callable[["Server", GrpcServer], Awaitable[None]],
    on_stop: Callable[[], None] | None,
    hand_over: HandOver | None,
) -> int:
    server, drain_s = make_server(app, certificate), app.state.gateway.settings.drain_s
    grpc_server = GrpcServer(app.state.door, app.state.records, certificate)
    with caught_signals() as signals:
        serving = asyncio.create_task(server.serve(sockets=[]))
        up = asyncio.create_task(server.up.wait())
        await asyncio.wait({serving, up}, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            await serving
            return 1
        if certificate is not None and server.config.ssl is not None:
            certificate.follow(server.config.ssl)
        opening = asyncio.ensure_future(open_(server, grpc_server))
        stop = asyncio.create_task(until_stopped(signals, hand_over))
        await asyncio.wait({serving, stop, opening}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done() and opening.exception() is None:
            await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
        opening.cancel()
        if not stop.done():
            stop.cancel()
            server.should_exit = True
            await serving
            if opening.done():
                opening.result()
            return 1
        if on_stop is not None:
            on_stop()
        leaving = _leave(app, server, grpc_server, drain_s) if stop.result() else None
        drain = app.state.gateway.drain
        draining = asyncio.create_task(leaving or _drain(drain, drain_s))
        second = asyncio.create_task(second_end(signals))
        await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
        if second.done():
            draining.cancel()
            server.force_exit = True
            drain.end()
        second.cancel()
        server.should_exit = True
        await grpc_server.stop(0 if server.force_exit else _LAST_WORDS_S)
        await serving
        return 128 + second.result() if second.done() and not second.cancelled() else 0


async def _open(
    server: Server,
    grpc_server: GrpcServer,
    *,
    gateway: Gateway,
    listeners: Listeners,
    first_look_s: float | None,
    on_ready: Callable[[str], None] | None,
) -> None:
    """Accept connections once the models are ready, or `first_look_s` have passed; None: not before.

    Raises:
        ListenError: another program has the address of gRPC.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(first_look_s):
            await _ready(gateway)
    url = base_url(listeners.http[0], tls=server.config.is_ssl)  # uvicorn closes the sockets in the end
    await server.listen(listeners.http)
    if listeners.grpc is not None:
        await grpc_server.start(listeners.grpc)
    _log.info("listening", extra={"url": url})
    if on_ready is not None:
        await _ready(gateway)
        on_ready(url)


async def _ready(gateway: Gateway) -> None:
    while not gateway.serves():  # noqa: ASYNC110 - the seam is asked for readiness, it does not announce it
        await asyncio.sleep(_READY_POLL_S)


async def _leave(app: FastAPI, server: Server, grpc_server: GrpcServer, drain_s: float) -> None:
    """Leave new connections to another process, serve those there are to their end, and `_drain`."""
    _log.info("handed over", extra={"drain_s": drain_s})
    deadline = asyncio.get_running_loop().time() + drain_s
    connections, drain = app.state.connections, app.state.gateway.drain
    connections.closing = True
    server.stop_listening()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            await grpc_server.stop(drain_s)
            await asyncio.sleep(_SETTLE_S)
            while connections.open:
                connections.close_idle(_IDLE_WHEN_LEAVING_S)
                await asyncio.sleep(_GONE_POLL_S)
    await _drain(drain, max(0.0, deadline - asyncio.get_running_loop().time()))


async def _drain(drain: Drain, drain_s: float) -> None:
    """Let running requests finish; end those that do not within `drain_s`."""
    _log.info("draining", extra={"drain_s": drain_s})
    drain.begin()
    if not await drain.idle(drain_s):
        drain.end()
        await drain.idle(_LAST_WORDS_S)
