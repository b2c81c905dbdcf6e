"""Certificates for TLS: which files they are in, and whether these can be used."""

import base64
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_FIRST: Final = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----([^-]+)-----END ")
_VERSION: Final = 0xA0
"""The tag of a certificate's first field, which may be left out."""
_GENERALIZED_TIME: Final = 0x18
"""The tag of a time whose year has four digits."""


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


def untimely(cert: bytes, now: datetime | None = None) -> str | None:
    """Return what is wrong with the time of a certificate, for after its name; None: it is valid.

    Only the first one of the text is looked at, which is the server's own. The others lead to roots, by more
    than one way perhaps, of which a client needs one.
    """
    now = now or datetime.now(UTC)
    begin, end = validity(cert)
    if now < begin:
        return f"is not valid before {begin:%Y-%m-%d %H:%M} UTC"
    return f"expired on {end:%Y-%m-%d %H:%M} UTC" if now > end else None


def validity(cert: bytes) -> tuple[datetime, datetime]:
    """Return from when until when the first certificate of a PEM text is valid (RFC 5280, 4.1).

    Python's `ssl` tells it of certificates of others only, once it has verified them.

    Raises:
        ValueError: there is none.
    """
    found = _FIRST.search(cert)
    if found is None:
        raise ValueError("there is no certificate in PEM")
    _, whole = next(_items(base64.b64decode(found[1])))
    _, signed = next(_items(whole))
    _serial, _algorithm, _issuer, times, *_ = [text for tag, text in _items(signed) if tag != _VERSION]
    begin, end = (_time(tag, text) for tag, text in _items(times))
    return begin, end


def _items(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tags and contents of values in DER that follow each other."""
    while der:
        tag, length, start = der[0], der[1], 2
        if length & 0x80:  # then it says how many bytes the length has
            start += length & 0x7F
            length = int.from_bytes(der[2:start])
        yield tag, der[start : start + length]
        der = der[start + length :]


def _time(tag: int, text: bytes) -> datetime:
    year = "%Y" if tag == _GENERALIZED_TIME else "%y"
    return datetime.strptime(text.decode(), year + "%m%d%H%M%SZ").replace(tzinfo=UTC)


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or "not in PEM"
