"""The certificate for TLS with the gateway's clients: a certificate that is read again when its files change.

A new certificate is for new connections; those that exist go on as they are. One that cannot be used changes
nothing, nor does an expired one in the place of a valid one. The private key is never logged, and written
nowhere but to memory.
"""

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from gateway.settings.certificates import check_pair, untimely, validity
from gateway.settings.follow import changes

Pair = tuple[bytes, bytes]
"""The texts of a private key and of its certificate."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def file_of(pair: Pair) -> Iterator[str]:
    """Hold a pair in one file in memory: OpenSSL reads files only, and its own may have changed."""
    with os.fdopen(os.memfd_create("tritongate-certificate"), "wb") as memory:
        memory.write(b"\n".join(pair))
        memory.flush()
        yield f"/proc/self/fd/{memory.fileno()}"


class Certificate:
    """The gateway's certificate.

    Args:
        cert: PEM file of the certificate and those between it and the root.
        key: PEM file of its private key.
        last: what the processes of this gateway serve by, if the files cannot be used; None: this one is
            the first.

    Raises:
        ValueError: the files cannot be used, and there is no last pair.
    """

    def __init__(self, cert: str, key: str, last: Pair | None = None) -> None:
        self._cert = cert
        self._key = key
        try:
            self.newest = self._read(last)
        except (OSError, ValueError) as error:
            if last is None:
                raise
            self._refuse(error)
            self.newest = last
        self._following: asyncio.Task[None] | None = None

    def follow(self, context: ssl.SSLContext | None = None) -> None:
        """Follow the files as long as the loop runs, in HTTP's `context` too, if this process serves it."""
        self._following = asyncio.create_task(self._follow(context))

    async def _follow(self, context: ssl.SSLContext | None) -> None:
        async for _ in changes(self._cert, self._key):
            try:
                found = self._read(self.newest)
                if found == self.newest:
                    continue
                if context is not None:
                    with file_of(found) as path:
                        context.load_cert_chain(path, password="")
                    _log.info("certificate applied", extra={"path": self._cert})
                self.newest = found
            except (OSError, ValueError) as error:
                self._refuse(error)

    @property
    def not_after(self) -> float:
        """Until when the newest one is valid, in seconds since the epoch."""
        return validity(self.newest[1])[1].timestamp()

    def _read(self, before: Pair | None) -> Pair:
        """Return what is in the files.

        Raises:
            OSError: one cannot be read.
            ValueError: they are no pair; or they are not valid now, and the pair before is.
        """
        check_pair(self._cert, self._key)
        found = Path(self._key).read_bytes(), Path(self._cert).read_bytes()
        fault = untimely(found[1])
        if fault is not None and found != before:
            if before is not None and untimely(before[1]) is None:
                raise ValueError(f"{self._cert} {fault}")
            _log.warning("certificate is not valid now", extra={"detail": f"{self._cert} {fault}"})
        return found

    def _refuse(self, error: Exception) -> None:
        _log.error("certificate refused: the one before stays", extra={"detail": str(error)})
