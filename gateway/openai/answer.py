"""What the answers of all generating routes share: head, token counts, log-probabilities, and streaming.

A completion is streamed in chunks. An error after the first byte is a chunk with the error object. Every
stream of chunks ends with `[DONE]`. The other routes stream named events (`EventsAnswer`).

Encoding happens for every chunk of every stream, so the documents are msgspec structs with one shared
encoder.
"""

import hashlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway import version
from gateway.core.events import (
    Accepted,
    Call,
    Delta,
    Event,
    FinishReason,
    PromptLogprob,
    StopReason,
    Timings,
    TokenLogprob,
    TopLogprob,
    joined_calls,
)
from gateway.core.events import Usage as TokenCounts
from gateway.errors import GatewayError, UpstreamProtocolError, render
from gateway.http.sse import frame, frame_named
from gateway.openai.params import AnyCompletionRequest, StreamOptions

encode = msgspec.json.Encoder().encode

_DONE = b"data: [DONE]\n\n"


class Answer(ABC):
    """How one route writes the answer to one request: complete, or as a stream of server-sent events.

    Of a stream, each method returns one write of framed events.
    """

    accepted = Accepted(prompt_tokens=0)
    """What the upstream said of the request; a stream may begin before that."""

    def accept(self, accepted: Accepted) -> Self:
        """Note what the upstream said; return this."""
        self.accepted = accepted
        return self

    @abstractmethod
    async def complete(self, events: AsyncIterator[Event]) -> Struct:
        """Return the events after the acceptance as one document.

        Raises:
            GatewayError: the generation failed.
        """

    @abstractmethod
    def begin(self) -> bytes:
        """Return what is sent as soon as the request is accepted."""

    @abstractmethod
    def write(self, event: Event) -> bytes:
        """Return what `event` adds: nothing for a heartbeat or text that is held back."""

    @abstractmethod
    def close(self) -> bytes:
        """Return the end of the stream, after the last event.

        Raises:
            UpstreamProtocolError: the events ended without usage, or a choice without a finish reason.
        """

    @abstractmethod
    def fail(self, error: GatewayError) -> bytes:
        """Return the end of a stream that `error` interrupted."""


class PromptTokensDetails(Struct, frozen=True):
    """How much of the prompt was found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    """How much of the completion is reasoning."""

    reasoning_tokens: int


class Usage(Struct, frozen=True, omit_defaults=True):
    """Token counts of a request; those of a stream that goes on have no details."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Only of models whose answers have reasoning apart."""
    timings: Timings | UnsetType = UNSET

    @classmethod
    def of(cls, counts: TokenCounts) -> "Usage":
        """Write the token counts of a request that is complete."""
        prompt, completion = counts.prompt_tokens, counts.completion_tokens
        reasoning = counts.reasoning_tokens
        return cls(
            prompt,
            completion,
            prompt + completion,
            PromptTokensDetails(counts.cached_tokens),
            UNSET if reasoning is None else CompletionTokensDetails(reasoning),
            counts.timings or UNSET,
        )


class Document(Struct, frozen=True, kw_only=True):
    """The fields that all documents of one answer share."""

    id: str
    object: str
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str


def new_id(kind: str) -> str:
    """Make an id that tells what it is of."""
    return f"{kind}_{secrets.token_hex(24)}"


def new_head(kind: str, model: str) -> dict[str, Any]:
    """Make the shared fields of an answer that begins now; its unique id begins with `kind`."""
    digest = hashlib.sha256(f"{version()}/{model}".encode()).hexdigest()
    return {
        "id": f"{kind}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"fp_{digest[:10]}",
    }


def shown_token(token: TokenLogprob | TopLogprob | PromptLogprob, *, as_id: bool) -> str:
    """Return how a report of log-probabilities names `token`: as displayed, or by its id, as vLLM does."""
    return f"token_id:{token.id}" if as_id else token.token


