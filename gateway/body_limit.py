"""Request bodies, as plain ASGI: decompressed, and limited in size, time, and the total held at once."""

import asyncio
import zlib
from contextlib import suppress
from time import perf_counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    GatewayError,
    InvalidRequestError,
    RateLimitError,
    UnsupportedMediaTypeError,
)
from gateway.resources import Gateway
from gateway.tally import Number

_LINGER_S = 2.0
_RETRY_AFTER_S = 1

_SHOWN = 64
"""How many characters of a client's own name an error repeats."""

_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""What zlib calls each encoding of a body that is understood."""


class BodyLimitMiddleware:
    """Limits a request body in bytes and in time, whether its length was declared or not.

    A compressed body is decompressed as it arrives, and its limit holds for both forms.

    The total of all bodies is limited as well, from their first byte to their answer: admission limits
    requests only once their bodies are there. A body still arriving when a drain ends is given up.

    Exceeding a limit raises from `receive`, in the frame that reads the body, and becomes an answer there.
    The connection is closed after that answer, but not at once: closing it while the body still arrives is a
    reset, which could reach the client before the answer. So the rest is discarded for a little while.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        self._held = _Held(gateway.settings.max_held_body_bytes, gateway.body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request with a guarded body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive, send, self._gateway, self._held)
        try:
            await self._app(scope, body.receive, body.send)
        finally:
            body.release()


class _Held:
    """Counts the bytes of all bodies that are being read or processed, in whichever process."""

    def __init__(self, limit: int, number: Number) -> None:
        self._limit = limit
        self._bytes = number

    def add(self, count: int) -> None:
        """Count more bytes.

        Raises:
            RateLimitError: they would exceed the limit.
        """
        if not self._bytes.add_within(count, self._limit):
            raise RateLimitError("Too many requests are being sent at once.", retry_after_s=_RETRY_AFTER_S)

    def remove(self, count: int) -> None:
        """Uncount bytes."""
        self._bytes.own -= count


class _Decompressor:
    """Decompresses one body, which may consist of several members."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._member = zlib.decompressobj(window)

    def feed(self, data: bytes, limit: int) -> bytes:
        """Return what `data` adds, at most `limit` bytes and one, which says that there is more.

        Raises:
            InvalidRequestError: it is not compressed data.
        """
        found = b""
        try:
            while data and len(found) <= limit:
                if self._member.eof:
                    self._member = zlib.decompressobj(self._window)
                found += self._member.decompress(data, limit + 1 - len(found))
                data = self._member.unused_data if self._member.eof else b""
        except zlib.error:
            raise InvalidRequestError("The body is not encoded as Content-Encoding says.") from None
        return found

    def close(self) -> None:
        """Check that the body was complete.

        Raises:
            InvalidRequestError: it was not.
        """
        if not self._member.eof:
            raise InvalidRequestError("The compressed body ends too early.")


class _Body:
    """One request's body, wrapping its ASGI channels."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, gateway: Gateway, held: _Held) -> None:
        self._exchange = scope["state"]["exchange"]
        self._receive = receive
        self._send = send
        self._drain = gateway.drain
        self._held = held
        self._max_bytes = gateway.settings.max_body_bytes
        self._timeout_s = gateway.settings.body_timeout_s
        self._deadline = asyncio.get_running_loop().time() + self._timeout_s
        self._end: GatewayError | None = None
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        self._declared = int(declared) if declared.isascii() and declared.isdigit() else 0
        self._encoding = headers.get("content-encoding", "").strip().lower()
        window = _WINDOWS.get(self._encoding)
        self._decompressor = None if window is None else _Decompressor(window)
        self._arrived = 0
        """Bytes as they were sent."""
        self._received = 0
        """Bytes as they are passed on."""
        self._complete = False
        self._cut = False
        """Given up before its end."""

    async def receive(self) -> Message:
        """Return the next message; after the body's end, whatever the server sends."""
        if self._complete:
            return await self._receive()
        self._cut = True  # until it turns out well
        if self._declared > self._max_bytes:
            raise self._excess()
        if self._decompressor is None and self._encoding not in ("", "identity"):
            raise UnsupportedMediaTypeError(
                f"Bodies with Content-Encoding: {self._encoding[:_SHOWN]} are not understood;"
                f" {', '.join(_WINDOWS)} and identity are."
            )
        message = await self._in_time()
        data = message.get("body", b"")
        complete = not message.get("more_body", False)
        self._arrived += len(data)
        if self._arrived > self._max_bytes:
            raise self._excess()
        if self._decompressor is not None and message["type"] == "http.request":
            data = self._decompressor.feed(data, self._max_bytes - self._received)
            if self._received + len(data) > self._max_bytes:
                raise self._excess()
            if complete and self._arrived:
                self._decompressor.close()
            message = {**message, "body": data}
        self._held.add(len(data))
        self._received += len(data)
        self._complete = complete
        self._cut = False
        return message

    async def send(self, message: Message) -> None:
        """Pass an answer on; after a body that was given up, linger and close the connection."""
        if not self._cut:
            await self._send(message)
        elif message["type"] == "http.response.start":
            MutableHeaders(scope=message)["Connection"] = "close"
            await self._send(message)
        else:
            await self._send({**message, "more_body": True})
            if not message.get("more_body", False):
                await self._discard()
                await self._send({"type": "http.response.body"})

    def release(self) -> None:
        """The request is over: uncount its body."""
        self._held.remove(self._received)

    async def _in_time(self) -> Message:
        began = perf_counter()
        try:
            async with asyncio.timeout_at(self._deadline) as timeout:

                def end(error: GatewayError) -> None:
                    self._end = error
                    timeout.reschedule(0)

                with self._drain.registered(end):
                    return await self._receive()
        except TimeoutError:
            late = BodyTimeoutError(f"The body did not arrive within {self._timeout_s:g} seconds.")
            raise self._end or late from None
        finally:
            self._exchange.waited_s += perf_counter() - began

    async def _discard(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (await self._receive()).get("more_body", False):
                    pass

    def _excess(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"The body exceeds the limit of {self._max_bytes} bytes.")
