"""Which web pages may use the gateway.

A browser sends what a page tells it to, also to this machine; it only keeps the answers of other sites from
the page. It says where the page is from (`Origin`), and by what name the gateway was addressed (`Host`). A
page whose name was made to lead here (DNS rebinding) is of the same origin, so the name counts as well.
"""

from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from gateway.errors import PermissionDeniedError
from gateway.settings import Settings
from gateway.settings.values import is_address, is_loopback

ANY: Final = "*"
_READ_ONLY: Final = {"GET", "HEAD", "OPTIONS"}


def name_of(host: str) -> str:
    """Return the name in a `Host` header: lower case, without port and the root's dot; "" of junk."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:  # brackets around what is no address
        return ""


class Sites:
    """Decides by a request's `Host` and `Origin`.

    Args:
        settings: `allowed_hosts`, `cors_origins`, and whether anybody who reaches the gateway may use it.
    """

    def __init__(self, settings: Settings) -> None:
        self._hosts = settings.allowed_hosts
        self._origins = frozenset(settings.cors_origins)
        # A rebound page has no key. Without keys, only what serves this machine alone can know its own names.
        self._any_host = ANY in self._hosts or not (
            self._hosts or (not settings.api_keys and is_loopback(settings.host))
        )

    def check(self, method: str, host: str, origin: str | None) -> None:
        """Check a request.

        Raises:
            PermissionDeniedError: it was addressed by a name that is not the gateway's, or would change or
                compute something for a page of another site.
        """
        if not (self._any_host or self._named(host)):
            raise PermissionDeniedError(
                f"This gateway is not called {name_of(host)[:80]!r}: set allowed_hosts if it should be."
            )
        if origin is None or method in _READ_ONLY or self._origins & {ANY, origin}:
            return
        own = origin.lower().partition("://")[2]
        # A proxy may pass on a `Host` of its own; it is the name that the page was asked by that counts.
        if own != host.lower() and not _matches(name_of(own), self._hosts):
            raise PermissionDeniedError(
                "Web pages of other sites may not send this request: set cors_origins if they should, or "
                "allowed_hosts if it is the gateway's own page, by the name that a proxy has."
            )

    def _named(self, host: str) -> bool:
        name = name_of(host)
        # An address is no name that somebody could lead here, and HTTP/1.0 has none.
        return not host or is_loopback(name) or is_address(name) or _matches(name, self._hosts)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of these; `*.example.org` stands for every name that ends so."""
    return any(name.endswith(each[1:]) if each.startswith("*.") else name == each for each in patterns)
