"""HTTP/1.1 before there is a request: how long its head may be and take, and the answer to what is none.

uvicorn's own protocol bounds neither and answers in plain text; nothing above it sees such a request.
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
"""A close amid what still arrives is a reset, which could overtake the answer: so much longer it is read."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._end_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A head begins, the first on this connection or a later one."""
        if not self._in_head:
            self._begin_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._end_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Parse; a head that goes on beyond the limit is refused."""
        if self._refused:
            return
        super().data_received(data)
        # Counted where the head goes on behind the piece: a piece that ends one may hold much of a body.
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT_BYTES:
                limit = HEAD_LIMIT_BYTES // 2**10
                self._refuse(HeadersTooLargeError(f"The request's headers exceed {limit} KiB."))

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP request, in the one error shape."""
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
        """Answer with `error`, take in nothing more, and close a little later."""
        self._end_head()
        self._refused = True
        body = msgspec.json.encode(render(error))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)
