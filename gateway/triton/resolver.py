"""Watches the addresses of a DNS name: the Tritons behind one name of a cluster.

Uses the system's resolver, so that search domains, `/etc/hosts` and caches work as for any other program.
Knows nothing of replicas: it only reports addresses.
"""

import asyncio
import contextlib
import enum
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.triton.backoff import Backoff

_log = logging.getLogger(__name__)

_SCHEME = "dns:///"
"""gRPC's spelling of a target that is resolved; `gateway.setting_types` turns the shorter one into this."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses, `ip:port`, of a host and a port; there may be none.

Raises:
    OSError: the lookup failed.
"""

_HAS_NONE = {socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_ADDRFAMILY}
"""Errors that are an answer: no such name, or no address that this machine could reach."""


class Outcome(enum.StrEnum):
    """The result of a lookup; the value is the label `outcome` of `tritongate_upstream_lookups_total`."""

    FOUND = "found"
    NONE = "none"
    """The name has no addresses, or does not exist."""
    FAILED = "failed"
    """No answer."""


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
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def tell(found: list[str] | OSError) -> None:
        if answer.done():
            return  # nobody waits any more
        if isinstance(found, OSError):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def ask() -> None:
        found: list[str] | OSError
        try:
            found = _ask(host, port)
        except OSError as error:
            found = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(tell, found)

    # Not `loop.getaddrinfo`: the process could not end before its answer, half a minute if the DNS servers
    # do not respond. Nothing waits for this daemon thread.
    threading.Thread(target=ask, name=f"resolve {host}", daemon=True).start()
    return await answer


def _ask(host: str, port: int) -> list[str]:
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


class Lookups(Protocol):
    """The owner of a `NameWatch`. Called on the event loop; must not block."""

    def looked_up(self, name: Name, outcome: Outcome, addresses: Sequence[str]) -> None:
        """`name` was looked up; `addresses` is empty unless the outcome is `FOUND`."""
        ...

    def serves(self, name: Name) -> bool:
        """Return whether any Triton of `name` takes requests."""
        ...


class NameWatch:
    """Looks up one name periodically; run `watch` as a task.

    Args:
        name: to look up.
        told: told of each lookup.
        interval_s: seconds between two lookups while some Triton of the name takes requests.
        backoff: pauses while none does, at most `interval_s`.
        resolve: does the lookup.
    """

    def __init__(
        self, name: Name, told: Lookups, *, interval_s: float, backoff: Backoff, resolve: Resolve
    ) -> None:
        self.name = name
        self._told = told
        self._interval_s = interval_s
        self._backoff = backoff
        self._resolve = resolve
        self._outcome = Outcome.FOUND
        self._wanted = asyncio.Event()

    def look_soon(self) -> None:
        """Look it up at once, if no Triton of the name takes requests any more."""
        if not self._told.serves(self.name):
            self._wanted.set()

    async def watch(self) -> None:
        """Look it up for ever."""
        while True:
            await self._look()
            if self._told.serves(self.name):
                self._backoff.reset()
                self._wanted.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._wanted.wait()
            else:
                await asyncio.sleep(min(self._backoff.next(), self._interval_s))

    async def _look(self) -> None:
        addresses: Sequence[str] = ()
        try:
            addresses = await self._resolve(self.name.host, self.name.port)
        except OSError as error:
            outcome, detail = Outcome.FAILED, error.strerror or str(error)
        except Exception as error:  # noqa: BLE001 - nobody awaits this task, and without it the name is frozen
            outcome, detail = Outcome.FAILED, f"{type(error).__name__}: {error}"
        else:
            outcome, detail = (Outcome.FOUND if addresses else Outcome.NONE), ""
        if outcome is not self._outcome:
            level = logging.INFO if outcome is Outcome.FOUND else logging.WARNING
            extra = {"upstream": self.name.upstream, "detail": detail}
            _log.log(level, "addresses of a name: %s", outcome.value, extra=extra)
            self._outcome = outcome
        self._told.looked_up(self.name, outcome, addresses)
