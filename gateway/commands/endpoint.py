"""An OpenAI endpoint, as the commands that are its clients ask it: one blocking connection at a time."""

import http.client
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import click

DEFAULT_URL: Final = "http://127.0.0.1:8080"
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class ClientError(click.ClickException):
    """A request failed or cannot be made; the message is one line for the terminal."""


def fetch(url: str, key: str | None, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the endpoint's answer to a GET, or with `body` to a POST, however long it takes.

    Args:
        url: http or https, perhaps with a path prefix; a `/v1` at its end does not count.
        key: sent as the bearer key; None if the endpoint needs none.
        path: of the route, such as `/v1/models`.
        body: the JSON object to send; None: a GET.

    Raises:
        ClientError: it was refused, or failed.
    """
    with connected(url) as (connection, prefix), _reaching(url):
        return _document(url, key, _response(connection, prefix + path, key, body))


def events(url: str, key: str | None, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
    """Yield the chunks of a streamed answer until its `[DONE]`; to close the generator hangs up.

    Raises:
        ClientError: it was refused, failed, or ended too early; as `fetch` otherwise.
    """
    with connected(url) as (connection, prefix), _reaching(url):
        response = _response(connection, prefix + path, key, body)
        if response.status != http.client.OK:
            _document(url, key, response)
        for line in response:
            if not line.startswith(_DATA):
                continue
            data = line.removeprefix(_DATA).strip()
            if data == _DONE:
                return
            chunk = json.loads(data)
            if error := chunk.get("error"):
                raise ClientError(str(error.get("message", error) if isinstance(error, dict) else error))
            yield chunk
    raise ClientError("the answer broke off")


def _response(
    connection: http.client.HTTPConnection, path: str, key: str | None, body: dict[str, Any] | None
) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json", **dict(authorization(key))}
    method, sent = ("GET", None) if body is None else ("POST", json.dumps(body))
    connection.request(method, path, sent, headers)
    return connection.getresponse()


def _document(url: str, key: str | None, response: http.client.HTTPResponse) -> dict[str, Any]:
    answer = response.read()
    if response.status == http.client.UNAUTHORIZED:
        raise ClientError(
            "the gateway does not know this key (--key, TRITONGATE_KEY)"
            if key
            else "the gateway needs a key: --key KEY, or the variable TRITONGATE_KEY"
        )
    try:
        document = json.loads(answer)
        if response.status == http.client.OK:
            return dict(document)
        raise ClientError(f"{document['error']['message']} ({response.status})")
    except (ValueError, LookupError, TypeError) as error:
        raise ClientError(f"{url} answered {response.status}, and not as a gateway does") from error


@contextmanager
def _reaching(url: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, http.client.HTTPException) as error:
        # ValueError: a port or a header that cannot be sent.
        nobody = "; `tritongate up` starts a gateway" if isinstance(error, ConnectionRefusedError) else ""
        # The bytes of another protocol would reach the terminal. Its subclass is a hang-up.
        other = type(error) is http.client.BadStatusLine
        why = "what answers there is not HTTP" if other else error or type(error).__name__
        raise ClientError(f"cannot reach {url}: {why}{nobody}") from error


@contextmanager
def connected(url: str, timeout_s: float | None = None) -> Iterator[tuple[http.client.HTTPConnection, str]]:
    """Yield a connection, which is made by its first request, and the prefix of paths.

    Raises:
        ClientError: `url` is not one.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ClientError(f"{url} is not a URL, such as {DEFAULT_URL}")
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = connect(parts.hostname, parts.port, timeout=timeout_s)
    except ValueError as error:
        raise ClientError(f"cannot reach {url}: {error}") from error
    try:
        yield connection, parts.path.rstrip("/").removesuffix("/v1")
    finally:
        connection.close()


def authorization(key: str | None) -> tuple[tuple[str, str], ...]:
    """Return the headers that carry `key`, as gRPC metadata or HTTP's."""
    return (("authorization", f"Bearer {key}"),) if key else ()
