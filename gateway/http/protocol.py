"""HTTP/1.1 before there is a request: limits on connections, on size and time of a head, and malformed ones.

uvicorn's own protocol limits neither size nor time and answers in plain text; nothing above it sees such a
request. A connection counts once its TLS handshake is over.
"""

import asyncio
import logging
import math
import socket
from typing import Any, ClassVar

import httptools
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
from gateway.http.record import REQUEST_ID_HEADER, Records
from gateway.limits.admission import Connections

_log = logging.getLogger(__name__)

HEAD_LIMIT_BYTES = 64 * 2**10
HEAD_TIMEOUT_S = 30.0
SPARE_HEAD_TIMEOUT_S = 5.0
"""The same on a connection beyond the bound, where probers come at once with their requests."""
SPARE = "spare"
"""In the state of a request's scope: it came by a connection beyond the bound."""

_LONGEST_MS = 2**31 - 1
"""The most that `TCP_USER_TIMEOUT` may be, in milliseconds."""
_LINGER_S = 2.0
"""How long to go on reading before closing: a close while data arrives is a reset, which could overtake the
answer."""


_TLS_HELLO = b"\x16\x03"
"""How every connection by TLS begins: a handshake record of version 3."""


class _Parser(httptools.HttpRequestParser):
    """A parser that takes a request to change the protocol for an ordinary one.

    A server may do so (RFC 9110 7.8). Java's HTTP client, Ktor and `curl --http2` ask for HTTP/2 with each
    POST. To httptools such a message ends with its head: its body would be lost.

    Args:
        protocol: gets the events of both readings of such a head; the first is to be ignored.
    """

    def __init__(self, protocol: "BoundedHttpProtocol") -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._protocol = protocol

    def asks_upgrade(self) -> bool:
        """Whether the head asks to change the protocol; CONNECT is no such wish, but a method."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: Any) -> None:
        """Parse. A head that asks for another protocol is read once more, without that wish."""
        parser, rest = self, data
        while True:
            try:
                httptools.HttpRequestParser.feed_data(parser, rest)
            except httptools.HttpParserError:
                self._protocol.send_400_response("Invalid HTTP request received.")
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not parser.asks_upgrade():
                    return
                head, rest = parser._head(), memoryview(rest)[upgrade.args[0] :]
                # Another one: after a head with `Connection: close`, this one ignores whatever comes.
                parser = self._protocol.parser = _Parser(self._protocol)
                parser.feed_data(head)
            else:
                return

    def _head(self) -> bytes:
        """Write the head that was read, but for the wish."""
        version = self.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.get_method(), self._protocol.url, version)]
        lines += [b"%b: %b" % header for header in self._protocol.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection, which counts among `bound`; ends if its client reads nothing for `send_timeout_s`.

    `records` gets what is refused here, and becomes no request.
    """

    parser: _Parser

    _tls_seen: ClassVar[bool] = False
    """Whether the log of this process says already that a client spoke TLS."""

    def __init__(
        self,
        *arguments: Any,
        bound: Connections,
        records: Records,
        send_timeout_s: float,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self.parser = _Parser(self)
        self._bound = bound
        self._records = records
        self._send_timeout_s = send_timeout_s
        self._counted = False
        self._head_timeout_s = HEAD_TIMEOUT_S
        self._in_head = True
        self._head_bytes = 0
        self._shared_piece = False
        """Whether a request ended in the piece that came last."""
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
        # The kernel's own limit: a close waits for what is unread, whatever it is, and TLS waits no less.
        unread_ms = math.ceil(min(self._send_timeout_s * 1000, _LONGEST_MS))
        accepted = transport.get_extra_info("socket")
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
        if not within:
            self._head_timeout_s = SPARE_HEAD_TIMEOUT_S
            self.app_state = {**self.app_state, SPARE: True}
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._uncount()
        self._end_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A head begins: the first on this connection, or a later one."""
        if not self._in_head:
            self._begin_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self.parser.asks_upgrade():
            return
        self._end_head()
        super().on_headers_complete()
        if self.cycle is not None and (self._bound.closing or SPARE in self.app_state):
            self.cycle.keep_alive = False
        if self.parser.get_http_version() == "1.0" and self.cycle is not None:
            cycle = self.cycle
            cycle.send = _unchunked(cycle)  # type: ignore[method-assign, assignment]  # of this answer alone

    def on_message_complete(self) -> None:
        """The body is complete."""
        self._shared_piece = True
        if not self.parser.asks_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer is complete: begin the next one, or wait for the next request."""
        super().on_response_complete()
        self._rest()

    def data_received(self, data: bytes) -> None:
        """Parse; refuse a head that exceeds the limit."""
        if self._refused:
            return
        self._bound.wake(self._make_room)
        if not self._started:
            self._started = True
            if data.startswith(_TLS_HELLO) and not BoundedHttpProtocol._tls_seen:
                BoundedHttpProtocol._tls_seen = True
                _log.warning(
                    "a client speaks TLS to this port, which serves plain HTTP: use http:// in its URL,"
                    " or set tls_cert and tls_key"
                )
        self._shared_piece = False
        super().data_received(data)
        # Counted only if the head continues after this piece: the piece that ends it may hold much of a body,
        # and so may the piece that another request ended in.
        if self._in_head and not self._shared_piece:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT_BYTES:
                limit = HEAD_LIMIT_BYTES // 2**10
                self._refuse(HeadersTooLargeError(f"The request's headers exceed {limit} KiB."))
        self._rest()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not an HTTP request, with an error in the usual form."""
        self._refuse(InvalidRequestError(msg))

    def _rest(self) -> None:
        """Count as idle if nothing is to be answered, for so long at most."""
        idle = self.cycle is not None and self.cycle.response_complete and not self._in_head
        if not idle or self._refused or self.transport.is_closing():
            return
        if self.timeout_keep_alive_task is None:  # what came was of a body that nobody waited for
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        self._bound.rest(self._make_room)

    def _make_room(self) -> bool:
        """Close the connection, which is idle; not if its client still reads the last answer."""
        if self.transport.get_write_buffer_size():
            return False
        self._uncount()
        self.transport.close()
        return True

    def _uncount(self) -> None:
        if self._counted:
            self._counted = False
            self._bound.wake(self._make_room)
            self._bound.leave()

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
        headers = {
            "content-type": "application/json",
            "connection": "close",
            "content-length": len(body),
            REQUEST_ID_HEADER.lower(): self._records.refused(error, self.client[0] if self.client else None),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + head.encode() + b"\r\n" + body)
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
