"""`tritongate check`: connects to what the settings name and says what is there."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gateway.setting_types import revealed
from gateway.settings import Settings
from gateway.triton.client import Client, Control
from gateway.triton.errors import Fault, TritonError
from gateway.triton.pool import TritonUpstream
from gateway.triton.replicas import ReplicaReport, ReplicaState
from gateway.triton.resolver import Name, Resolve, name_in, resolve

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    ok: bool
    text: str


async def check(settings: Settings, *, timeout_s: float, resolve: Resolve = resolve) -> list[Finding]:
    """Connect to every upstream and probe every model.

    Args:
        settings: names the upstreams and perhaps the models.
        timeout_s: how long each of looking up, connecting and probing may take; what was not found by then is
            told as it stands.
        resolve: looks up the addresses of upstreams that are names.

    Returns:
        Findings in the order of the upstreams, names first; the check passed when all are ok.
    """
    names = [name for name in map(name_in, settings.upstreams) if name is not None]
    looked_up = await asyncio.gather(*(_look_up(name, timeout_s, resolve) for name in names))
    fixed = (upstream for upstream in settings.upstreams if name_in(upstream) is None)
    addresses = tuple(dict.fromkeys([*fixed, *(each for found, _ in looked_up for each in found)]))
    reachable = await asyncio.gather(*(_reach(settings, address, timeout_s) for address in addresses))
    replicas = await _probe(settings, addresses, timeout_s) if any(found.ok for found in reachable) else []
    return [
        *(finding for _, finding in looked_up),
        *_report(settings, dict(zip(addresses, reachable, strict=True)), replicas),
    ]


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


async def _reach(settings: Settings, address: str, timeout_s: float) -> Finding:
    client = Client(address, repository_key=revealed(settings.repository_key))
    control = Control(client, timeout_s=timeout_s)
    try:
        live = await control.live()
        if not settings.models:
            await control.repository()
    except TritonError as error:
        why = f" ({error.message})" if error.fault is Fault.NOT_PERMITTED else ""
        return Finding(ok=False, text=f"upstream {address}: {error.fault.value}{why}")
    finally:
        await client.close()
    return Finding(ok=live, text=f"upstream {address}: {'live' if live else 'not live'}")


async def _probe(settings: Settings, addresses: Sequence[str], timeout_s: float) -> list[ReplicaReport]:
    upstream = TritonUpstream(
        upstreams=addresses,
        models=settings.models,
        idle_timeout_s=settings.idle_timeout_s,
        repository_key=revealed(settings.repository_key),
    )
    await upstream.start()
    try:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while asyncio.get_running_loop().time() < deadline:
            replicas = upstream.replicas()
            if replicas and all(replica.state is not ReplicaState.UNKNOWN for replica in replicas):
                break
            await asyncio.sleep(_POLL_S)
        return upstream.replicas()
    finally:
        await upstream.close()


def _report(
    settings: Settings, reachable: Mapping[str, Finding], replicas: list[ReplicaReport]
) -> Iterator[Finding]:
    for address, finding in reachable.items():
        yield finding
        for replica in replicas:
            if replica.upstream == address:
                yield _replica(replica)
    served = {replica.model for replica in replicas if replica.state is ReplicaState.READY}
    for model in settings.models:
        if model not in served:
            yield Finding(ok=False, text=f"model {model}: ready on no upstream")
    if not served and not settings.models:
        yield Finding(ok=False, text="no model was found: no ready entry has a known contract")


def _replica(replica: ReplicaReport) -> Finding:
    ready = replica.state is ReplicaState.READY
    said = f"  model {replica.model}: {replica.state}"
    if replica.report is not None:
        said += f", format {replica.report.chat_format}, context {replica.report.max_context} tokens"
    if replica.reason:
        said += f" ({replica.reason})"
    return Finding(ok=ready, text=said)
