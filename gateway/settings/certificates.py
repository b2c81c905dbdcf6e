"""Certificates for TLS: which files they are in, and whether these can be used."""

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """How a Triton is spoken to by TLS: PEM files."""

    ca: str
    """Certificates of who may vouch for the server."""
    cert: str | None = None
    """The gateway's own, with those between it and the root; None: it shows none."""
    key: str | None = None

    def paths(self) -> tuple[str, ...]:
        """Return the files there are."""
        return tuple(path for path in (self.ca, self.cert, self.key) if path is not None)

    def read(self) -> tuple[bytes, bytes | None, bytes | None]:
        """Return what is in them: roots, key and certificate, in the order of gRPC.

        Raises:
            ValueError: they cannot be used; the message names the file.
        """
        try:
            ssl.create_default_context(cafile=self.ca)
            roots = Path(self.ca).read_bytes()
        except OSError as error:  # ssl.SSLError is one, too
            raise ValueError(f"{self.ca} holds no certificates in PEM ({_reason(error)})") from None
        if self.cert is None or self.key is None:
            return roots, None, None
        check_pair(self.cert, self.key)
        return roots, Path(self.key).read_bytes(), Path(self.cert).read_bytes()


def check_pair(cert: str, key: str) -> None:
    """Check that a certificate and its private key can be read and belong together.

    Raises:
        ValueError: they do not; the message names the files.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except OSError as error:
        raise ValueError(f"{cert} and {key} are no certificate with its key ({_reason(error)})") from None


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or "not in PEM"
