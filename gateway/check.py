"""`tritongate check`: connects to what the settings name and says what is there."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.settings import Settings
from gateway.triton.channel import Channel
from gateway.triton.control import Control
from gateway.triton.pool import ReplicaReport, TritonUpstream
from gateway.triton.replicas import ReplicaState
from gateway.triton.status import TritonError

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    ok: bool
    text: str


async def check(settings: Settings, *, timeout_s: float) -> list[Finding]:
    """Connect to every upstream and probe every model.

    Args:
        settings: names the upstreams and perhaps the models.
        timeout_s: how long all of it may take; what was not found by then is told as it stands.

    Returns:
        Findings in the order of the upstreams; the check passed when all are ok.
    """
    reachable = await asyncio.gather(*(_reach(address, timeout_s) for address in settings.upstreams))
    replicas = await _probe(settings, timeout_s) if any(found.ok for found in reachable) else []
    return list(_report(settings, reachable, replicas))


async def _reach(address: str, timeout_s: float) -> Finding:
    channel = Channel(address)
    try:
        live = await Control(channel, timeout_s=timeout_s).live()
    except TritonError as error:
        return Finding(ok=False, text=f"upstream {address}: {error.fault.value}")
    finally:
        await channel.close()
    return Finding(ok=live, text=f"upstream {address}: {'live' if live else 'not live'}")


async def _probe(settings: Settings, timeout_s: float) -> list[ReplicaReport]:
    upstream = TritonUpstream(
        upstreams=settings.upstreams, models=settings.models, idle_timeout_s=settings.idle_timeout_s
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


def _report(settings: Settings, reachable: list[Finding], replicas: list[ReplicaReport]) -> Iterator[Finding]:
    for address, finding in zip(settings.upstreams, reachable, strict=True):
        yield finding
        for replica in replicas:
            if replica.upstream == address:
                yield _replica(replica)
    served = {replica.model for replica in replicas if replica.state is ReplicaState.READY}
    for model in settings.models:
        if model not in served:
            yield Finding(ok=False, text=f"model {model}: ready on no upstream")
    if not served and not settings.models:
        yield Finding(ok=False, text="no model was found: no entry that ends in -stream is ready")


def _replica(replica: ReplicaReport) -> Finding:
    ready = replica.state is ReplicaState.READY
    said = f"  model {replica.model}: {replica.state}"
    if replica.report is not None:
        said += f", format {replica.report.chat_format}, context {replica.report.max_context} tokens"
    if replica.reason:
        said += f" ({replica.reason})"
    return Finding(ok=ready, text=said)
