"""What surrounds every HTTP request, as plain ASGI: its record, its body, and errors as answers.

Starlette's BaseHTTPMiddleware is not used anywhere: behind it, a client's disconnect goes unnoticed. Errors
have OpenAI's shape, never FastAPI's `{"detail"}`, except those of the KServe protocol, whose clients know
Triton's, `{"error": text}`, and those of `/v1/messages`, which have Anthropic's. Bodies are decompressed, and
limited in size, time, and the total held at once.
"""

import asyncio
import re
import zlib
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from difflib import get_close_matches
from time import perf_counter
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.anthropic.errors import REQUEST_ID_HEADER as MESSAGES_ID_HEADER
from gateway.anthropic.errors import is_of_messages, messages_error
from gateway.errors import (
    AuthenticationError,
    BodyTimeoutError,
    BodyTooLargeError,
    DeadlineError,
    GatewayError,
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    UnavailableError,
    UnsupportedMediaTypeError,
    render,
)
from gateway.http.protocol import SPARE
from gateway.http.record import REQUEST_ID_HEADER, Gateway, Records, RequestRecord
from gateway.limits.admission import Phase, shutting_down
from gateway.openai.responses_request import KEPT
from gateway.telemetry.metrics import UNKNOWN

IGNORED_HEADER = "X-Tritongate-Ignored"
"""Names the fields of the request that had no effect."""

_PROBES = frozenset({"/health", "/health/ready", "/metrics", "/v2/health/live", "/v2/health/ready"})
"""Polled by machines every few seconds: served during a drain and by connections beyond the bound, logged at
debug level, never traced."""

_SLASHES = re.compile("/+")
_LONGEST_PATH = 200
"""A longer one is no near miss of any."""
_NEAR = 0.8
_VERSION = "/v1"
_STORED = {
    re.compile("/responses/.+|/conversations(/.+)?"): KEPT,
    re.compile("(/messages)?/batches(/.+)?|/(files|uploads)(/.+)?"): (
        "needs a server that keeps files, which this one does not: "
        "`tritongate batch` answers a file of requests"
    ),
    re.compile(
        "/openai/deployments/.+"
    ): "is Azure's form, which this one does not have: the base URL is /v1",
    re.compile("/engines/.+"): "is an older form, which this one does not have: name the model in the body",
    re.compile(
        "/(audio|images|videos|realtime|assistants|threads|vector_stores|moderations|fine_tuning|evals|rerank"
        "|score)(/.+)?"
    ): "needs a service which this one does not have: /docs lists what it has",
}
"""Why there are no routes of what other servers have."""

