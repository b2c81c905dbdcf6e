"""Text completions as OpenAI writes them, whole and streamed; token ids as vLLM adds them."""

from collections.abc import AsyncIterator
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.generation import Accepted, Delta, Event, FinishReason
from gateway.openai.answer import ChunkWriter, Head, Usage, encode, gather
from gateway.openai.chunk_stream import ChunkedAnswer
from gateway.openai.completion_request import CompletionRequest
from gateway.openai.generation_request import StreamOptions


class CompletionChoice(Struct, frozen=True):
    """A choice, or a chunk's part of one. The prompt's ids are in the first chunk of each."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """The answer to a request that is not streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Struct, frozen=True, kw_only=True):
    """One event of a stream. `usage` is there only where the request asked for it, null until its end."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionAnswer(ChunkedAnswer):
    """Writes the answer to one completion request: see `gateway.openai.answer.Answer`."""

    def __init__(self, asked: CompletionRequest) -> None:
        self._head = Head.new("cmpl", asked.model)
        self._wants_ids = bool(asked.return_token_ids)
        self._options = asked.stream_options
        self._choices = asked.choices

    async def whole(self, accepted: Accepted, events: AsyncIterator[Event]) -> Completion:
        """Return the whole answer."""
        answers, usage = await gather(events, self._choices)
        return Completion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.system_fingerprint,
            choices=[
                CompletionChoice(
                    answer.index,
                    answer.text,
                    finish_reason=answer.finish_reason,
                    prompt_token_ids=_ids(accepted.prompt_token_ids),
                    token_ids=answer.token_ids if self._wants_ids else UNSET,
                )
                for answer in answers
            ],
            usage=usage,
        )

    def chunks(self, accepted: Accepted) -> "CompletionChunkWriter":
        """Return what writes the answer's chunks."""
        return CompletionChunkWriter(self._head, accepted, self._options, self._choices)


class CompletionChunkWriter(ChunkWriter):
    """Writes one chunk for each delta that shows something; the last has the reason of the end as well."""

    def __init__(self, head: Head, accepted: Accepted, options: StreamOptions | None, choices: int) -> None:
        super().__init__(accepted, options, choices)
        self._head = head
        self._prompt_ids = _ids(accepted.prompt_token_ids)
        self._begun: set[int] = set()

    def _delta(self, delta: Delta, usage: Usage | UnsetType | None) -> list[bytes]:
        if not (delta.text or delta.token_ids) and delta.finish_reason is None:
            return []
        begun = delta.index in self._begun
        self._begun.add(delta.index)
        choice = CompletionChoice(
            delta.index,
            delta.text,
            finish_reason=delta.finish_reason,
            prompt_token_ids=UNSET if begun else self._prompt_ids,
            token_ids=_ids(delta.token_ids),
        )
        return [self._encode([choice], usage)]

    def _counts(self, usage: Usage) -> bytes:
        return self._encode([], usage)

    def _encode(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        head = self._head
        return encode(
            CompletionChunk(
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.system_fingerprint,
                choices=choices,
                usage=usage,
            )
        )


def _ids(ids: tuple[int, ...] | None) -> list[int] | UnsetType:
    return UNSET if ids is None else list(ids)
