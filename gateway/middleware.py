"""The outermost frame of every request, as plain ASGI.

Starlette's BaseHTTPMiddleware is not used anywhere: behind it, a client's disconnect goes unnoticed.
"""

import asyncio
import logging
import random
import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from http import HTTPStatus
from time import perf_counter
from typing import TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.access_log import request_line
from gateway.api.failures import error_response
from gateway.drain import Phase, shutting_down
from gateway.errors import ClientGoneError, InternalError, UnavailableError
from gateway.exchange import Exchange
from gateway.logs import request_id as current_request_id
from gateway.metrics import UNKNOWN
from gateway.resources import Gateway
from gateway.tracing import Trace, current_trace
from gateway.turnstile import Turnstile

T = TypeVar("T")

REQUEST_ID_HEADER = "X-Request-Id"
IGNORED_HEADER = "X-Tritongate-Ignored"
"""Names the fields of the request that had no effect."""

_log = logging.getLogger("gateway.access")
_dice = random.Random()  # noqa: S311 - which requests are logged is no secret
"""Its own, so that nobody else's seed decides what is logged, and logging changes nobody else's numbers."""
_request_id = re.compile(r"[\x21-\x7e]{1,128}")

_PROBES = frozenset({"/health", "/health/ready", "/metrics", "/v2/health/live", "/v2/health/ready"})
"""Polled by machines every few seconds: served during a drain, logged at debug level, never traced."""


_SLASHES = re.compile("/+")


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


class Records:
    """Opens and closes the records of requests: id, resources, trace, metrics and access log."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._turnstile = Turnstile()

    @asynccontextmanager
    async def opened(
        self, *, method: str, headers: Mapping[str, str], route: Callable[[], str], probe: bool = False
    ) -> AsyncIterator[Exchange]:
        """Keep a request's record for a block, and release everything that the request held behind it.

        Args:
            method: HTTP's, or `GRPC`.
            headers: the request's, by lower-case names.
            route: returns the route that it took, for metrics; called when it is over.
            probe: polled by machines every few seconds.
        """
        gateway = self._gateway
        async with AsyncExitStack() as resources:
            exchange = Exchange(
                request_id=_accept_request_id(headers.get(REQUEST_ID_HEADER.lower())),
                method=method,
                arrived=perf_counter(),
                deadline=asyncio.get_running_loop().time() + gateway.settings.request_timeout_s,
                metrics=gateway.metrics,
                resources=resources,
                trace=Trace() if probe else gateway.tracing.begin(method, headers),
            )
            _while_it_lasts(resources, current_request_id, exchange.request_id)
            _while_it_lasts(resources, current_trace, exchange.trace)
            resources.callback(exchange.forget_error)
            resources.callback(self._finish, exchange, route, probe=probe)
            yield exchange

    async def admit(self, exchange: Exchange, *, probe: bool = False) -> None:
        """Let a request in, or wait behind those that came with it; a drain then waits for its end.

        Raises:
            UnavailableError: a drain runs, and this is no probe.
        """
        drain = self._gateway.drain
        if drain.phase is not Phase.SERVING and not probe:
            exchange.metrics.rejected.labels(UNKNOWN, "draining").inc()
            raise shutting_down()
        drain.enter()
        exchange.resources.callback(drain.leave)
        await self._turnstile.enter()

    def _finish(self, exchange: Exchange, route_of: Callable[[], str], *, probe: bool) -> None:
        """Write the request's metrics, trace and log line, after everything else was released."""
        duration = perf_counter() - exchange.arrived
        route = route_of()
        status, model, metrics = exchange.outcome, exchange.model, exchange.metrics
        metrics.requests.labels(route, model, str(status)).inc()
        metrics.request_duration.labels(route, model).observe(duration)
        if exchange.generates:
            metrics.overhead.labels(model).observe(max(duration - exchange.waited_s, 0.0))
            if status == ClientGoneError.status:
                metrics.client_cancels.labels(model).inc()
        if exchange.key_name is not None:
            metrics.key_used(
                exchange.key_name,
                model,
                status,
                prompt=exchange.prompt_tokens,
                generated=exchange.generated_tokens,
            )
        exchange.trace.end(exchange, route)
        if exchange.error is None and status < HTTPStatus.BAD_REQUEST and not self._sampled():
            return
        line = request_line(exchange, route, duration)
        _log.log(logging.DEBUG if probe else logging.INFO, "request", extra=line)

    def _sampled(self) -> bool:
        """Decide at random whether a successful request gets its line; clients cannot influence it."""
        return _dice.random() < self._gateway.settings.log_sample


class ExchangeMiddleware:
    """Keeps the records of HTTP requests.

    Any other failure becomes a 500 without a traceback here, and everything the request held is released.
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
            route=lambda: getattr(scope.get("route"), "path", UNKNOWN),
            probe=scope["path"] in _PROBES,
        ) as exchange:
            scope.setdefault("state", {})["exchange"] = exchange
            exchange.send_body = send
            try:
                await self._serve(exchange, scope, receive, send)
            finally:
                exchange.send_body = None  # it refers to the scope, and with that to the exchange

    async def _serve(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = exchange.request_id
                if exchange.ignored:
                    headers[IGNORED_HEADER] = ", ".join(exchange.ignored)
            await send(message)

        try:
            await self._records.admit(exchange, probe=scope["path"] in _PROBES)
        except UnavailableError as error:
            exchange.fail(error)
            response = error_response(error, scope["path"])
            response.headers["Connection"] = "close"
            await response(scope, receive, watched_send)
            return
        try:
            await self._app(scope, receive, watched_send)
        except Exception:  # noqa: BLE001 - the request's outermost frame: the server goes on
            _log.exception("a request failed unexpectedly")
            failure = InternalError("The gateway failed; its log says why under this request's id.")
            exchange.fail(failure)
            if exchange.status is None:
                await error_response(failure, scope["path"])(scope, receive, watched_send)


def _while_it_lasts(resources: AsyncExitStack, variable: ContextVar[T], value: T) -> None:
    """Set `variable` until `resources` are released."""
    resources.callback(variable.reset, variable.set(value))


def _accept_request_id(given: str | None) -> str:
    """Keep the client's id if it is short and printable, else make one."""
    return given if given and _request_id.fullmatch(given) else uuid.uuid4().hex
