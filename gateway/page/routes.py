"""Serves the chat page at `/` and its files below `/page/`.

The page has no rights of its own: it sends what its user types to the same routes as every client, with the
key that the user gave it. Nothing here knows models, requests or metrics.
"""

from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

from fastapi import APIRouter, HTTPException, Request
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


class _File(NamedTuple):
    """A file of the page."""

    body: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        headers = _HEADERS | {"ETag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media_type)


def add_page(router: APIRouter) -> None:
    """Add the routes of the page, whose files are read here, once."""
    files = {
        path.relative_to(_STATIC).as_posix(): _read(path)
        for path in _STATIC.rglob("*")
        if path.suffix in _TYPES
    }
    index = files.pop(_INDEX)

    @router.get("/")
    async def page(request: Request) -> Response:
        return index.answer(request)

    @router.get("/page/{name:path}")
    async def part(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404)
        return files[name].answer(request)


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, _TYPES[path.suffix], f'"{sha256(body).hexdigest()[:16]}"')