_LINGER_S = 2.0
_SHOWN = 64
"""How many characters of a client's own name an error repeats."""
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""What zlib calls each encoding of a body that is understood."""
_MEMBERS_LIMIT = 1_000
"""Of a compressed body: each costs a copy of what follows it. Of 64 KB each, they fill 64 MB."""

Handler = Callable[[Request, Any], Coroutine[Any, Any, Response]]


def as_routed(scope: Scope) -> Scope:
    """Return `scope` as routes know requests: HEAD asks as GET does, and needless slashes do not count.

    The server itself leaves out the body of an answer to HEAD.
    """
    path = _SLASHES.sub("/", scope["path"])
    path = path.rstrip("/") or "/"
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    if path == scope["path"] and method == scope["method"]:
        return scope
    return {**scope, "path": path, "method": method}


class RecordMiddleware:
    """Keeps the records of HTTP requests.

    Any other failure becomes a 500 without a traceback here, and what the server ends with a drain a 503.
    Everything that the request held is released.
    """

    def __init__(self, app: ASGIApp, records: Records) -> None:
        self._app = app
        self._records = records

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other kinds of scope pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        scope = as_routed(scope)
        async with self._records.opened(
            method=method,
            headers=Headers(scope=scope),
            client=scope["client"][0] if scope.get("client") else None,
            route=lambda: getattr(scope.get("route"), "path", UNKNOWN),
            probe=scope["path"] in _PROBES,
        ) as record:
            scope.setdefault("state", {})["record"] = record
            record.path = scope["path"]
            record.send_body = send
            try:
                await self._serve(record, scope, receive, send)
            finally:
                record.send_body = None  # it refers to the scope, and with that to the record

    async def _serve(self, record: RequestRecord, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = record.request_id
                if is_of_messages(scope["path"]):
                    headers[MESSAGES_ID_HEADER] = record.request_id
                headers.update(self._records.gateway.key_limits.headers(record.key_name))
                if record.ignored:
                    headers[IGNORED_HEADER] = ", ".join(record.ignored)
            await send(message)

        try:
            await self._records.admit(record, spare=SPARE in scope["state"])
        except UnavailableError as error:
            record.fail(error)
            response = error_response(error, scope["path"], record.request_id)
            response.headers["Connection"] = "close"
            await response(scope, receive, watched_send)
            return
        try:
            await self._app(scope, receive, watched_send)
        except asyncio.CancelledError:
            # By the server, at the end of a drain: of what the drain itself could not end, as an unload, or
            # what came behind it, as a scrape.
            if record.status is not None or self._records.gateway.drain.phase is Phase.SERVING:
                raise
            over = shutting_down()
            record.fail(over)
            async with asyncio.timeout(_LINGER_S):  # nothing else ends it any more
                await error_response(over, scope["path"], record.request_id)(scope, receive, watched_send)
        except Exception:  # noqa: BLE001 - the request's outermost frame: the server goes on
            failure = record.fail_unexpectedly()
            if record.status is None:
                await error_response(failure, scope["path"], record.request_id)(scope, receive, watched_send)


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request with a guarded body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive, send, self._gateway)
        try:
            await self._app(scope, body.receive, body.send)
        finally:
            body.release()


class _Decompressor:
    """Decompresses one body, which may consist of several members."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._member = zlib.decompressobj(window)
        self._members = 1

    def feed(self, data: bytes, limit: int) -> bytes:
        """Return what `data` adds, at most `limit` bytes and one, which says that there is more.

        Raises:
            InvalidRequestError: it is not compressed data, or in too many members.
        """
        found = b""
        try:
            while data and len(found) <= limit:
                if self._member.eof:
                    self._member = zlib.decompressobj(self._window)
                    self._members += 1
                    if self._members > _MEMBERS_LIMIT:
                        raise InvalidRequestError(f"The body has over {_MEMBERS_LIMIT:,} compressed members.")
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

    def __init__(self, scope: Scope, receive: Receive, send: Send, gateway: Gateway) -> None:
        self._record = scope["state"]["record"]
        self._receive = receive
        self._send = send
        self._gateway = gateway
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
        self._gateway.bodies.hold(len(data))
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
        self._gateway.bodies.release(self._received)

    async def _in_time(self) -> Message:
        began = perf_counter()
        try:
            async with asyncio.timeout_at(self._deadline) as timeout:

                def end(error: GatewayError) -> None:
                    self._end = error
                    timeout.reschedule(0)

                with self._gateway.drain.registered(end):
                    return await self._receive()
        except TimeoutError:
            late = BodyTimeoutError(f"The body did not arrive within {self._timeout_s:g} seconds.")
            raise self._end or late from None
        finally:
            self._record.waited_s += perf_counter() - began

    async def _discard(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (await self._receive()).get("more_body", False):
                    pass

    def _excess(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"The body exceeds the limit of {self._max_bytes} bytes.")


def error_response(error: GatewayError, path: str, request_id: str) -> Response:
    """Render `error` with its status and headers, in the form that clients of `path` expect."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, DeadlineError):
        headers["x-should-retry"] = "false"  # OpenAI's SDK would spend the whole time twice more
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    document: Any = render(error)
    if path == "/v2" or path.startswith("/v2/"):
        document = {"error": error.message}
    elif is_of_messages(path):
        document = messages_error(error, request_id)
    return Response(msgspec.json.encode(document), error.status, headers, "application/json")


async def _gateway_error(request: Request, error: GatewayError) -> Response:
    record: RequestRecord = request.state.record
    record.fail(error)
    return error_response(error, request.scope["path"], record.request_id)


async def _validation_error(request: Request, error: RequestValidationError) -> Response:
    """Path and query parameters; bodies are read by `gateway.openai`."""
    fault = error.errors()[0]
    path = ".".join(map(str, fault["loc"][1:]))
    return await _gateway_error(request, InvalidRequestError(f"{path}: {fault['msg']}", param=path))


async def _http_exception(request: Request, error: HTTPException) -> Response:
    """Handle what the router itself refuses."""
    translated: GatewayError
    if error.status_code == NotFoundError.status:
        hint = hint_at(request.scope["path"], request.app.routes)
        translated = NotFoundError("There is nothing at this path" + (f": {hint}" if hint else "."))
    elif error.status_code == MethodNotAllowedError.status:
        allowed = (error.headers or {})["Allow"]
        translated = MethodNotAllowedError(
            f"This path does not take {request.method} requests; it takes {allowed}."
        )
    elif error.status_code < InternalError.status:
        translated = InvalidRequestError(str(error.detail))
    else:
        translated = InternalError("The gateway failed.")
    response = await _gateway_error(request, translated)
    response.headers.update(error.headers or {})
    return response


def hint_at(path: str, routes: Sequence[Route]) -> str | None:
    """Return what helps a client that asked for `path`, which no route has."""
    if len(path) > _LONGEST_PATH or not path.isprintable() or path == "/":
        return None
    if any(route.path_regex.match(_VERSION + path) for route in routes):
        return f"did you mean {_VERSION + path}?"
    for stored, refusal in _STORED.items():
        if stored.fullmatch(path.removeprefix(_VERSION)):
            return f"it {refusal}."
    known = sorted({route.path for route in routes if "{" not in route.path})
    within = [each for each in known if each.startswith(_VERSION) and path.endswith(each)]
    near = within or get_close_matches(path.lower(), known, n=1, cutoff=_NEAR)
    near = near or get_close_matches(_VERSION + path.lower(), known, n=1, cutoff=_NEAR)
    return f"did you mean {near[0]}?" if near else None


def error_handlers() -> dict[Any, Handler]:
    """Return the table of handlers for the application."""
    return {
        GatewayError: _gateway_error,
        RequestValidationError: _validation_error,
        HTTPException: _http_exception,
    }
