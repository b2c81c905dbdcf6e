"""Serves the chat page at `/` and its files below `/page/`.

The page has no rights of its own: it sends what its user types to the same routes as every client, with the
key that the user gave it. Nothing here knows models, requests or metrics.
"""

from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

_STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""Of what is served, by the ends of names; other files are not."""
_INDEX: Final = "index.html"
_HEADERS: Final = {
    # An answer may hold anything a model can be made to write, so the browser runs and loads nothing but
    # these files, whatever the page's own cleaning of answers may overlook.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked for again each time, and answered by 304: after an update nobody sees old files beside new ones.
    "Cache-Control": "no-cache",
}


def _route(body: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    headers = _HEADERS | {"ETag": f'"{sha256(body).hexdigest()[:16]}"'}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=media_type)

    return answer


def page_router() -> APIRouter:
    """Return a route for each file of the page, which are read here, once."""
    router = APIRouter(include_in_schema=False, default_response_class=Response)
    for file in sorted(_STATIC.rglob("*")):
        if file.suffix in _TYPES:
            name = file.relative_to(_STATIC).as_posix()
            path = "/" if name == _INDEX else f"/page/{name}"
            router.add_api_route(path, _route(file.read_bytes(), _TYPES[file.suffix]))
    return router
