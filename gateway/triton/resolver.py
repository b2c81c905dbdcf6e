"""Which addresses a name has, asked again and again: the Tritons behind one name of a cluster.

The system's own resolver is asked, so that search domains, `/etc/hosts` and caches are those of any other
program. Knows nothing of replicas; whoever is told decides what becomes of an address.
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
"""gRPC's own spelling of a target that is resolved; `gateway.setting_types` makes the shorter one this."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses, `ip:port`, of a host and a port; none: it has none.

Raises:
    OSError: nobody could say.
"""

_HAS_NONE = {socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_ADDRFAMILY}
"""An answer: there is no such name, or it has no address that this machine could reach."""


class Outcome(enum.StrEnum):
    """What came of a look; the value is the label `outcome` of `tritongate_upstream_lookups_total`."""

    FOUND = "found"
    NONE = "none"
    """The name has no addresses, or does not exist."""
    FAILED = "failed"
    """No answer."""


@dataclass(frozen=True, slots=True)
class Name:
    """A host whose every address has a Triton at `port`; `upstream` is how it was written."""

    upstream: str
    host: str
    port: int


def name_in(upstream: str) -> Name | None:
    """Return the name that `upstream` asks to be resolved; None: it is one Triton's own address."""
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

    # Not `loop.getaddrinfo`: a process can end only when that has its answer, half a minute where the servers
    # are away. Of this thread nothing is awaited.
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
    """What a `NameWatch` tells of and asks for. Called on the event loop; must not block."""

    def looked_up(self, name: Name, outcome: Outcome, addresses: Sequence[str]) -> None:
        """A look at `name` came to this; `addresses` are none unless they were found."""
        ...

    def serves(self, name: Name) -> bool:
        """Tell whether any Triton of `name` takes requests."""
        ...


class NameWatch:
    """Looks at one name for ever. `watch` is to be run as a task.

    Args:
        name: to look at.
        told: hears of each look.
        interval_s: seconds between two looks while some Triton of the name takes requests.
        backoff: pauses while none does, at most `interval_s`.
        resolve: does the looking.
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
        """Look at once, if no Triton of the name takes requests any more."""
        if not self._told.serves(self.name):
            self._wanted.set()

    async def watch(self) -> None:
        """Look, and look again."""
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
