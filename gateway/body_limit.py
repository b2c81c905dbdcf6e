"""How large a request body may be, and how slow, as plain ASGI."""

import asyncio
from contextlib import suppress
from time import perf_counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import BodyTimeoutError, BodyTooLargeError

_LINGER_S = 2.0


class BodyLimitMiddleware:
    """Bounds a request body in bytes and in time, whether its length was declared or not.

    The excess raises from `receive`, in the frame that reads the body, and becomes an answer there. The
    connection is closed after that answer, but not at once: a close amid a body that still arrives is a
    reset, which could reach the client before the answer. So the rest is discarded for a little while.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request with a guarded body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive, send, max_bytes=self._max_bytes, timeout_s=self._timeout_s)
        await self._app(scope, body.receive, body.send)


class _Body:
    """One request's body: stands in for the ASGI channels."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, max_bytes: int, timeout_s: float
    ) -> None:
        self._exchange = scope["state"]["exchange"]
        self._receive = receive
        self._send = send
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        declared = Headers(scope=scope).get("content-length", "")
        self._declared = int(declared) if declared.isascii() and declared.isdigit() else 0
        self._received = 0
        self._complete = False
        self._cut = False
        """Given up before its end."""

    async def receive(self) -> Message:
        """Return the next message; after the body's end whatever the server has to say."""
        if self._complete:
            return await self._receive()
        self._cut = True  # until it turns out well
        if self._declared > self._max_bytes:
            raise self._excess()
        message = await self._in_time()
        self._received += len(message.get("body", b""))
        if self._received > self._max_bytes:
            raise self._excess()
        self._complete = not message.get("more_body", False)
        self._cut = False
        return message

    async def send(self, message: Message) -> None:
        """Pass an answer on; one to a body that was given up lingers and closes the connection."""
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

    async def _in_time(self) -> Message:
        began = perf_counter()
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive()
        except TimeoutError:
            raise BodyTimeoutError(f"The body did not arrive within {self._timeout_s:g} seconds.") from None
        finally:
            self._exchange.waited_s += perf_counter() - began

    async def _discard(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (await self._receive()).get("more_body", False):
                    pass

    def _excess(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"The body exceeds the limit of {self._max_bytes} bytes.")
