"""A client of a running gateway, for the command line: one JSON request, one JSON answer."""

import http.client
import json
from typing import Any
from urllib.parse import quote, urlsplit

DEFAULT_URL = "http://127.0.0.1:8080"


class RemoteError(Exception):
    """The gateway refused or was not reached; the message is one line for the terminal."""


class RemoteGateway:
    """A gateway at `url`, which may include a path prefix.

    Args:
        url: http or https.
        key: sent as the bearer key; None if the gateway needs none.

    Raises:
        RemoteError: not such a URL.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RemoteError(f"{url} is not a URL of a gateway, such as {DEFAULT_URL}")
        self._url = url
        self._parts = parts
        self._key = key

    def change_model(self, model: str, action: str, options: dict[str, Any]) -> dict[str, Any]:
        """Request a model's `action`, `load` or `unload`, and wait as long as the gateway takes.

        Raises:
            RemoteError: it was refused, or failed.
        """
        return self._post(f"/v1/models/{quote(model, safe='/')}/{action}", options)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        secure = self._parts.scheme == "https"
        connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        try:
            connection = connect(self._parts.hostname or "", self._parts.port)
            try:
                connection.request("POST", self._parts.path.rstrip("/") + path, json.dumps(body), headers)
                response = connection.getresponse()
                status, answer = response.status, response.read()
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            # ValueError: a port or a header that cannot be sent.
            raise RemoteError(f"cannot reach {self._url}: {error or type(error).__name__}") from error
        try:
            document = json.loads(answer)
            if status == http.client.OK:
                return dict(document)
            raise RemoteError(f"{document['error']['message']} ({status})")
        except (ValueError, LookupError, TypeError) as error:
            raise RemoteError(f"{self._url} answered {status}, and not as a gateway does") from error
