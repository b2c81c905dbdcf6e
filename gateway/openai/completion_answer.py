"""Text completions in OpenAI's format, whole and streamed, with token ids as in vLLM."""

from collections.abc import AsyncIterator
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.generation import Accepted, Delta, Event, FinishReason, StopReason
from gateway.openai.answer import ChunkWriter, Gathered, Head, Usage, gather, ids_document
from gateway.openai.chunk_stream import ChunkedAnswer
from gateway.openai.completion_logprobs import CompletionLogprobs, LogprobsWriter
from gateway.openai.completion_request import CompletionRequest
from gateway.openai.prompt_logprobs import PromptLogprobs, prompt_logprobs_document


class CompletionChoice(Struct, frozen=True):
    """A choice, or a chunk's part of one.

    The prompt's ids are in the first chunk of each, `stop_reason` stands beside the reason of the end. Its
    log-probabilities are in whole answers only.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    stop_reason: StopReason | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


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
    """One event of a stream. `usage` is present only if requested, and null until the end."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionAnswer(ChunkedAnswer):
    """Writes the answer to one completion request: see `gateway.openai.answer.Answer`.

    Choices are numbered prompt by prompt.
    """

    def __init__(self, asked: CompletionRequest) -> None:
        self._head = Head.new("cmpl", asked.model)
        self._asked = asked
        self._choices = asked.choices

    async def whole(self, accepted: Accepted, events: AsyncIterator[Event]) -> Completion:
        """Return the whole answer."""
        answers, usage = await gather(events, self._choices)
        prompt_ids = _PromptIds(accepted, self._choices)
        return self._head.document(
            Completion,
            choices=[
                CompletionChoice(
                    answer.index,
                    answer.text,
                    self._logprobs(answer),
                    answer.finish_reason,
                    prompt_ids.of(answer.index),
                    answer.token_ids if self._asked.return_token_ids else UNSET,
                    answer.stop_reason,
                    prompt_logprobs_document(answer.prompt_logprobs, self._asked.prompt_logprobs),
                )
                for answer in answers
            ],
            usage=usage,
        )

    def chunks(self, accepted: Accepted) -> "CompletionChunkWriter":
        """Return a writer of the answer's chunks."""
        return CompletionChunkWriter(self._head, accepted, self._asked)

    def _logprobs(self, answer: Gathered) -> CompletionLogprobs | None:
        if self._asked.logprobs is None:
            return None
        echoed = answer.prompt_logprobs if self._asked.echo else []
        writer = LogprobsWriter(self._asked.logprobs, as_ids=bool(self._asked.return_tokens_as_token_ids))
        return writer.write([*echoed, *answer.logprobs])


class CompletionChunkWriter(ChunkWriter):
    """Writes one chunk for each delta that shows something; the last one also has the finish reason."""

    def __init__(self, head: Head, accepted: Accepted, asked: CompletionRequest) -> None:
        super().__init__(head, CompletionChunk, accepted, asked.stream_options, asked.choices)
        self._prompt_ids = _PromptIds(accepted, asked.choices)
        as_ids = bool(asked.return_tokens_as_token_ids)
        self._logprobs = [LogprobsWriter(asked.logprobs or 0, as_ids=as_ids) for _ in range(asked.choices)]
        """By choice."""
        self._begun: set[int] = set()

    def _delta(self, delta: Delta, usage: Usage | UnsetType | None) -> list[bytes]:
        told = delta.prompt_logprobs + (delta.logprobs or ())
        if not (delta.text or delta.token_ids or told or delta.finish_reason):
            return []
        index = delta.index
        begun = index in self._begun
        self._begun.add(index)
        choice = CompletionChoice(
            index,
            delta.text,
            self._logprobs[index].write(told) if told or delta.logprobs is not None else None,
            delta.finish_reason,
            UNSET if begun else self._prompt_ids.of(index),
            ids_document(delta.token_ids),
            UNSET if delta.finish_reason is None else delta.stop_reason,
        )
        return [self._encode([choice], usage)]


class _PromptIds:
    """The ids of the prompts, if requested; every prompt has the same number of choices."""

    def __init__(self, accepted: Accepted, choices: int) -> None:
        self._ids = accepted.prompt_token_ids
        self._each = 1 if self._ids is None else choices // len(self._ids)

    def of(self, choice: int) -> list[int] | UnsetType:
        return UNSET if self._ids is None else list(self._ids[choice // self._each])
