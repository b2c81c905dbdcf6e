"""A client for HTTP/1.1 that needs very little CPU time, so that a benchmark measures the server only.

One connection carries one request at a time and is kept for the next. Server-sent events are timed when their
bytes arrive, before anything is decoded.
"""

import asyncio
import json
import re
import ssl
from collections.abc import Callable
from time import monotonic
from typing import cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

_EVENT_END = re.compile(rb"\n\r?\n")  # the line before it may end in \r, too
_DATA = b"data:"
_OK = 200
_SHOWN_BYTES = 300

OnEvent = Callable[[float, bytes], None]
"""Takes the time of arrival (`time.monotonic`, seconds) and the data of one event."""


class HttpError(Exception):
    """The request failed: no connection, no complete answer (in time), or a status other than 200."""


class Connection(asyncio.Protocol):
    """One connection; `post` sends a request and waits for the end of its answer."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self._answered: asyncio.Future[bytes] | None = None
        self._on_event: OnEvent | None = None
        self._body = b""
        """Of the answer, without events that were taken."""
        self._complete = False

    @property
    def open(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not derive from it

    def connection_lost(self, _error: Exception | None) -> None:
        """Make the request in progress fail."""
        self._transport = None
        self._end(HttpError("the connection was closed before the answer's end"))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    async def post(self, request: bytes, on_event: OnEvent) -> bytes:
        """Send a complete request; return the part of the body that is not events: all of a plain answer.

        Raises:
            HttpError: the connection ended, or the status was not 200.
        """
        if self._transport is None:
            raise HttpError("the connection is closed")
        self._body, self._complete = b"", False
        self._on_event = on_event
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answered

    def data_received(self, data: bytes) -> None:
        """Process bytes as they arrive."""
        now = monotonic()
        try:
            self._parser.feed_data(data)
            self._deliver_events(now)
        except (HttpParserError, ValueError, LookupError) as error:
            # What follows an answer that cannot be read cannot be read either.
            self._end(HttpError(f"the answer cannot be read: {error}"))
            self.close()
            return
        if self._complete:
            status = self._parser.get_status_code()
            self._end(None if status == _OK else HttpError(f"status {status}: {_said(self._body)}"))

    def on_body(self, body: bytes) -> None:
        """Take more of the body; called by the parser, as is the next."""
        self._body += body

    def on_message_complete(self) -> None:
        """The answer is complete."""
        self._complete = True

    def _deliver_events(self, now: float) -> None:
        if self._on_event is None:
            return
        *events, self._body = _EVENT_END.split(self._body)
        for event in events:
            if event.startswith(_DATA):
                self._on_event(now, event[len(_DATA) :].strip())

    def _end(self, error: HttpError | None) -> None:
        if self._answered is None or self._answered.done():
            return
        if error is not None:
            self._answered.set_exception(error)
        else:
            self._answered.set_result(self._body)


def _said(body: bytes) -> str:
    """Return the message of an error, as OpenAI has it, or the beginning of another body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:_SHOWN_BYTES].decode(errors="replace")


class Client:
    """A pool of connections to one server, which are reused.

    Args:
        url: of the server, perhaps with a path; a `/v1` at its end does not count.
        key: sent as the bearer key; None: none.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// address")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._named = parts.netloc.rpartition("@")[2]
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._key = f"Authorization: Bearer {key}\r\n" if key else ""
        self._idle: list[Connection] = []

    async def post(self, path: str, body: bytes, on_event: OnEvent, *, timeout_s: float) -> bytes:
        """Send a JSON body; see `Connection.post`.

        Raises:
            HttpError: the request failed, or took longer than `timeout_s`.
        """
        connection = await self._connection()
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\nHost: {self._named}\r\nAccept: */*\r\n"
            f"{self._key}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(timeout_s):
                answer = await connection.post(head.encode() + body, on_event)
        except TimeoutError:
            connection.close()
            raise HttpError(f"no answer within {timeout_s} s") from None
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Close all idle connections."""
        for connection in self._idle:
            connection.close()

    async def _connection(self) -> Connection:
        while self._idle:
            kept = self._idle.pop()
            if kept.open:
                return kept
        loop = asyncio.get_running_loop()
        try:
            _, made = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise HttpError(f"cannot connect: {error}") from None
        return made
