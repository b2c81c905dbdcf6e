"""`tritongate models` and `tritongate prompt`: what is served, and what a model is given to read.

Both go the gateway's own way: the settings, the upstream that a gateway would have, its readers of requests.
"""

import asyncio
import codecs
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from gateway.app import triton_upstream
from gateway.chat.templates import TemplateError
from gateway.chat.vocabulary import VocabularyError
from gateway.commands.endpoint import ClientError, fetch
from gateway.commands.reach import cause_of, reach
from gateway.core.request import with_system
from gateway.core.upstream import Tokens
from gateway.errors import GatewayError
from gateway.openai.document import Reading, read_object
from gateway.openai.tokenize import TokenizeRequest
from gateway.openai.wording import why_not_json
from gateway.settings import Settings
from gateway.triton.dialects.model_text import ModelText
from gateway.triton.public import PublicModels
from gateway.triton.resolver import Resolve, resolve

_COLUMNS = ("model", "aliases", "entry", "upstreams", "dialect", "state", "context", "reason")
_NOTHING = "-"


@asynccontextmanager
async def probed(
    settings: Settings, timeout_s: float, resolve: Resolve = resolve
) -> AsyncIterator[PublicModels]:
    """Connect to the Tritons of `settings` for a block, which begins once all were asked.

    Args:
        settings: name the models.
        timeout_s: how long that may take; the block then begins with what is known.
        resolve: looks up names of Tritons.
    """
    upstream = triton_upstream(settings, resolve=resolve)
    await upstream.start()
    try:
        await upstream.asked(timeout_s)
        yield upstream
    finally:
        await upstream.close()


def _check_any(upstream: PublicModels) -> None:
    if not upstream.models():
        raise ClientError("no model was found; `tritongate check` says what is at each upstream")


async def models_of(settings: Settings, *, timeout_s: float) -> list[dict[str, str]]:
    """Return a row for each public name, of strings by `_COLUMNS`, and for what is found but not served.

    Args:
        settings: name the models.
        timeout_s: how long the Tritons may take to answer.

    Raises:
        ClientError: there is none, or no Triton.
    """
    rows = []
    _, reached = await reach(settings, timeout_s, resolve)
    if reached and all(each.gateway for each in reached):
        raise ClientError(reached[0].findings[0].text)
    async with probed(settings, timeout_s) as upstream:
        if not any(each.left_out for each in reached):
            _check_any(upstream)
        replicas = upstream.replicas()
        for card in upstream.models():
            own = [replica for name, replica in replicas if name == card.id]
            rows.append(
                {
                    "model": card.id,
                    "aliases": _listed(card.settings.aliases),
                    "entry": card.settings.entry,
                    "upstreams": _listed(card.settings.upstreams),
                    "dialect": _listed(each.dialect for each in own if each.dialect),
                    "state": _listed(replica.state for replica in own),
                    "context": str(card.max_context or _NOTHING),
                    "reason": _listed(_line(each.reason) for each in own if each.reason),
                }
            )
    return [
        *rows,
        *(
            {
                **dict.fromkeys(_COLUMNS, _NOTHING),
                "model": entry,
                "entry": entry,
                "upstreams": each.address,
                "state": "left_out",
                "reason": reason,
            }
            for each in reached
            for entry, reason in each.left_out.items()
        ),
    ]


def models_at(url: str, key: str | None) -> list[dict[str, str]]:
    """Return such rows of a running gateway, which tells its clients nothing of entries and Tritons.

    Raises:
        ClientError: it cannot be asked, refuses, has none, or is no gateway.
    """
    listed = fetch(url, key, "/v1/models").get("data", [{}])
    if not all("ready" in each for each in listed):
        raise ClientError(f"{url} does not tell of its models as a gateway does")
    if not listed:
        raise ClientError(f"{url} lists no models")
    return [
        {
            "model": each["id"],
            "aliases": _listed(other["id"] for other in listed if other.get("root") == each["id"]),
            "state": "ready" if each["ready"] else "unloaded" if each.get("unloaded") else "not ready",
            "context": str(each.get("max_model_len", _NOTHING)),
        }
        for each in listed
        if "root" not in each
    ]


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as text for a terminal."""
    columns = [name for name in _COLUMNS if any(name in row for row in rows)]
    lines = [dict(zip(columns, columns, strict=True)), *rows]
    widths = {name: max(len(line[name]) for line in lines) for name in columns}
    return "\n".join("  ".join(f"{line[name]:{widths[name]}}" for name in columns).rstrip() for line in lines)


def _line(reason: str) -> str:
    """Return a reason in one line, a short one where it is a connection's."""
    return cause_of(reason) or " ".join(reason.split())


def _listed(values: Iterable[str]) -> str:
    return ",".join(dict.fromkeys(values)) or _NOTHING


async def prompt_of(settings: Settings, model: str, body: Any, *, timeout_s: float) -> Tokens:
    """Return what a model is given for a conversation: the text as far as it can be shown, and the ids.

    It is asked for on the model's Triton. If that cannot be reached, the tokenizer's folder is read here.

    Args:
        settings: name the models.
        model: a public name or an alias.
        body: a list of messages, or a request's object with `messages` or `prompt`, and perhaps `tools`.
        timeout_s: how long the Triton may take to answer.

    Raises:
        ClientError: there is no model at all.
        GatewayError: there is no such model, or it cannot express the conversation.
    """
    document = {"messages": body} if isinstance(body, list) else dict(body)
    known = TokenizeRequest.model_fields
    document = {name: value for name, value in document.items() if name in known}
    text = json.dumps(document | {"model": model, "return_token_strs": True}).encode()
    async with probed(settings, timeout_s) as upstream:
        _check_any(upstream)
        card = upstream.model(model)
        folder = card.settings.tokenizer
        here = None if card.ready or folder is None else ModelText.read(Path(folder))
        reads = card.template_reads if here is None or here.template is None else here.template.reads
        deadline = asyncio.get_running_loop().time() + timeout_s
        requested = TokenizeRequest.read(text, Reading(reads=reads))
        request = requested.tokenization(request_id="prompt", deadline=deadline)
        if here is None:
            return await upstream.tokenize(request)
        prompt = request.prompt
        if card.settings.system is not None:
            prompt = with_system(prompt, card.settings.system)
        return here.tokens(structs.replace(request, prompt=prompt))


def show(tokens: Tokens) -> str:
    """Return a prompt as text for a terminal."""
    text = tokens.text or "".join(tokens.strings or ())
    return f"{text}\n\n{len(tokens.ids)} tokens: {' '.join(map(str, tokens.ids))}"


def print_prompt(settings: Settings, model: str, text: bytes, timeout_s: float) -> None:
    """Print what `model` is given for the JSON in `text`.

    Raises:
        ClientError: it cannot be told.
    """
    try:
        text = text.removeprefix(codecs.BOM_UTF8)
        body = json.loads(text) if text.lstrip().startswith(b"[") else read_object(text)
        click.echo(show(asyncio.run(prompt_of(settings, model, body, timeout_s=timeout_s))))
    except ValueError:
        raise ClientError(f"the messages are not valid JSON: {why_not_json(text)}") from None
    except RecursionError:
        raise ClientError("the messages are nested too deeply") from None
    except (GatewayError, TemplateError, VocabularyError) as error:
        raise ClientError(str(error)) from None
