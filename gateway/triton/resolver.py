"""Names of Tritons: what in the configuration is one, the addresses that it has, and how to speak TLS there.

The system's resolver is asked, so that search domains, `/etc/hosts` and caches work as for any other program.
"""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from gateway.settings.certificates import TlsFiles
from gateway.triton.client import Tls

_SCHEME = "dns:///"
"""gRPC's spelling of a target that is resolved; `gateway.settings` turns the shorter one into this."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses, `ip:port`, of a host and a port; there may be none.

Raises:
    OSError: the lookup failed.
"""

TlsOf = Callable[[str], TlsFiles | None]
"""Returns how to speak TLS to one of the configured upstreams; None: without."""

_HAS_NONE = {socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_ADDRFAMILY}
"""Errors that are an answer: no such name, or no address that this machine could reach."""


@dataclass(frozen=True, slots=True)
class Name:
    """A host with a Triton at `port` of each of its addresses; `upstream` is its original spelling."""

    upstream: str
    host: str
    port: int


def name_in(upstream: str) -> Name | None:
    """Return the name in `upstream`; None: it is the address of one Triton."""
    if not upstream.startswith(_SCHEME):
        return None
    host, _, port = upstream.removeprefix(_SCHEME).rpartition(":")
    return Name(upstream, host.strip("[]"), int(port))


async def resolve(host: str, port: int) -> list[str]:
    """Ask the system's resolver on a thread: see `Resolve`.

    An address of a family (IPv4, IPv6) that this machine has no address of is left out.
    """
    answer: Future[list[str]] = Future()
    answer.set_running_or_notify_cancel()  # so that the thread need not know whether anybody still waits

    def look_up() -> None:
        try:
            answer.set_result(_look_up(host, port))
        except OSError as error:
            answer.set_exception(error)

    # Not `loop.getaddrinfo`: the process could not end before its answer, half a minute if the DNS servers
    # do not respond. Nothing waits for this daemon thread.
    threading.Thread(target=look_up, name=f"resolve {host}", daemon=True).start()
    return await asyncio.wrap_future(answer)


def _look_up(host: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    except socket.gaierror as error:
        if error.errno in _HAS_NONE:
            return []
        raise
    except UnicodeError as error:
        raise OSError(f"{host!r} is no name of the DNS: {error}") from None
    hosts = (str(address[0]) for *_, address in found)
    return list(dict.fromkeys(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts))


def client_tls(upstream: str, tls_of: TlsOf) -> Tls | None:
    """Return how to speak TLS to a Triton at an address that `upstream` is, or leads to.

    Whoever answers at an address that came from the DNS must have a certificate for the name.
    """
    files, name = tls_of(upstream), name_in(upstream)
    return None if files is None else Tls(files, None if name is None else name.host)
