"""The sockets that a gateway listens on."""

import socket
from collections.abc import Sequence

BACKLOG = 2048


class ListenError(Exception):
    """The address cannot be listened on; the message says why."""


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
    """Listen on what `bind_all` returned for several.

    Raises:
        ListenError: another program listens there by now. Until someone does, the kernel lets other gateways
            of this user bind the address too, and would share the connections out among all of them.
    """
    bind(*listeners[0].getsockname()[:2]).close()
    for listener in listeners:
        listener.listen(BACKLOG)


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
