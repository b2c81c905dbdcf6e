"""Server-sent events: framing, and the response that carries them. Their data comes encoded."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_PING = b": ping\n\n"

_HEADERS = {"Cache-Control": "no-store", "Connection": "keep-alive", "X-Accel-Buffering": "no"}
"""No cache may store the stream, and no proxy may buffer it."""

_LOOKS_PER_TIMEOUT = 8
"""A write that takes too long is noticed at most this fraction of the limit late."""


def frame(documents: Iterable[bytes]) -> bytes:
    """Write JSON documents as events, for one write to the client."""
    return b"".join([b"data: %b\n\n" % document for document in documents])


def frame_named(events: Iterable[tuple[str, bytes]]) -> bytes:
    """Write JSON documents as named events, for one write to the client."""
    return b"".join([b"event: %b\ndata: %b\n\n" % (name.encode(), document) for name, document in events])


class EventStream(Response):
    """A stream of framed events with comment pings, ended when its client goes away.

    A chunk costs only one look at the clock: a separate task watches for slow writes, not a timer per chunk.

    Args:
        events: bytes made by `frame`.
        on_gone: called when the client hung up, or did not read for `send_timeout_s`.
        ping_interval_s: seconds between comments that keep the connection open.
        send_timeout_s: seconds that one write may take.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        on_gone: Callable[[], None],
        ping_interval_s: float,
        send_timeout_s: float,
    ) -> None:
        # Not Response's own: that would announce a length.
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._events = events
        self._on_gone = on_gone
        self._ping_interval_s = ping_interval_s
        self._send_timeout_s = send_timeout_s
        self._writing_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a client that does not read counts as gone, not as an error of ours."""
        del scope
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout(None) as limit:
                beside = [
                    asyncio.create_task(self._watch(receive)),
                    asyncio.create_task(self._keep(send, limit)),
                ]
                try:
                    await self._write(send)
                finally:
                    for task in beside:
                        task.cancel()
                    await asyncio.gather(*beside, return_exceptions=True)
        except TimeoutError:
            self._on_gone()
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        async with aclosing(self._events) as events:
            async for data in events:
                self._writing_since = clock()
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._writing_since = None

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._on_gone()

    async def _keep(self, send: Send, limit: asyncio.Timeout) -> None:
        """Ping; let `limit` expire when a write takes too long."""
        clock = asyncio.get_running_loop().time
        next_ping = clock() + self._ping_interval_s
        while True:
            await asyncio.sleep(min(next_ping - clock(), self._send_timeout_s / _LOOKS_PER_TIMEOUT))
            now = clock()
            since = self._writing_since
            if since is not None and now - since >= self._send_timeout_s:
                break
            if now >= next_ping:
                next_ping = now + self._ping_interval_s
                if since is None:  # else what is being written keeps the connection open
                    try:
                        async with asyncio.timeout(self._send_timeout_s):
                            await send({"type": "http.response.body", "body": _PING, "more_body": True})
                    except TimeoutError:
                        break
        limit.reschedule(clock())
