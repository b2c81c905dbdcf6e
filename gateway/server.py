"""One gateway process: its sockets, uvicorn, signals and the drain.

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
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import uvicorn
import uvloop
from fastapi import FastAPI

from gateway.app import create_app
from gateway.core.upstream import Upstream
from gateway.errors import ListenError
from gateway.http.protocol import BoundedHttpProtocol
from gateway.http.record import Gateway
from gateway.http.tls import Certificate
from gateway.kserve.grpc import GrpcServer
from gateway.limits.admission import Drain
from gateway.settings import Settings
from gateway.telemetry.logs import configure_logging
from gateway.telemetry.metrics import Place

BACKLOG = 2048
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
_OTHER_DESCRIPTORS = 512
"""Of files, of the Tritons, and of gRPC's connections."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """What one process of a gateway listens on."""

    http: tuple[socket.socket, ...]
    """The first is the gateway's own port; all serve the same, but perhaps the last."""
    with_metrics: bool = False
    """Whether the last one is for metrics alone."""
    grpc: str | None = None
    """Address, host:port, at which gRPC opens a socket of its own; None: no gRPC."""
    reserved: socket.socket | None = None
    """Keeps the address of gRPC for this gateway: bound, never listening. Only the first process has it."""

    def close(self) -> None:
        """Close the sockets."""
        for each in self.http:
            each.close()
        if self.reserved is not None:
            self.reserved.close()


def bind_gateway(
    host: str,
    ports: Sequence[int],
    *,
    grpc_port: int | None = None,
    metrics_address: str | None = None,
    count: int = 1,
) -> list[Listeners]:
    """Bind all addresses of a gateway of `count` processes, without listening yet.

    The kernel distributes connections among the processes that listen.

    Args:
        host: address to listen on.
        ports: for HTTP; 0 takes a free one.
        grpc_port: for gRPC; None: no gRPC.
        metrics_address: host:port for metrics alone; None: they have none of their own.
        count: number of processes.

    Raises:
        ListenError: as for `bind`, of any of them.
    """
    with contextlib.ExitStack() as bound:

        def bind_all(port: int, count: int, *, shared: bool, host: str = host) -> list[socket.socket]:
            # A shared address would be shared with another program, too: there must be none.
            with bind(host, port) as free:
                port = free.getsockname()[1]
            return [bound.enter_context(bind(host, port, shared=shared)) for _ in range(count)]

        sockets = [bind_all(port, count, shared=count > 1) for port in ports]
        metrics: list[list[socket.socket]] = []
        if metrics_address is not None:
            metrics_host, _, metrics_port = metrics_address.rpartition(":")
            metrics = [bind_all(int(metrics_port), count, shared=count > 1, host=metrics_host)]
        reserved = address = None
        if grpc_port is not None:
            # gRPC takes no socket, so the address is shared with those that it opens.
            (reserved,) = bind_all(grpc_port, 1, shared=True)
            name, grpc_port = reserved.getsockname()[:2]
            address = f"[{name}]:{grpc_port}" if ":" in name else f"{name}:{grpc_port}"
        bound.pop_all()
    return [
        Listeners(
            http=http,
            with_metrics=bool(metrics),
            grpc=address,
            reserved=reserved if number == 0 else None,
        )
        for number, http in enumerate(zip(*sockets, *metrics, strict=True))
    ]


def listen_gateway(listeners: Sequence[Listeners]) -> None:
    """Listen on what `bind_gateway` returned; nobody listens for gRPC yet, but nobody else does either.

    Raises:
        ListenError: another program listens on one of the addresses by now. Until someone does, the kernel
            lets other gateways of this user bind a shared address too, and would share the connections out
            among all of them.
    """
    shared = [] if len(listeners) == 1 else list(listeners[0].http)
    for each in (*shared, *filter(None, [listeners[0].reserved])):
        bind(*each.getsockname()[:2]).close()
    for each in (each for own in listeners for each in own.http):
        try:
            each.listen(BACKLOG)
        except OSError as error:  # taken between `bind` and now
            port = each.getsockname()[1]
            raise ListenError(f"cannot listen on port {port}: {error.strerror}") from None


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Bind an address without listening yet; port 0 takes a free port.

    Args:
        host: an address or a name; an IPv6 address may be in brackets, as in a URL.
        port: the port.
        shared: with other sockets that share it.

    Raises:
        ListenError: the address is in use, not permitted, or does not exist.
    """
    host = host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenError(f"cannot listen on {host}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ListenError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def claim(listener: socket.socket) -> socket.socket:
    """Hold the address of a bound socket against other starts on this machine, until the result is closed.

    As long as nobody listens, the kernel lets others bind the address, too.

    Raises:
        ListenError: another process holds it.
    """
    host, port = listener.getsockname()[:2]
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0tritongate {host} {port}")  # no file: the kernel forgets it with the process
    except OSError:
        held.close()
        raise ListenError(
            f"cannot listen on {host} port {port}: another tritongate is starting there, or runs"
        ) from None
    return held


def base_url(listener: socket.socket, *, tls: bool = False) -> str:
    """Return the URL at which clients on this machine reach `listener`."""
    scheme = "https" if tls else "http"
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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
    on_stop: Callable[[], None] | None = None,
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
        on_stop: called when a signal begins the drain.
        place: among the processes of this gateway; None: it is the only one.

    Raises:
        ListenError: an address cannot be listened on.
    """
    configure_logging(settings.log_level, settings.log_format)
    if listeners is None:
        (listeners,) = bind_gateway(
            settings.host,
            settings.http_ports(),
            grpc_port=settings.kserve_grpc_port,
            metrics_address=settings.metrics_address,
        )
    with contextlib.closing(listeners):
        if place is None:  # else whoever made the place has seen to it
            listen_gateway([listeners])
        app = create_app(settings, upstream, place)
        _allow_descriptors(settings.max_connections + _OTHER_DESCRIPTORS)
        _shorten_pauses()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(app, settings, listeners, on_ready, on_stop))


def _allow_descriptors(count: int) -> None:
    """Let this process open so many descriptors, as far as it may: often it may far more than it does."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < count:
        _log.warning("the limit on open files is too low for max_connections", extra={"ulimit": most})
        count = most
    if resource.RLIM_INFINITY != allowed < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, most))


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


def make_server(app: FastAPI, cert: str | None = None, key: str | None = None) -> Server:
    """Make the HTTP server for `app`; with TLS if there are the files of a certificate and its key."""
    return Server(
        uvicorn.Config(
            app,
            http=partial(BoundedHttpProtocol, bound=app.state.connections),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=int(_LAST_WORDS_S),
            ssl_certfile=cert,
            ssl_keyfile=key,
        )
    )


async def _serve(
    app: FastAPI,
    settings: Settings,
    listeners: Listeners,
    on_ready: Callable[[str], None] | None,
    on_stop: Callable[[], None] | None,
) -> int:
    cert, key = settings.tls_cert, settings.tls_key
    url = base_url(listeners.http[0], tls=cert is not None)  # uvicorn closes the sockets in the end
    server = make_server(app, cert, key)
    certificate = Certificate(cert, key) if cert and key else None
    grpc_server = GrpcServer(app.state.door, app.state.records, certificate)
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
        if certificate is not None and server.config.ssl is not None:
            certificate.follow(server.config.ssl)
        announcing = asyncio.create_task(_announce(app.state.gateway, url, on_ready))
        stop = asyncio.create_task(signals.get())
        await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
        announcing.cancel()
        if serving.done():
            stop.cancel()
            await serving
            return 1
        if on_stop is not None:
            on_stop()
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
