"""Chat completions as OpenAI writes them: the JSON documents, and their assembly from generation events.

Encoding happens for every chunk of every stream, so the documents are msgspec structs with one shared
encoder.
"""

import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.errors import UpstreamProtocolError
from gateway.generation import Accepted, Delta, Event, FinishReason, TokenLogprob
from gateway.generation import Usage as TokenCounts
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


class TopLogprob(Struct, frozen=True):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobContent(Struct, frozen=True):
    """A sampled token's log-probability and the most likely ones beside it."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Struct, frozen=True):
    """Log-probabilities of an answer's tokens, or of a chunk's."""

    content: list[TokenLogprobContent]
    refusal: None = None


class ResponseMessage(Struct, frozen=True, kw_only=True):
    """The whole answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(Struct, frozen=True):
    """One answer with the reason of its end."""

    index: int
    message: ResponseMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """The answer to a request that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage


class ChunkDelta(Struct, frozen=True):
    """What a chunk adds to the message; the last one adds nothing."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True):
    """A choice's part of a chunk."""

    index: int
    delta: ChunkDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    """One event of a stream. `usage` is there only where the request asked for it, null until its end."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


@dataclass(frozen=True, slots=True)
class Head:
    """What all documents of one answer share."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, model: str) -> "Head":
        """Make a unique one for an answer that begins now."""
        digest = hashlib.sha256(f"{version()}/{model}".encode()).hexdigest()
        return cls(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), model, f"fp_{digest[:10]}")


def usage_document(counts: TokenCounts) -> Usage:
    """Write token counts; cached tokens are named only where there were any."""
    return Usage(
        counts.prompt_tokens,
        counts.completion_tokens,
        counts.prompt_tokens + counts.completion_tokens,
        PromptTokensDetails(counts.cached_tokens) if counts.cached_tokens else UNSET,
    )


def logprobs_document(tokens: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    """Write log-probabilities."""
    return ChoiceLogprobs(
        [
            TokenLogprobContent(
                token.token,
                token.logprob,
                list(token.utf8),
                [TopLogprob(top.token, top.logprob, list(top.utf8)) for top in token.top],
            )
            for token in tokens
        ]
    )


async def whole_answer(head: Head, events: AsyncIterator[Event], *, wants_logprobs: bool) -> ChatCompletion:
    """Gather the events after `Accepted` into one document.

    Raises:
        UpstreamProtocolError: they end without a finish reason or without usage.
        GatewayError: whatever ends them early.
    """
    text: list[str] = []
    logprobs: list[TokenLogprob] = []
    finish_reason: FinishReason | None = None
    usage: TokenCounts | None = None
    async for event in events:
        if type(event) is not Delta:
            continue
        text.append(event.text)
        logprobs.extend(event.logprobs or ())
        finish_reason = event.finish_reason or finish_reason
        usage = event.usage or usage
    if finish_reason is None or usage is None:
        raise incomplete()
    return ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=[
            Choice(
                0,
                ResponseMessage(content="".join(text)),
                logprobs_document(logprobs) if wants_logprobs else None,
                finish_reason,
            )
        ],
        usage=usage_document(usage),
    )


class ChunkWriter:
    """Turns the events of one answer into encoded chunks.

    Args:
        head: shared by all chunks.
        accepted: gives the prompt's token count for running usage.
        include_usage: a last chunk without choices carries usage; the ones before carry null.
        continuous_usage: the ones before carry the counts so far instead.
    """

    def __init__(
        self, head: Head, accepted: Accepted, *, include_usage: bool, continuous_usage: bool
    ) -> None:
        self._head = head
        self._prompt_tokens = accepted.prompt_tokens
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._completion_tokens = 0
        self._begun = False
        self._finished = False
        self._usage: TokenCounts | None = None

    def write(self, event: Event) -> list[bytes]:
        """Return the chunks that `event` makes, often one, none for a heartbeat or text held back."""
        if type(event) is not Delta:
            return []
        self._completion_tokens += event.tokens
        self._usage = event.usage or self._usage
        choices: list[ChunkChoice] = []
        if not self._begun:
            self._begun = True
            choices.append(ChunkChoice(event.index, ChunkDelta(role="assistant", content="")))
        if event.text or event.logprobs:
            logprobs = None if event.logprobs is None else logprobs_document(event.logprobs)
            choices.append(ChunkChoice(event.index, ChunkDelta(content=event.text), logprobs))
        if event.finish_reason is not None:
            self._finished = True
            choices.append(ChunkChoice(event.index, ChunkDelta(), finish_reason=event.finish_reason))
        return [self._encode([choice], self._running_usage()) for choice in choices]

    def close(self) -> list[bytes]:
        """Return the chunks after the last event.

        Raises:
            UpstreamProtocolError: the events ended without a finish reason or without usage.
        """
        if not self._finished or self._usage is None:
            raise incomplete()
        return [self._encode([], usage_document(self._usage))] if self._include_usage else []

    def _running_usage(self) -> Usage | UnsetType | None:
        if not self._include_usage:
            return UNSET
        if not self._continuous_usage:
            return None
        return usage_document(
            TokenCounts(prompt_tokens=self._prompt_tokens, completion_tokens=self._completion_tokens)
        )

    def _encode(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> bytes:
        head = self._head
        return encode(
            ChatCompletionChunk(
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.system_fingerprint,
                choices=choices,
                usage=usage,
            )
        )


def incomplete() -> UpstreamProtocolError:
    """Return the error for an answer that stopped without saying how it ended."""
    return UpstreamProtocolError("The upstream ended the answer without a finish reason or token counts.")
