"""What Tritons say to a command, before there is a gateway: whether they live, and what they have."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from gateway.commands.endpoint import DEFAULT_URL
from gateway.errors import UpstreamProtocolError
from gateway.settings import Settings
from gateway.settings.values import revealed
from gateway.triton.client import Client, EntryState, Tls
from gateway.triton.dialects import Dialects
from gateway.triton.errors import MESSAGE_LIMIT, Fault, TritonError
from gateway.triton.faults import GATEWAY, faults_of
from gateway.triton.resolver import Name, Resolve, client_tls, name_in

_NO_GRPC: Final = "this is no gRPC port; Triton's is 8001 by default, 8000 is its HTTP"
_CLOSED: Final = "it closes the connection: it may want TLS, with upstream_ca, or another upstream_cert"
_CAUSES: Final = {
    "Connection refused": "connection refused",
    "errors resolving": "no such host",
    "Failed parsing HTTP/2": _NO_GRPC,
    "Socket closed": _CLOSED,
    "certificate has expired": "its certificate has expired",
    "CERTIFICATE_VERIFY_FAILED": "upstream_ca does not vouch for its certificate",
    "Hostname Verification": "its certificate is for another name",
    "WRONG_VERSION_NUMBER": "it does not speak TLS: leave out upstream_ca",
}
"""Why a Triton is not reached, by what grpc (1.85) says of it; the first that fits."""

_ASK_GATEWAY: Final = f"`tritongate models --url {DEFAULT_URL}` lists a gateway's models"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    ok: bool
    text: str


@dataclass(slots=True)
class Reached:
    """One address of a Triton."""

    address: str
    findings: list[Finding] = field(default_factory=list)
    entries: frozenset[str] = frozenset()
    """What is in its repository, if that was asked for: no models are named."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Of these, what a gateway does not serve though it is loaded, and why."""
    gateway: bool = False
    """Whether a gateway is there, in the place of a Triton."""

    @property
    def live(self) -> bool:
        """Whether it answers."""
        return self.findings[0].ok


async def reach(
    settings: Settings, timeout_s: float, resolve: Resolve
) -> tuple[list[Finding], list[Reached]]:
    """Ask every Triton of `settings`.

    Args:
        settings: names them, by addresses and by names.
        timeout_s: how long each of looking up and asking may take.
        resolve: looks up names.

    Returns:
        What was found for each name, and the addresses.
    """
    upstreams = settings.all_upstreams()
    names = [name for name in map(name_in, upstreams) if name is not None]
    looked_up = await asyncio.gather(*(_look_up(name, timeout_s, resolve) for name in names))
    fixed = (upstream for upstream in upstreams if name_in(upstream) is None)
    addresses = {address: address for address in fixed}
    for name, (found, _) in zip(names, looked_up, strict=True):
        addresses |= {address: name.upstream for address in found if address not in addresses}
    reached = await asyncio.gather(
        *(
            _reach(settings, address, client_tls(upstream, settings.tls_of), timeout_s)
            for address, upstream in addresses.items()
        )
    )
    return [finding for _, finding in looked_up], reached


async def _look_up(name: Name, timeout_s: float, resolve: Resolve) -> tuple[Sequence[str], Finding]:
    found: Sequence[str] = ()
    try:
        async with asyncio.timeout(timeout_s):
            found = await resolve(name.host, name.port)
    except TimeoutError:
        said = f"not looked up within {timeout_s:g} s"
    except OSError as error:
        said = f"cannot be looked up ({error.strerror or error})"
    else:
        said = ", ".join(found) or "has no addresses"
    return found, Finding(ok=bool(found), text=f"upstream {name.upstream}: {said}")


async def _reach(settings: Settings, address: str, tls: Tls | None, timeout_s: float) -> Reached:
    client = Client(address, repository_key=revealed(settings.repository_key), timeout_s=timeout_s, tls=tls)
    reached = Reached(address)
    try:
        live = await client.live()
        reached.gateway = await _is_gateway(client)
        if reached.gateway:
            said = f"upstream {address} is a tritongate gateway, not a Triton; {_ASK_GATEWAY}"
            reached.findings.append(Finding(ok=False, text=said))
            return reached
        if not settings.models:
            states = await client.repository()
            reached.entries = frozenset(states)
            loaded = sorted(entry for entry, state in states.items() if state is EntryState.READY)
            reached.left_out = await _left_out(client, loaded, Dialects(settings.tokenizers))
        reached.findings.append(
            Finding(ok=live, text=f"upstream {address}: {'live' if live else 'not live'}")
        )
        if settings.warn_of_faults:
            with suppress(TritonError):  # this version's faults are not worth a failure
                faults = await faults_of(client)
                reached.findings += [Finding(ok=True, text=f"  warning: {faults}")] if faults else []
    except TritonError as error:
        why = error.message if error.fault is Fault.NOT_PERMITTED else cause_of(error.detail)
        if why == _CLOSED and await _speaks_http(address, timeout_s):
            why = _NO_GRPC
        said = f"{error.fault.code} ({why})" if why else error.fault.code
        reached.findings.append(Finding(ok=False, text=f"upstream {address}: {said}"))
    finally:
        await client.close()
    return reached


async def _speaks_http(address: str, timeout_s: float) -> bool:
    """Return whether HTTP/1 is spoken there, as on Triton's other two ports: they close what gRPC opens."""
    host, _, port = address.rpartition(":")
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(b"GET / HTTP/1.0\r\n\r\n")
                return await reader.read(5) == b"HTTP/"
            finally:
                writer.close()
    return False


async def _is_gateway(client: Client) -> bool:
    try:
        return bool((await client.server()).name == GATEWAY)
    except TritonError:
        return False  # the metadata are restricted


async def _left_out(client: Client, entries: Sequence[str], dialects: Dialects) -> dict[str, str]:
    """Return which of the entries, which are loaded, cannot be served, each with the reason."""
    reasons = {}
    for entry in entries:
        try:
            metadata = await client.metadata(entry)
            await asyncio.to_thread(dialects.of, entry, metadata)
        except TritonError:
            continue  # it is just being unloaded, or broken
        except UpstreamProtocolError as error:
            reasons[entry] = error.message.replace(f"the model entry {entry!r}", "it").replace("`", "")
    return reasons


def cause_of(detail: str) -> str:
    """Return in a few words why a connection failed, given what grpc says; of other causes, its own words."""
    last = " ".join(detail.rpartition("last error: ")[2].split())[:MESSAGE_LIMIT]
    return next((cause for words, cause in _CAUSES.items() if words in detail), last)
