"""The sockets that a gateway listens on."""

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass

BACKLOG = 2048


class ListenError(Exception):
    """The address cannot be listened on; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """What one process of a gateway listens on."""

    http: tuple[socket.socket, ...]
    """The first is the gateway's own port; all serve the same."""
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
    host: str, ports: Sequence[int], *, grpc_port: int | None = None, count: int = 1
) -> list[Listeners]:
    """Bind all addresses of a gateway of `count` processes, without listening yet.

    Args:
        host: address to listen on.
        ports: for HTTP.
        grpc_port: for gRPC; None: no gRPC.
        count: number of processes.

    Raises:
        ListenError: as for `bind`, of any of them.
    """
    with contextlib.ExitStack() as bound:
        sockets = []
        for port in ports:
            sockets.append(bind_all(host, port, count))
            for each in sockets[-1]:
                bound.callback(each.close)
        reserved = address = None
        if grpc_port is not None:
            # gRPC takes no socket, so the address is shared with those that it opens.
            with bind(host, grpc_port) as free:
                grpc_port = free.getsockname()[1]
            reserved = bound.enter_context(_bound(host, grpc_port, shared=True))
            name = reserved.getsockname()[0]
            address = f"[{name}]:{grpc_port}" if ":" in name else f"{name}:{grpc_port}"
        bound.pop_all()
    return [
        Listeners(http=http, grpc=address, reserved=reserved if number == 0 else None)
        for number, http in enumerate(zip(*sockets, strict=True))
    ]


def listen_gateway(listeners: Sequence[Listeners]) -> None:
    """Listen on what `bind_gateway` returned; nobody listens for gRPC yet, but nobody else does either.

    Raises:
        ListenError: another program listens on one of the addresses by now.
    """
    for sockets in zip(*(each.http for each in listeners), strict=True):
        listen_all(sockets)
    if listeners[0].reserved is not None:
        bind(*listeners[0].reserved.getsockname()[:2]).close()


def bind(host: str, port: int) -> socket.socket:
    """Bind an address without listening yet; port 0 takes a free port.

    Raises:
        ListenError: the address is in use, not permitted, or does not exist.
    """
    return _bound(host, port, shared=False)


def bind_all(host: str, port: int, count: int) -> list[socket.socket]:
    """Bind `count` sockets to one address, each as `bind` does.

    The kernel distributes connections among those that listen.

    Raises:
        ListenError: as for `bind`.
    """
    first = bind(host, port)
    if count == 1:
        return [first]
    # SO_REUSEPORT would also share the address with another program, but then `bind` would have failed.
    port = first.getsockname()[1]
    first.close()
    listeners: list[socket.socket] = []
    try:
        while len(listeners) < count:
            listeners.append(_bound(host, port, shared=True))
    except ListenError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def listen_all(listeners: Sequence[socket.socket]) -> None:
    """Listen on what `bind_all` returned.

    Raises:
        ListenError: another program listens there by now. Until someone does, the kernel lets other gateways
            of this user bind the address too, and would share the connections out among all of them.
    """
    if len(listeners) > 1:
        bind(*listeners[0].getsockname()[:2]).close()
    for listener in listeners:
        try:
            listener.listen(BACKLOG)
        except OSError as error:  # taken between `bind` and now
            port = listener.getsockname()[1]
            raise ListenError(f"cannot listen on port {port}: {error.strerror}") from None


def base_url(listener: socket.socket) -> str:
    """Return the URL at which clients on this machine reach `listener`."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    host = host.strip("[]")  # as an IPv6 address is written in a URL
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
