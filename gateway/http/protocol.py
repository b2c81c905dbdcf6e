"""HTTP/1.1 before there is a request: limits on connections, on size and time of a head, and malformed ones.

uvicorn's own protocol limits neither size nor time and answers in plain text; nothing above it sees such a
request. A connection counts once its TLS handshake is over.
"""

import asyncio
import logging
from typing import Any, ClassVar

import msgspec
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.errors import (
    GatewayError,
    HeadersTimeoutError,
    HeadersTooLargeError,
    InvalidRequestError,
    UnavailableError,
    render,
)
from gateway.limits.admission import Connections

_log = logging.getLogger(__name__)

HEAD_LIMIT_BYTES = 64 * 2**10
HEAD_TIMEOUT_S = 30.0
SPARE_HEAD_TIMEOUT_S = 5.0
"""The same on a connection beyond the bound, where probers come at once with their requests."""
SPARE = "spare"
"""In the state of a request's scope: it came by a connection beyond the bound."""

_LINGER_S = 2.0
"""How long to go on reading before closing: a close while data arrives is a reset, which could overtake the
answer."""


_TLS_HELLO = b"\x16\x03"
"""How every connection by TLS begins: a handshake record of version 3."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection, which counts among `bound`."""

    _tls_seen: ClassVar[bool] = False
    """Whether the log of this process says already that a client spoke TLS."""

    def __init__(self, *arguments: Any, bound: Connections, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._bound = bound
        self._counted = False
        self._head_timeout_s = HEAD_TIMEOUT_S
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._started = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and start waiting for the first head; close one too many at once."""
        super().connection_made(transport)
        try:
            within = self._bound.enter()
        except UnavailableError:
            transport.abort()
            return
        self._counted = True
        if not within:
            self._head_timeout_s = SPARE_HEAD_TIMEOUT_S
            self.app_state = {**self.app_state, SPARE: True}
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        if self._counted:
            self._bound.leave()
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
        if self._bound.closing and self.cycle is not None:
            self.cycle.keep_alive = False
        if self.parser.get_http_version() == "1.0" and self.cycle is not None:
            cycle = self.cycle
            cycle.send = _unchunked(cycle)  # type: ignore[method-assign, assignment]  # of this answer alone

    def data_received(self, data: bytes) -> None:
        """Parse; refuse a head that exceeds the limit."""
        if self._refused:
            return
        if not self._started:
            self._started = True
            if data.startswith(_TLS_HELLO) and not BoundedHttpProtocol._tls_seen:
                BoundedHttpProtocol._tls_seen = True
                _log.warning(
                    "a client speaks TLS to this port, which serves plain HTTP: use http:// in its URL,"
                    " or set tls_cert and tls_key"
                )
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
        self._head_timer = self.loop.call_later(self._head_timeout_s, self._too_slow)

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
        if self.transport.can_write_eof():  # not by TLS
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)


def _unchunked(cycle: RequestResponseCycle) -> Send:
    """Return what sends the answer of `cycle` without chunks: HTTP/1.0 has none, its bodies end at the close.

    uvicorn makes chunks of every answer without a length, and of others requires that length.
    """
    send = cycle.send
    has_length = False

    async def send_unchunked(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)  # type: ignore[arg-type]

    return send_unchunked
