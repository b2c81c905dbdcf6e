"""The network between the gateway of `bench.chaos` and its Tritons: relays that can be cut or held."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

_PIECE = 2**16
_CLOSE_S = 5.0


class Relay:
    """Passes bytes on to one Triton, both ways. Made by `network`, on whose thread it runs.

    Args:
        number: of the Triton.
        tritons: the file with the addresses of all, one a line; read when somebody connects.
        loop: of that thread.
    """

    def __init__(self, number: int, tritons: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.address = ""
        """Where it listens."""
        self._tritons = tritons
        self._loop = loop
        self._is_cut = False
        self._moving = asyncio.Event()
        self._moving.set()
        self._serving: set[asyncio.Task[None]] = set()
        self._transports: set[asyncio.WriteTransport] = set()
        self._server: asyncio.Server | None = None

    @property
    def upstream(self) -> tuple[str, int]:
        """The Triton's own host and port."""
        host, _, port = self._tritons.read_text(encoding="ascii").splitlines()[self.number].rpartition(":")
        return host, int(port)

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def close(self) -> None:
        """Break every connection, and listen no more."""
        if self._server is not None:
            self._server.close()
        self._moving.set()
        self._abort()
        if self._serving:
            await asyncio.wait(self._serving, timeout=_CLOSE_S)

    def cut(self) -> None:
        """Break every connection, and each new one at once, until `mend`. From any thread, as the others."""

        def cut() -> None:
            self._is_cut = True
            self._abort()

        self._loop.call_soon_threadsafe(cut)

    def hold(self) -> None:
        """Let nothing through until `mend`; nothing is lost, and nobody is told."""
        self._loop.call_soon_threadsafe(self._moving.clear)

    def mend(self) -> None:
        """Be a network again."""

        def mend() -> None:
            self._is_cut = False
            self._moving.set()

        self._loop.call_soon_threadsafe(mend)

    def _abort(self) -> None:
        for each in self._transports:
            each.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a server's callback is one
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        ends = {writer.transport}
        try:
            with contextlib.suppress(OSError):
                upstream_reader, upstream = await asyncio.open_connection(*self.upstream)
                ends.add(upstream.transport)
                if self._is_cut:
                    return
                self._transports |= ends
                await asyncio.gather(
                    self._pass_on(reader, upstream, ends), self._pass_on(upstream_reader, writer, ends)
                )
        finally:
            self._transports -= ends
            for each in ends:
                each.abort()

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ends: set[asyncio.WriteTransport],
    ) -> None:
        try:
            while piece := await reader.read(_PIECE):
                await self._moving.wait()
                writer.write(piece)
                await writer.drain()
            writer.write_eof()
        except OSError:
            for each in ends:
                each.abort()


@contextlib.contextmanager
def network(count: int, tritons: Path) -> Iterator[list[Relay]]:
    """Run a relay to each of `count` Tritons, on a thread of its own.

    Args:
        count: of Tritons.
        tritons: see `Relay`.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="network", daemon=True)
    thread.start()
    relays = [Relay(number, tritons, loop) for number in range(count)]
    try:
        for relay in relays:
            asyncio.run_coroutine_threadsafe(relay.start(), loop).result()
        yield relays
    finally:
        for relay in relays:
            asyncio.run_coroutine_threadsafe(relay.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
