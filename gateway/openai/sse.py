"""Server-sent events: framing, and the response that carries them.

Data arrives here encoded. Errors after the first byte are a data chunk with the error object; every stream,
failed or not, ends with `[DONE]`.
"""

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from gateway.errors import GatewayError, render

DONE = b"data: [DONE]\n\n"


def frame(documents: Iterable[bytes]) -> bytes:
    """Write JSON documents as events, for one write to the client."""
    return b"".join([b"data: %b\n\n" % document for document in documents])


def error_event(error: GatewayError) -> bytes:
    """Write the error that ends a stream."""
    return frame([msgspec.json.encode(render(error))])


class EventStream(EventSourceResponse):
    """A stream of framed events with comment pings, ended when its client goes away.

    Args:
        events: bytes made by `frame`.
        on_gone: called once when the client hung up, or left a piece unread for `send_timeout_s`.
        ping_interval_s: seconds between comments that keep the connection open.
        send_timeout_s: seconds that one write may take.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        on_gone: Callable[[], None],
        ping_interval_s: float,
        send_timeout_s: float,
    ) -> None:
        async def gone(_message: Any) -> None:
            on_gone()

        super().__init__(
            events,
            ping=ping_interval_s,
            ping_message_factory=_ping,
            sep="\n",
            send_timeout=send_timeout_s,
            client_close_handler_callable=gone,
        )
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a client that does not read is gone, not a fault of ours."""
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            self._on_gone()


def _ping() -> ServerSentEvent:
    return ServerSentEvent(comment="ping", sep="\n")
