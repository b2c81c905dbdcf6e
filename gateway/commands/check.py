"""`tritongate check`: connects to what the settings name and says what is there."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

from gateway.commands.models import probed
from gateway.commands.reach import Finding, Reached, cause_of, reach
from gateway.core.events import Accepted
from gateway.core.request import Conversation, Generation, Message, PlainText
from gateway.core.upstream import Embedding, Tokenization
from gateway.errors import GatewayError, InvalidRequestError, NoTemplateError
from gateway.settings import Settings
from gateway.settings.certificates import untimely
from gateway.triton.errors import TritonError
from gateway.triton.public import PublicModels
from gateway.triton.replicas import Replica, ReplicaState
from gateway.triton.resolver import Resolve, resolve

_COUNTED = "Hello, 你好: 3.14 \\n\\n"
"""A text that tokenizers differ in."""


async def check(settings: Settings, *, timeout_s: float, resolve: Resolve = resolve) -> list[Finding]:
    """Connect to every upstream and probe every model.

    Args:
        settings: names the upstreams and perhaps the models.
        timeout_s: how long each of looking up, connecting and probing may take; what was not found by then is
            told as it stands.
        resolve: looks up the addresses of upstreams that are names.

    Returns:
        Findings on the gateway's own certificate, on names, and in the order of the upstreams. The check
        passed when all are ok. Published faults of a Triton are no failure, but told.
    """
    looked_up, reached = await reach(settings, timeout_s, resolve)
    looked_up = [*_certificate(settings), *looked_up]
    if not any(each.live for each in reached):
        return [*looked_up, *_report(settings, reached, [], [])]
    async with probed(settings, timeout_s, resolve) as upstream:
        cards = [card for card in upstream.models() if card.ready]
        asked = [_count(upstream, card.id, timeout_s) for card in cards if card.settings.tokenizer]
        counts = await asyncio.gather(*asked)
        replicas = upstream.replicas()
        ready = {name: each for name, each in replicas if each.state is ReplicaState.READY}
        chats = [each async for each in _chats(upstream, ready, timeout_s)]
    return [*looked_up, *_report(settings, reached, replicas, [*counts, *chats])]


def _certificate(settings: Settings) -> Iterator[Finding]:
    fault = settings.tls_cert and untimely(Path(settings.tls_cert).read_bytes())
    if fault:
        yield Finding(ok=False, text=f"tls_cert: {settings.tls_cert} {fault}")


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
        if await _embeds(upstream, model, deadline):
            return Finding(ok=True, text=f"model {model}: embeds; its tokenizer was not compared")
        return Finding(ok=False, text=f"model {model}: its tokens cannot be counted ({error.message})")
    here = len(tokens.ids)
    if counted == [here]:
        return Finding(ok=True, text=f"model {model}: its tokenizer counts as the model does")
    return Finding(
        ok=False,
        text=f"model {model}: its tokenizer is another one: it makes {here} tokens of a text in which the "
        f"model counts {counted[0] if counted else 'none'}",
    )


async def _chats(
    upstream: PublicModels, ready: Mapping[str, Replica], timeout_s: float
) -> AsyncIterator[Finding]:
    """Yield which of the models that are ready refuse every chat, though they write text."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    hello = Conversation((Message(role="user", content="Hello"),))
    for name, replica in ready.items():
        chat = Generation(request_id="check", model=replica.model, prompt=hello, deadline=deadline)
        try:
            dialect, report = replica.serving()
            if dialect.prepare is not None:
                chat = await dialect.prepare(chat, report)
            dialect.request(chat, report, timeout_s)
        except TritonError:
            continue  # it went meanwhile
        except NoTemplateError:
            if await _embeds(upstream, name, deadline):
                continue
            yield Finding(
                ok=True,
                text=f"model {name}: no chat template: chats get a 400, completions work; "
                f"set tokenizers to {replica.model}=FOLDER",
            )
        except InvalidRequestError:
            continue  # it refuses this one for another reason


async def _embeds(upstream: PublicModels, model: str, deadline: float) -> bool:
    """Ask the model for a vector: of its vLLM backend, Triton says the same whether it embeds or writes."""
    text = Embedding(request_id="check", model=model, prompt=PlainText("Hello"), deadline=deadline)
    try:
        await upstream.embed(text)
    except GatewayError:
        return False
    return True


def _report(
    settings: Settings,
    reached: Sequence[Reached],
    replicas: list[tuple[str, Replica]],
    models: Sequence[Finding],
) -> Iterator[Finding]:
    for each in reached:
        yield from each.findings
        for name, replica in replicas:
            if replica.upstream == each.address:
                yield _replica(name, replica)
        for entry, reason in each.left_out.items():
            # Beside models that are served, as a part of theirs, it is no failure.
            yield Finding(ok=True, text=f"  model {entry}: left out ({reason})")
    yield from models
    served = {name for name, replica in replicas if replica.state is ReplicaState.READY}
    for model in settings.models:
        if model not in served:
            yield Finding(ok=False, text=f"model {model}: ready on no upstream")
    if all(each.live for each in reached):  # else those that are away may have it
        yield from _unused(settings, reached)
    if any(each.live for each in reached) and not served and not settings.models:
        reasons = replicas or any(each.left_out for each in reached)
        why = "see the reasons above" if reasons else "none is loaded"
        yield Finding(ok=False, text=f"no model can be served: {why}")


def _unused(settings: Settings, reached: Sequence[Reached]) -> Iterator[Finding]:
    """Yield which names other settings give to models that none has."""
    models = {name: settings.model(name) for name in settings.models}
    entries = {model.entry for model in models.values()}.union(*(each.entries for each in reached))
    public = {*models} or entries
    aliases = {alias for model in models.values() for alias in model.aliases}
    adapters = {each for model in models.values() for each in model.adapters}
    adapters |= _named(settings.adapters)
    given = [
        ("tokenizers", _named(settings.tokenizers), public | entries),
        ("contract", _named(settings.contract), public | entries),
        ("pinned_models", settings.pinned_models, public | aliases | entries),
        *(
            (f"models of the key {key.name}", key.models, public | aliases | adapters)
            for key in settings.api_keys
        ),
    ]
    for what, names, known in given:
        for name in sorted({*names} - known):
            there = ", ".join(sorted(known)) or "none"
            yield Finding(ok=False, text=f"{what}: no model is called {name!r}; there are: {there}")


def _named(values: Sequence[str]) -> set[str]:
    """Return the names in NAME=VALUE, but not that of what is for all."""
    return {each.rpartition("=")[0] for each in values} - {""}


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
        said += f" ({cause_of(replica.reason)})"
    return Finding(ok=ready, text=said)
