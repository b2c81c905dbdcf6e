"""The three ports of a server: checked before it starts, and chosen where the request is 0."""

import contextlib
import socket
from dataclasses import dataclass

from triton_models.embedded.errors import PortInUseError

HOST = "127.0.0.1"
"""The only address that is ever bound: in explicit mode, anyone who can reach the port can run code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Port numbers on `HOST`; in a request, 0 means any free port."""

    http: int = 0
    grpc: int = 0
    metrics: int = 0

    @property
    def any_free(self) -> bool:
        """Whether at least one port is to be chosen."""
        return 0 in (self.http, self.grpc, self.metrics)


def choose(asked: Ports) -> Ports:
    """Return `asked` with each 0 replaced by a free port.

    The ports are free when this returns; another process may still take one before the server does.

    Raises:
        PortInUseError: a port requested by number is in use, may not be bound, or was requested twice.
    """
    chosen = {}
    with contextlib.ExitStack() as held:  # all open at the same time, so that no two are equal
        for name in ("http", "grpc", "metrics"):
            listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            # A port whose last connections are in TIME_WAIT is free; one with a listener is not.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = getattr(asked, name)
            try:
                listener.bind((HOST, port))
                listener.listen()
            except OSError as error:
                raise PortInUseError(
                    f"Triton's {name} port {port} is not available on {HOST}: {error.strerror}"
                ) from error
            chosen[name] = listener.getsockname()[1]
    return Ports(**chosen)