class RankedToken(Struct, frozen=True):
    """A token that was possible at a place of the prompt; `rank` 1 is the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, RankedToken] | None]
"""Of each token of the prompt, by token ids, as vLLM gives them: its own entry first, then those of the
likeliest ones. The first token, which follows nothing, has null."""


def prompt_logprobs_document(tokens: Sequence[PromptLogprob], top: int | None) -> PromptLogprobs | UnsetType:
    """Write them, with the `top` likeliest tokens at each place; None: they were not requested."""
    return UNSET if top is None else [_possible(token, top) for token in tokens]


def _possible(token: PromptLogprob, top: int) -> dict[int, RankedToken] | None:
    if token.logprob is None:
        return None
    own = {token.id: RankedToken(token.logprob, token.rank, token.token)}
    likely = {
        each.id: RankedToken(each.logprob, place, each.token)
        for place, each in enumerate(token.top[:top], start=1)
        if each.id != token.id
    }
    return own | likely


@dataclass(frozen=True, slots=True)
class Gathered:
    """One complete choice."""

    index: int
    text: str
    reasoning: str
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
    return [_joined(index, each) for index, each in enumerate(deltas)], Usage.of(usage)


def _joined(index: int, deltas: Sequence[Delta]) -> Gathered:
    finish_reason = deltas[-1].finish_reason if deltas else None
    if finish_reason is None:
        raise incomplete()
    return Gathered(
        index,
        "".join([delta.text for delta in deltas]),
        "".join([delta.reasoning for delta in deltas]),
        [token_id for delta in deltas for token_id in delta.token_ids or ()],
        [logprob for delta in deltas for logprob in delta.logprobs or ()],
        [logprob for delta in deltas for logprob in delta.prompt_logprobs],
        joined_calls(part for delta in deltas for part in delta.calls),
        finish_reason,
        deltas[-1].stop_reason,
    )


def incomplete() -> UpstreamProtocolError:
    """Return the error for an answer that stopped without a finish reason or usage."""
    return UpstreamProtocolError("The upstream ended the answer without a finish reason or token counts.")


class ChunksAnswer(Answer):
    """An answer that is streamed in chunks; each route has its own documents.

    If requested, a last chunk without choices carries the usage. The chunks before it then carry null or,
    with continuous usage, the counts so far.
    """

    kind: ClassVar[str]
    """What its id begins with."""
    chunk: ClassVar[type[Struct]]
    """Made from the head's fields, `choices` and `usage`."""

    def __init__(self, request: AnyCompletionRequest) -> None:
        options = request.stream_options or StreamOptions()
        self._head = new_head(self.kind, request.model)
        self._completion_tokens = 0
        self._include_usage = bool(options.include_usage)
        self._continuous_usage = bool(options.continuous_usage_stats)
        self._no_usage = None if options.include_usage else UNSET
        self._unfinished = request.choices
        self._choices_each = request.n or 1
        self._counts: TokenCounts | None = None

    def begin(self) -> bytes:
        """Return nothing: the first chunks come with the first token."""
        return b""

    def write(self, event: Event) -> bytes:
        """Return the chunks for `event`: usually one."""
        if type(event) is not Delta:
            return b""
        self._completion_tokens += event.tokens
        self._counts = event.usage or self._counts
        if event.finish_reason is not None:
            self._unfinished -= 1
        return frame(self._delta(event, self._usage(self._completion_tokens)))

    def close(self) -> bytes:
        """Return the usage, if requested, and the end mark."""
        if self._unfinished or self._counts is None:
            raise incomplete()
        return frame([self._encode([], Usage.of(self._counts))] if self._include_usage else []) + _DONE

    def fail(self, error: GatewayError) -> bytes:
        """Return the error, and the end mark."""
        return frame([encode(render(error))]) + _DONE

    @abstractmethod
    def _delta(self, delta: Delta, usage: Usage | UnsetType | None) -> list[bytes]:
        """Return the chunks of one delta, with `usage` in each."""

    def _encode(self, choices: Sequence[Struct], usage: Usage | UnsetType | None, **rest: Any) -> bytes:
        return encode(self.chunk(**self._head, choices=choices, usage=usage, **rest))

    def _prompt_ids(self, choice: int = 0) -> list[int] | UnsetType:
        """Return the ids of the prompt of `choice`, if requested; every prompt has as many choices."""
        ids = self.accepted.prompt_token_ids
        return UNSET if ids is None else list(ids[choice // self._choices_each])

    def _usage(self, completion_tokens: int) -> Usage | UnsetType | None:
        """Return the usage in a chunk after which so many tokens were sent."""
        if not self._continuous_usage:
            return self._no_usage
        prompt_tokens = self.accepted.prompt_tokens
        return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


class EventsAnswer(Answer):
    """An answer that is streamed in named events; the name of each is its `type`.

    One that is not streamed is the final state of what makes the events, so it cannot differ from a
    streamed one.
    """

    document: Struct
    """Its current state."""

    async def complete(self, events: AsyncIterator[Event]) -> Struct:
        """Return the complete answer."""
        async for event in events:
            if type(event) is Delta:
                self._take(event)
        self._end()
        return self.document

    def begin(self) -> bytes:
        """Return the events before the first token."""
        return _named(self._begin())

    def write(self, event: Event) -> bytes:
        """Return what `event` adds."""
        return _named(self._take(event)) if type(event) is Delta else b""

    def close(self) -> bytes:
        """Return the events of the answer's end."""
        return _named(self._end())

    def fail(self, error: GatewayError) -> bytes:
        """Return the events of an end by `error`."""
        return _named(self._fail(error))

    @abstractmethod
    def _begin(self) -> list[Struct]: ...

    @abstractmethod
    def _take(self, delta: Delta) -> list[Struct]: ...

    @abstractmethod
    def _end(self) -> list[Struct]:
        """Complete the document.

        Raises:
            UpstreamProtocolError: there was no finish reason or no usage.
        """

    @abstractmethod
    def _fail(self, error: GatewayError) -> list[Struct]: ...


def _named(events: Sequence[Struct]) -> bytes:
    return frame_named((str(event.__struct_config__.tag), encode(event)) for event in events)
