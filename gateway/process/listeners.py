"""The sockets on which a gateway listens: bound before anything else is started, shared by its processes."""

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.errors import ListenError
from gateway.process.handover import Inherited
from gateway.settings import Settings

BACKLOG = 2048


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
    shared: bool = False
    """Whether other processes of this gateway accept connections from the very same sockets."""
    unheld: tuple[socket.socket, ...] = ()
    """Bound, but not yet kept from other programs; only the first process has them."""

    def close(self) -> None:
        """Close the sockets."""
        for each in self.http:
            each.close()
        if self.reserved is not None:
            self.reserved.close()


def bind_gateway(settings: Settings, inherited: Inherited | None = None) -> list[Listeners]:
    """Bind all addresses of a gateway for each of its processes, without listening yet.

    The kernel distributes connections among the processes that listen. Where sockets of an address are
    inherited, none is bound; processes share them if there are fewer.

    Args:
        settings: name the addresses, and how many processes there are.
        inherited: from another process; what is not used of it is closed. None: nothing.

    Raises:
        ListenError: as for `bind`, of any of them.
    """
    inherited = inherited or Inherited()
    count = settings.workers
    unheld: list[socket.socket] = []
    with contextlib.ExitStack() as bound:

        def bind_all(
            port: int, count: int = count, *, shared: bool = count > 1, host: str = settings.host
        ) -> list[socket.socket]:
            if inherited.succeeds and port == 0:
                raise ListenError("a port that was chosen by the kernel (0) cannot be taken over")
            sockets = inherited.take(_resolve(host, port)[-1])
            if sockets:
                return [bound.enter_context(each) for each in sockets]
            # A shared address would be shared with another program, too: there must be none.
            with bind(host, port) as free:
                port = free.getsockname()[1]
            sockets = [bound.enter_context(bind(host, port, shared=shared)) for _ in range(count)]
            unheld.extend(sockets[:shared])
            return sockets

        addresses = [
            bind_all(port) for port in (settings.port, settings.kserve_http_port) if port is not None
        ]
        if settings.metrics_address is not None:
            host, _, port = settings.metrics_address.rpartition(":")
            addresses.append(bind_all(int(port), host=host))
        reserved = grpc = None
        if settings.kserve_grpc_port is not None:
            # gRPC takes no socket, so the address is shared with those that it opens.
            reserved, *_ = bind_all(settings.kserve_grpc_port, 1, shared=True)
            name, grpc_port = reserved.getsockname()[:2]
            grpc = f"[{name}]:{grpc_port}" if ":" in name else f"{name}:{grpc_port}"
        inherited.close_others()
        bound.pop_all()
    return [
        Listeners(
            http=tuple(each for sockets in addresses for each in _part(sockets, number, count)),
            with_metrics=settings.metrics_address is not None,
            grpc=grpc,
            reserved=reserved if number == 0 else None,
            shared=any(len(sockets) < count for sockets in addresses),
            unheld=tuple(unheld) if number == 0 else (),
        )
        for number in range(count)
    ]


def _part(sockets: Sequence[socket.socket], number: int, count: int) -> Sequence[socket.socket]:
    """Return a process's share of an address's sockets: each process has some, and each socket is had."""
    return sockets[number::count] or [sockets[number % len(sockets)]]


def listen_gateway(listeners: Sequence[Listeners]) -> None:
    """Listen on what `bind_gateway` returned; nobody listens for gRPC yet, but nobody else does either.

    Raises:
        ListenError: another program listens on one of the addresses by now. Until someone does, the kernel
            lets other gateways of this user bind a shared address too, and would share the connections out
            among all of them.
    """
    for each in listeners[0].unheld:
        bind(*each.getsockname()[:2]).close()
    for each in (each for own in listeners for each in own.http):
        try:
            each.listen(BACKLOG)
        except OSError as error:  # taken between `bind` and now
            port = each.getsockname()[1]
            raise ListenError(f"cannot listen on port {port}: {error.strerror}", port=port) from None


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Bind an address without listening yet; port 0 takes a free port.

    Args:
        host: an address or a name; an IPv6 address may be in brackets, as in a URL.
        port: the port.
        shared: with other sockets that share it.

    Raises:
        ListenError: the address is in use, not permitted, or does not exist.
    """
    family, address = _resolve(host, port)
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ListenError(f"cannot listen on {host}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ListenError(f"cannot listen on {host} port {port}: {error.strerror}", port=port) from None
    return listener


def _resolve(host: str, port: int) -> tuple[int, Any]:
    """Return the family and the address to bind.

    Raises:
        ListenError: the host does not exist.
    """
    host = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ListenError(f"cannot listen on {host}: {error.strerror}") from None
    return family, address


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
            f"cannot listen on {host} port {port}: another tritongate is starting there, or runs", port=port
        ) from None
    return held


def base_url(listener: socket.socket, *, tls: bool = False) -> str:
    """Return the URL at which clients on this machine reach `listener`."""
    scheme = "https" if tls else "http"
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
