"""`tritongate check`: connects to what the settings name and says what is there."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from gateway.commands.models import probed
from gateway.core.events import Accepted
from gateway.core.request import Generation, PlainText
from gateway.core.upstream import Tokenization
from gateway.errors import GatewayError
from gateway.settings import Settings
from gateway.settings.values import revealed
from gateway.triton.client import Client, Tls
from gateway.triton.errors import Fault, TritonError
from gateway.triton.faults import faults_of
from gateway.triton.public import PublicModels
from gateway.triton.replicas import Replica, ReplicaState
from gateway.triton.resolver import Name, Resolve, client_tls, name_in, resolve

_COUNTED = "Hello, 你好: 3.14 \\n\\n"
"""A text that tokenizers differ in."""


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
        Findings in the order of the upstreams, names first; the check passed when all are ok. Published
        faults of a Triton are no failure, but told.
    """
    upstreams = settings.all_upstreams()
    names = [name for name in map(name_in, upstreams) if name is not None]
    looked_up = await asyncio.gather(*(_look_up(name, timeout_s, resolve) for name in names))
    fixed = (upstream for upstream in upstreams if name_in(upstream) is None)
    addresses = {address: address for address in fixed}
    for name, (found, _) in zip(names, looked_up, strict=True):
        addresses |= {address: name.upstream for address in found if address not in addresses}
    reachable = await asyncio.gather(
        *(
            _reach(settings, address, client_tls(upstream, settings.tls_of), timeout_s)
            for address, upstream in addresses.items()
        )
    )
    reached = dict(zip(addresses, reachable, strict=True))
    if not any(first.ok for first, *_ in reachable):
        said = list(_report(settings, reached, [], []))
    else:
        async with probed(settings, timeout_s, resolve) as upstream:
            ready = [card for card in upstream.models() if card.ready and card.settings.tokenizer]
            counts = [await _count(upstream, card.id, timeout_s) for card in ready]
            said = list(_report(settings, reached, upstream.replicas(), counts))
    return [*(finding for _, finding in looked_up), *said]


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


async def _reach(settings: Settings, address: str, tls: Tls | None, timeout_s: float) -> list[Finding]:
    client = Client(address, repository_key=revealed(settings.repository_key), timeout_s=timeout_s, tls=tls)
    faults = None
    try:
        live = await client.live()
        if not settings.models:
            await client.repository()
        with suppress(TritonError):  # this version's faults are not worth a failure
            faults = await faults_of(client)
    except TritonError as error:
        why = f" ({error.message})" if error.fault is Fault.NOT_PERMITTED else ""
        return [Finding(ok=False, text=f"upstream {address}: {error.fault.code}{why}")]
    finally:
        await client.close()
    reached = Finding(ok=live, text=f"upstream {address}: {'live' if live else 'not live'}")
    return [reached, *([Finding(ok=True, text=f"  warning: {faults}")] if faults else [])]


async def _count(upstream: PublicModels, model: str, timeout_s: float) -> Finding:
    """Compare how many tokens a model counts in a prompt with what its tokenizer here makes of it."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    prompt = PlainText(_COUNTED)
    try:
        tokens = await upstream.tokenize(
            Tokenization(request_id="check", model=model, prompt=prompt, deadline=deadline)
        )
        answer = upstream.generate(
            Generation(request_id="check", model=model, prompt=prompt, deadline=deadline, max_tokens=1)
        )
        async with aclosing(answer):
            counted = [event.prompt_tokens async for event in answer if isinstance(event, Accepted)]
    except GatewayError as error:
        return Finding(ok=False, text=f"model {model}: its tokens cannot be counted ({error.message})")
    here = len(tokens.ids)
    if counted == [here]:
        return Finding(ok=True, text=f"model {model}: its tokenizer counts as the model does")
    return Finding(
        ok=False,
        text=f"model {model}: its tokenizer is another one: it makes {here} tokens of a text in which the "
        f"model counts {counted[0] if counted else 'none'}",
    )


def _report(
    settings: Settings,
    reachable: Mapping[str, list[Finding]],
    replicas: list[tuple[str, Replica]],
    counts: Sequence[Finding],
) -> Iterator[Finding]:
    for address, findings in reachable.items():
        yield from findings
        for name, replica in replicas:
            if replica.upstream == address:
                yield _replica(name, replica)
    yield from counts
    served = {name for name, replica in replicas if replica.state is ReplicaState.READY}
    for model in settings.models:
        if model not in served:
            yield Finding(ok=False, text=f"model {model}: ready on no upstream")
    anybody = any(first.ok for first, *_ in reachable.values())
    if anybody and not served and not settings.models:
        yield Finding(ok=False, text="no model was found: no ready entry has a known contract")


def _replica(name: str, replica: Replica) -> Finding:
    ready = replica.state is ReplicaState.READY
    entry = "" if name == replica.model else f", entry {replica.model}"
    said = f"  model {name}: {replica.state}{entry}"
    report = replica.report
    if replica.dialect is not None and (report is None or report.chat_format is None):
        said += f", dialect {replica.dialect}"
    if report is not None and report.chat_format is not None:
        said += f", format {report.chat_format}"
    if report is not None and report.max_context is not None:
        said += f", context {report.max_context} tokens"
    if replica.reason:
        said += f" ({replica.reason})"
    return Finding(ok=ready, text=said)
