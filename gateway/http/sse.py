"""Server-sent events: framing, and the response that carries them. Their data comes encoded."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.types import Message, Receive, Scope, Send

PING = ServerSentEvent(comment="ping", sep="\n")
"""What keeps a stream open, as a comment, which no client takes for an event."""

_LOOKS_PER_TIMEOUT = 8
"""A write that takes too long is noticed at most this fraction of the limit late."""


def frame(documents: Sequence[bytes]) -> bytes:
    """Write JSON documents as events, for one write to the client."""
    if len(documents) == 1:  # the common case
        return b"data: %b\n\n" % documents[0]
    return b"".join([b"data: %b\n\n" % document for document in documents])


def frame_named(events: Iterable[tuple[str, bytes]]) -> bytes:
    """Write JSON documents as named events, for one write to the client."""
    return b"".join([b"event: %b\ndata: %b\n\n" % (name.encode(), document) for name, document in events])


def let_drains_finish_streams() -> None:
    """Keep sse-starlette from cutting streams at a shutdown: `gateway.limits.admission` lets them finish."""
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


class EventStream(EventSourceResponse):
    """A stream of framed events, ended when its client goes away.

    Pings and hang-ups are sse-starlette's work. Its write loop is replaced: there, each chunk has a cancel
    scope with a timer of its own; here, one scope and one slow timer watch all of a stream's writes.

    Args:
        events: bytes made by `frame`; they end soon after `on_gone` was called.
        on_gone: called when the client hung up, or did not read for `send_timeout_s`.
        ping_interval_s: seconds between pings, which keep the connection open.
        send_timeout_s: seconds that one write may take.
        send_body: the server's own channel. Middleware that only looks at an answer's head is passed by
            with it, once for each chunk. None: everything goes the same way.
        ping: what a ping is.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        on_gone: Callable[[], None],
        ping_interval_s: float,
        send_timeout_s: float,
        send_body: Send | None = None,
        ping: ServerSentEvent = PING,
    ) -> None:
        super().__init__(
            events,
            ping=ping_interval_s,
            ping_message_factory=lambda: ping,
            send_timeout=send_timeout_s,
            client_close_handler_callable=self._hung_up,
        )
        del self.headers["connection"]  # which only the server knows
        self._events = events
        self._on_gone = on_gone
        self._send_timeout_s = send_timeout_s
        self._send_body = send_body
        self._complete = False
        self._send: Send
        self._left: asyncio.Future[Message]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a client that does not read counts as gone, not as an error of ours."""
        self._send = send
        self._left = asyncio.get_running_loop().create_future()
        watching = asyncio.create_task(_wait_until_left(receive, self._left))
        try:
            await super().__call__(scope, self._hear, self._say)
        except SendTimeoutError:
            self._on_gone()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            complete = self._complete
            # A cancelled task of anyio's is part of a cycle, and refers to this object. Only this object may
            # then wait for the garbage collector: neither the request nor its answer.
            vars(self).clear()
        if complete:  # last of all, so that whoever reads the end finds the request's record closed
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _hear(self) -> Message:
        return await self._left

    async def _hung_up(self, _message: Message) -> None:
        self._on_gone()
        # The events now end by themselves, and this task with them. If it ended first, sse-starlette would
        # cancel them, again and again, in the middle of releasing what they hold.
        await asyncio.Event().wait()

    async def _say(self, message: Message) -> None:
        await self._send(message)

    async def _stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        write, clock = self._send_body or self._send, asyncio.get_running_loop().time
        try:
            async with aclosing(self._events) as events, asyncio.timeout(None) as limit:
                watch = _Stopwatch(limit, self._send_timeout_s)
                try:
                    async for data in events:
                        watch.since = clock()
                        await write({"type": "http.response.body", "body": data, "more_body": True})
                        watch.since = None
                    self.active, self._complete = False, True
                finally:
                    watch.stop()
        except TimeoutError:
            raise SendTimeoutError from None


async def _wait_until_left(receive: Receive, left: asyncio.Future[Message]) -> None:
    """Let `left` have the message that the client has hung up."""
    while (message := await receive())["type"] != "http.disconnect":
        pass
    if not left.done():  # else the stream has ended in the same turn
        left.set_result(message)


class _Stopwatch:
    """Lets `limit` expire when a write takes too long: `since` is when it began, None between two."""

    def __init__(self, limit: asyncio.Timeout, timeout_s: float) -> None:
        self.since: float | None = None
        self._limit = limit
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._look()

    def _look(self) -> None:
        now = self._loop.time()
        if self.since is not None and now - self.since >= self._timeout_s:
            self._limit.reschedule(now)
            return
        self._timer = self._loop.call_later(self._timeout_s / _LOOKS_PER_TIMEOUT, self._look)

    def stop(self) -> None:
        """Watch no more."""
        self._timer.cancel()
