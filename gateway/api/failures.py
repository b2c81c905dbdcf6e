"""Errors as HTTP answers: one table, never FastAPI's `{"detail"}`.

All have OpenAI's shape, except those of the KServe protocol, whose clients know Triton's: `{"error": text}`.
"""

from collections.abc import Callable, Coroutine, Sequence
from difflib import get_close_matches
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.errors import (
    AuthenticationError,
    GatewayError,
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    render,
)

_LONGEST_PATH = 200
"""A longer one is no near miss of any."""
_NEAR = 0.8
_VERSION = "/v1"

Handler = Callable[[Request, Any], Coroutine[Any, Any, Response]]


def error_response(error: GatewayError, path: str) -> JSONResponse:
    """Render `error` with its status and headers, in the form that clients of `path` expect."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    of_triton = path == "/v2" or path.startswith("/v2/")
    document = {"error": error.message} if of_triton else render(error)
    return JSONResponse(document, error.status, headers)


async def _gateway_error(request: Request, error: GatewayError) -> Response:
    request.state.exchange.fail(error)
    return error_response(error, request.scope["path"])


async def _validation_error(request: Request, error: RequestValidationError) -> Response:
    """Path and query parameters; bodies are read by `gateway.openai`."""
    fault = error.errors()[0]
    path = ".".join(map(str, fault["loc"][1:]))
    return await _gateway_error(request, InvalidRequestError(f"{path}: {fault['msg']}", param=path))


async def _http_exception(request: Request, error: HTTPException) -> Response:
    """Handle what the router itself refuses."""
    translated: GatewayError
    if error.status_code == NotFoundError.status:
        meant = suggestion(request.scope["path"], request.app.state.routes)
        question = "." if meant is None else f": did you mean {meant}?"
        translated = NotFoundError(f"There is nothing at this path{question}")
    elif error.status_code == MethodNotAllowedError.status:
        translated = MethodNotAllowedError(f"This path does not take {request.method} requests.")
    elif error.status_code < InternalError.status:
        translated = InvalidRequestError(str(error.detail))
    else:
        translated = InternalError("The gateway failed.")
    response = await _gateway_error(request, translated)
    response.headers.update(error.headers or {})
    return response


def suggestion(path: str, routes: Sequence[Route]) -> str | None:
    """Return the path that a client probably meant by `path`, which no route has."""
    if len(path) > _LONGEST_PATH or not path.isprintable() or path == "/":
        return None
    versioned = _VERSION + path
    if any(route.path_regex.match(versioned) for route in routes):
        return versioned
    known = sorted({route.path for route in routes if "{" not in route.path})
    within = [each for each in known if each.startswith(_VERSION) and path.endswith(each)]
    near = within or get_close_matches(path.lower(), known, n=1, cutoff=_NEAR)
    near = near or get_close_matches(_VERSION + path.lower(), known, n=1, cutoff=_NEAR)
    return near[0] if near else None


def error_handlers() -> dict[Any, Handler]:
    """Return the table of handlers for the application."""
    return {
        GatewayError: _gateway_error,
        RequestValidationError: _validation_error,
        HTTPException: _http_exception,
    }
