"""Authentication: bearer keys with scopes.

Keys are kept and compared as SHA-256 digests, so that every comparison has the same length, and each
presented key is compared with all known ones in constant time. Nothing here logs, and no error repeats the
presented key.
"""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.errors import AuthenticationError, PermissionDeniedError
from gateway.setting_types import ApiKey, Scope


@dataclass(frozen=True, slots=True)
class _Known:
    name: str
    digest: bytes
    scopes: frozenset[Scope]


class Keyring:
    """The known keys. Without any, every caller may do everything; the settings guard against that."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._known = tuple(_Known(key.name, _digest(key), key.scopes) for key in keys)

    def authorize(self, header: str | None, scope: Scope | None) -> str | None:
        """Check the Authorization header and return the key's name; None when no keys are configured.

        Args:
            header: the header's value, its bytes read as Latin-1 as ASGI does; None when absent.
            scope: the one the route needs; None is satisfied by any known key.

        Raises:
            AuthenticationError: no bearer key, or an unknown one.
            PermissionDeniedError: a known key without `scope`.
        """
        if not self._known:
            return None
        scheme, _, presented = (header or "").partition(" ")
        presented = presented.strip(" \t")
        if scheme.lower() != "bearer" or not presented:
            raise AuthenticationError("An API key is needed: send the header Authorization: Bearer KEY.")
        digest = hashlib.sha256(presented.encode("latin-1")).digest()
        found: _Known | None = None
        for known in self._known:  # no early exit: timing must not reveal which key matched
            if hmac.compare_digest(known.digest, digest):
                found = known
        if found is None:
            raise AuthenticationError("The API key is not known.")
        if scope is not None and scope not in found.scopes:
            raise PermissionDeniedError(f"This API key does not have the scope {scope}.")
        return found.name


def _digest(key: ApiKey) -> bytes:
    if key.sha256 is not None:
        return bytes.fromhex(key.sha256)
    assert key.key is not None  # noqa: S101 - the settings hold exactly one of the two
    return hashlib.sha256(key.key.get_secret_value().encode()).digest()
