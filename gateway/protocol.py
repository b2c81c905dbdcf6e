"""HTTP/1.1 before there is a request: limits on size and time of its head, and answers to malformed ones.

uvicorn's own protocol limits neither and answers in plain text; nothing above it sees such a request.
"""

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.errors import (
    GatewayError,
    HeadersTimeoutError,
    HeadersTooLargeError,
    InvalidRequestError,
    render,
)

HEAD_LIMIT_BYTES = 64 * 2**10
HEAD_TIMEOUT_S = 30.0

_LINGER_S = 2.0
"""How long to go on reading before closing: a close while data arrives is a reset, which could overtake the
answer."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start waiting for the first head."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._end_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A head begins: the first on this connection, or a later one."""
        if not self._in_head:
            self._begin_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._end_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Parse; refuse a head that exceeds the limit."""
        if self._refused:
            return
        super().data_received(data)
        # Counted only if the head continues after this piece: the piece that ends it may hold much of a body.
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT_BYTES:
                limit = HEAD_LIMIT_BYTES // 2**10
                self._refuse(HeadersTooLargeError(f"The request's headers exceed {limit} KiB."))

    def send_400_response(self, msg: str) -> None:
        """Answer what is not an HTTP request, with an error in the usual form."""
        self._refuse(InvalidRequestError(msg))

    def _begin_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()

    def _too_slow(self) -> None:
        if self._head_bytes:
            self._refuse(HeadersTimeoutError("The request's headers did not arrive in time."))
        else:
            self.transport.close()

    def _refuse(self, error: GatewayError) -> None:
        """Answer with `error`, process nothing more, and close a little later."""
        self._end_head()
        self._refused = True
        body = msgspec.json.encode(render(error))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)
