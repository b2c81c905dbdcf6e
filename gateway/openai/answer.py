"""What the answers of all generating routes share: their common fields, token counts, and streaming.

Encoding happens for every chunk of every stream, so the documents are msgspec structs with one shared
encoder.
"""

import hashlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.errors import GatewayError, UpstreamProtocolError
from gateway.generation import (
    Accepted,
    Delta,
    Event,
    FinishReason,
    PromptLogprob,
    StopReason,
    TokenLogprob,
    TopLogprob,
)
from gateway.generation import Usage as TokenCounts
from gateway.openai.generation_request import StreamOptions
from gateway.pieces import Call, joined_calls
from gateway.version import version

encode = msgspec.json.Encoder().encode

D = TypeVar("D", bound=Struct)


class PromptTokensDetails(Struct, frozen=True):
    """How much of the prompt was found in the prefix cache."""

    cached_tokens: int


class Usage(Struct, frozen=True, omit_defaults=True):
    """Token counts of a request; those of a stream that goes on have no details."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that all documents of one answer share."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, kind: str, model: str) -> "Head":
        """Make the head of an answer that begins now; its unique id begins with `kind`."""
        digest = hashlib.sha256(f"{version()}/{model}".encode()).hexdigest()
        return cls(f"{kind}-{secrets.token_hex(12)}", int(time.time()), model, f"fp_{digest[:10]}")

    def document(self, kind: type[D], **rest: Any) -> D:
        """Make a document of type `kind` from this head and the `rest` of its fields."""
        return kind(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.system_fingerprint,
            **rest,
        )


def usage_document(counts: TokenCounts) -> Usage:
    """Write the token counts of a request that is complete."""
    return Usage(
        counts.prompt_tokens,
        counts.completion_tokens,
        counts.prompt_tokens + counts.completion_tokens,
        PromptTokensDetails(counts.cached_tokens),
    )


@dataclass(frozen=True, slots=True)
class Gathered:
    """One complete choice."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[PromptLogprob]
    calls: list[Call]
    finish_reason: FinishReason
    stop_reason: StopReason | None


async def gather(events: AsyncIterator[Event], choices: int) -> tuple[list[Gathered], Usage]:
    """Collect the events after `Accepted` into `choices` complete choices, and the usage.

    Raises:
        UpstreamProtocolError: they end without usage, or a choice without a finish reason.
        GatewayError: the generation failed.
    """
    deltas: list[list[Delta]] = [[] for _ in range(choices)]
    usage: TokenCounts | None = None
    async for event in events:
        if type(event) is Delta:
            deltas[event.index].append(event)
            usage = event.usage or usage
    if usage is None:
        raise incomplete()
    return [_joined(index, each) for index, each in enumerate(deltas)], usage_document(usage)


def _joined(index: int, deltas: Sequence[Delta]) -> Gathered:
    finish_reason = deltas[-1].finish_reason if deltas else None
    if finish_reason is None:
        raise incomplete()
    return Gathered(
        index,
        "".join([delta.text for delta in deltas]),
        [token_id for delta in deltas for token_id in delta.token_ids or ()],
        [logprob for delta in deltas for logprob in delta.logprobs or ()],
        [logprob for delta in deltas for logprob in delta.prompt_logprobs],
        joined_calls(part for delta in deltas for part in delta.calls),
        finish_reason,
        deltas[-1].stop_reason,
    )


class ChunkWriter(ABC):
    """Turns the events of one answer into encoded chunks; each route has its own documents.

    Args:
        head: of every chunk.
        chunk: the route's type of chunk, made from the head's fields, `choices` and `usage`.
        accepted: has the prompt's token count, for running usage.
        options: whether a last chunk without choices carries the usage. The chunks before it then carry null
            or, with continuous usage, the counts so far.
        choices: how many there are.
    """

    def __init__(
        self,
        head: Head,
        chunk: type[Struct],
        accepted: Accepted,
        options: StreamOptions | None,
        choices: int,
    ) -> None:
        self._head = head
        self._chunk = chunk
        options = options or StreamOptions()
        self._prompt_tokens = accepted.prompt_tokens
        self._include_usage = options.include_usage
        self._continuous_usage = options.include_usage and options.continuous_usage_stats
        self._no_usage = None if options.include_usage else UNSET
        self._completion_tokens = 0
        self._unfinished = choices
        self._usage: TokenCounts | None = None

    def write(self, event: Event) -> list[bytes]:
        """Return the chunks for `event`: usually one, none for a heartbeat or text that is held back."""
        if type(event) is not Delta:
            return []
        self._completion_tokens += event.tokens
        self._usage = event.usage or self._usage
        if event.finish_reason is not None:
            self._unfinished -= 1
        return self._delta(
            event,
            self._running_usage(self._completion_tokens) if self._continuous_usage else self._no_usage,
        )

    def close(self) -> list[bytes]:
        """Return the chunks after the last event.

        Raises:
            UpstreamProtocolError: the events ended without usage, or a choice without a finish reason.
        """
        if self._unfinished or self._usage is None:
            raise incomplete()
        return [self._encode([], usage_document(self._usage))] if self._include_usage else []

    @abstractmethod
    def _delta(self, delta: Delta, usage: Usage | UnsetType | None) -> list[bytes]:
        """Return the chunks of one delta, with `usage` in each."""

    def _encode(self, choices: Sequence[Struct], usage: Usage | UnsetType | None, **rest: Any) -> bytes:
        """Return a chunk of these choices; without any it is the last one, with the token counts."""
        return encode(self._head.document(self._chunk, choices=choices, usage=usage, **rest))

    def _running_usage(self, completion_tokens: int) -> Usage | UnsetType | None:
        """Return the usage in a chunk after which so many tokens were sent."""
        if not self._continuous_usage:
            return self._no_usage
        return Usage(self._prompt_tokens, completion_tokens, self._prompt_tokens + completion_tokens)


class StreamWriter(Protocol):
    """Turns the events of one answer into framed server-sent events; each method returns one write."""

    def begin(self) -> bytes:
        """Return what is sent as soon as the request is accepted."""
        ...

    def write(self, event: Event) -> bytes:
        """Return what `event` adds: nothing for a heartbeat or text that is held back."""
        ...

    def close(self) -> bytes:
        """Return the end of the stream, after the last event.

        Raises:
            UpstreamProtocolError: the events ended without usage, or a choice without a finish reason.
        """
        ...

    def fail(self, error: GatewayError) -> bytes:
        """Return the end of a stream that `error` interrupted."""
        ...


class Answer(Protocol):
    """How one route writes the answer to one request."""

    async def whole(self, accepted: Accepted, events: AsyncIterator[Event]) -> Struct:
        """Return the events after `accepted` as one document.

        Raises:
            GatewayError: the generation failed.
        """
        ...

    def stream(self, accepted: Accepted) -> StreamWriter:
        """Return a writer that streams the events after `accepted`."""
        ...


def shown_token(token: TokenLogprob | TopLogprob | PromptLogprob, *, as_id: bool) -> str:
    """Return how a report of log-probabilities names `token`: as displayed, or by its id, as vLLM does."""
    return f"token_id:{token.id}" if as_id else token.token


def ids_document(ids: Sequence[int] | None) -> list[int] | UnsetType:
    """Write token ids, if they were requested."""
    return UNSET if ids is None else list(ids)


def incomplete() -> UpstreamProtocolError:
    """Return the error for an answer that stopped without a finish reason or usage."""
    return UpstreamProtocolError("The upstream ended the answer without a finish reason or token counts.")
