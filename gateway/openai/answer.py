"""What the answers of all generating routes share: their heads, token counts, and the course of a stream.

Encoding happens for every chunk of every stream, so the documents are msgspec structs with one shared
encoder.
"""

import hashlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.errors import UpstreamProtocolError
from gateway.generation import Accepted, Call, Delta, Event, FinishReason, TokenLogprob
from gateway.generation import Usage as TokenCounts
from gateway.openai.generation_request import StreamOptions
from gateway.version import version

encode = msgspec.json.Encoder().encode


class PromptTokensDetails(Struct, frozen=True):
    """What of the prompt was not computed again."""

    cached_tokens: int


class Usage(Struct, frozen=True, omit_defaults=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Head:
    """What all documents of one answer share."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, kind: str, model: str) -> "Head":
        """Make a unique one for an answer that begins now; its id begins with `kind`."""
        digest = hashlib.sha256(f"{version()}/{model}".encode()).hexdigest()
        return cls(f"{kind}-{secrets.token_hex(12)}", int(time.time()), model, f"fp_{digest[:10]}")


def usage_document(counts: TokenCounts) -> Usage:
    """Write token counts; cached tokens are named only where there were any."""
    return Usage(
        counts.prompt_tokens,
        counts.completion_tokens,
        counts.prompt_tokens + counts.completion_tokens,
        PromptTokensDetails(counts.cached_tokens) if counts.cached_tokens else UNSET,
    )


@dataclass(frozen=True, slots=True)
class Gathered:
    """A whole answer."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    calls: list[Call]
    finish_reason: FinishReason
    usage: Usage


async def gather(events: AsyncIterator[Event]) -> Gathered:
    """Put the events after `Accepted` together.

    Raises:
        UpstreamProtocolError: they end without a finish reason or without usage.
        GatewayError: whatever ends them early.
    """
    text: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    calls: list[Call] = []
    finish_reason: FinishReason | None = None
    usage: TokenCounts | None = None
    async for event in events:
        if type(event) is not Delta:
            continue
        text.append(event.text)
        token_ids.extend(event.token_ids or ())
        logprobs.extend(event.logprobs or ())
        calls.extend(event.calls)
        finish_reason = event.finish_reason or finish_reason
        usage = event.usage or usage
    if finish_reason is None or usage is None:
        raise incomplete()
    return Gathered("".join(text), token_ids, logprobs, calls, finish_reason, usage_document(usage))


class ChunkWriter(ABC):
    """Turns the events of one answer into encoded chunks; each route has its own documents.

    Args:
        accepted: gives the prompt's token count for running usage.
        options: whether a last chunk without choices carries usage, and the ones before null or, with
            continuous usage, the counts so far.
    """

    def __init__(self, accepted: Accepted, options: StreamOptions | None) -> None:
        options = options or StreamOptions()
        self._prompt_tokens = accepted.prompt_tokens
        self._include_usage = options.include_usage
        self._continuous_usage = options.continuous_usage_stats
        self._completion_tokens = 0
        self._finished = False
        self._usage: TokenCounts | None = None

    def write(self, event: Event) -> list[bytes]:
        """Return the chunks that `event` makes, often one, none for a heartbeat or text held back."""
        if type(event) is not Delta:
            return []
        self._completion_tokens += event.tokens
        self._usage = event.usage or self._usage
        if event.finish_reason is not None:
            self._finished = True
        return self._delta(event, self._running_usage())

    def close(self) -> list[bytes]:
        """Return the chunks after the last event.

        Raises:
            UpstreamProtocolError: the events ended without a finish reason or without usage.
        """
        if not self._finished or self._usage is None:
            raise incomplete()
        return [self._counts(usage_document(self._usage))] if self._include_usage else []

    @abstractmethod
    def _delta(self, delta: Delta, usage: Usage | UnsetType | None) -> list[bytes]:
        """Return the chunks of one delta, with `usage` in each."""

    @abstractmethod
    def _counts(self, usage: Usage) -> bytes:
        """Return the chunk without choices."""

    def _running_usage(self) -> Usage | UnsetType | None:
        if not self._include_usage:
            return UNSET
        if not self._continuous_usage:
            return None
        return usage_document(
            TokenCounts(prompt_tokens=self._prompt_tokens, completion_tokens=self._completion_tokens)
        )


class Answer(Protocol):
    """How one route writes the answer to one request."""

    async def whole(self, accepted: Accepted, events: AsyncIterator[Event]) -> Struct:
        """Return the events after `accepted` as one document.

        Raises:
            GatewayError: whatever ends them early.
        """
        ...

    def chunks(self, accepted: Accepted) -> ChunkWriter:
        """Return what writes them as a stream."""
        ...


def incomplete() -> UpstreamProtocolError:
    """Return the error for an answer that stopped without saying how it ended."""
    return UpstreamProtocolError("The upstream ended the answer without a finish reason or token counts.")
