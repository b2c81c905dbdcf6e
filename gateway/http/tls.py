"""The certificate for TLS with the gateway's clients: a certificate that is read again when its files change.

A new certificate is for new connections; those that exist go on as they are. One that cannot be used changes
nothing. The private key is never logged.
"""

import asyncio
import logging
import ssl
from pathlib import Path

from gateway.settings.certificates import check_pair
from gateway.settings.follow import changes

_log = logging.getLogger(__name__)


class Certificate:
    """The gateway's certificate.

    Args:
        cert: PEM file of the certificate and those between it and the root.
        key: PEM file of its private key.
    """

    def __init__(self, cert: str, key: str) -> None:
        self._cert = cert
        self._key = key
        self.newest = self._read()
        """Texts of the key and of the certificate."""
        self._following: asyncio.Task[None] | None = None

    def follow(self, context: ssl.SSLContext) -> None:
        """Follow the files as long as the loop runs, in HTTP's `context` too."""
        self._following = asyncio.create_task(self._follow(context))

    async def _follow(self, context: ssl.SSLContext) -> None:
        first = True
        async for _ in changes(self._cert, self._key):
            try:
                check_pair(self._cert, self._key)
                context.load_cert_chain(self._cert, self._key, password="")
                self.newest = self._read()
            except (OSError, ValueError) as error:
                _log.error("certificate refused: the one before stays", extra={"detail": str(error)})
            else:
                if not first:
                    _log.info("certificate applied", extra={"path": self._cert})
            first = False

    def _read(self) -> tuple[bytes, bytes]:
        return Path(self._key).read_bytes(), Path(self._cert).read_bytes()
