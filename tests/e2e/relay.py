"""A TCP relay that can stand still: nothing comes through it for a while, and nothing is lost."""

import contextlib
import socket
import threading
from collections.abc import Iterator


class Relay:
    """Listens on a port of its own and passes bytes on to `upstream`, both ways."""

    def __init__(self, upstream: str, port: int = 0) -> None:
        host, _, upstream_port = upstream.rpartition(":")
        self._upstream = host, int(upstream_port)
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._moving = threading.Event()
        self._moving.set()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stand still."""
        self._moving.clear()
        try:
            yield
        finally:
            self._moving.set()

    def close(self) -> None:
        self._moving.set()
        # What another thread blocks on is not ended by a close alone.
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._upstream)
                self._sockets += [client, server]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                self._moving.wait()
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)
