"""Limits on request bodies (size, time, and the total held at once), as plain ASGI."""

import asyncio
from contextlib import suppress
from time import perf_counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import BodyTimeoutError, BodyTooLargeError, GatewayError, RateLimitError
from gateway.resources import Gateway
from gateway.tally import Number

_LINGER_S = 2.0
_RETRY_AFTER_S = 1


class BodyLimitMiddleware:
    """Limits a request body in bytes and in time, whether its length was declared or not.

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
        declared = Headers(scope=scope).get("content-length", "")
        self._declared = int(declared) if declared.isascii() and declared.isdigit() else 0
        self._received = 0
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
        message = await self._in_time()
        count = len(message.get("body", b""))
        if self._received + count > self._max_bytes:
            raise self._excess()
        self._held.add(count)
        self._received += count
        self._complete = not message.get("more_body", False)
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
