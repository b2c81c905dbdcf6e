"""Chat completions in OpenAI's format: the JSON documents, and how generation events become them."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.generation import Accepted, Delta, Event, FinishReason, StopReason, TokenLogprob
from gateway.openai.answer import ChunkWriter, Head, Usage, encode, gather, ids_document, shown_token
from gateway.openai.call_documents import (
    CalledFunction,
    CalledFunctionDelta,
    ToolCall,
    ToolCallDelta,
    function_call,
    function_call_deltas,
    tool_call,
    tool_call_deltas,
)
from gateway.openai.chat_request import ChatRequest
from gateway.openai.chunk_stream import ChunkedAnswer
from gateway.openai.generation_request import StreamOptions
from gateway.openai.prompt_logprobs import PromptLogprobs, prompt_logprobs_document
from gateway.pieces import Call, CallPart

_CONTENT = b'"content":'
_NO_CONTENT = _CONTENT + encode("")
"""As it appears in a chunk, exactly once: quotes in the model's name are escaped."""


ChatFinishReason = FinishReason | Literal["function_call"]


class TopLogprob(Struct, frozen=True):
    """One of the most likely tokens at its position."""

    token: str
    logprob: float
    bytes: list[int] | None
    """Null of a token that is not text."""


class TokenLogprobContent(Struct, frozen=True):
    """A sampled token's log-probability, and the most likely alternatives."""

    token: str
    logprob: float
    bytes: list[int] | None
    """Null of a token that is not text."""
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Struct, frozen=True):
    """Log-probabilities of an answer's tokens, or of a chunk's."""

    content: list[TokenLogprobContent]
    refusal: None = None


class ResponseMessage(Struct, frozen=True, kw_only=True):
    """The complete answer. An answer that only calls tools has no content."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class Choice(Struct, frozen=True):
    """One answer, and why it ended."""

    index: int
    message: ResponseMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """The answer to a request that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChunkDelta(Struct, frozen=True):
    """What a chunk adds to the message; the last one adds nothing."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: CalledFunctionDelta | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True):
    """A choice's part of a chunk; `stop_reason` comes with `finish_reason`."""

    index: int
    delta: ChunkDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: StopReason | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    """One event of a stream. `usage` is present only if requested, and null until the end.

    The first one has the prompt's ids, if requested.
    """

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


def logprobs_document(
    tokens: Sequence[TokenLogprob], *, as_ids: bool = False, no_bytes: list[int] | None = None
) -> ChoiceLogprobs:
    """Write log-probabilities.

    Args:
        tokens: in order.
        as_ids: name tokens by their ids.
        no_bytes: the bytes of a token that is not text.
    """
    return ChoiceLogprobs(
        [
            TokenLogprobContent(
                shown_token(token, as_id=as_ids),
                token.logprob,
                list(token.utf8) or no_bytes,
                [
                    TopLogprob(shown_token(top, as_id=as_ids), top.logprob, list(top.utf8) or no_bytes)
                    for top in token.top
                ],
            )
            for token in tokens
        ]
    )


class ChatAnswer(ChunkedAnswer):
    """Writes the answer to one chat request: see `gateway.openai.answer.Answer`."""

    def __init__(self, asked: ChatRequest) -> None:
        self._head = Head.new("chatcmpl", asked.model)
        self._wants_logprobs = bool(asked.logprobs)
        self._wants_ids = bool(asked.return_token_ids)
        self._as_ids = bool(asked.return_tokens_as_token_ids)
        self._options = asked.stream_options
        self._calls = CallWriter(offered=bool(asked.tools or asked.functions), older=bool(asked.functions))
        self._choices = asked.choices
        self._prompt_logprobs = asked.prompt_logprobs

    async def whole(self, accepted: Accepted, events: AsyncIterator[Event]) -> ChatCompletion:
        """Return the whole answer."""
        answers, usage = await gather(events, self._choices)
        return self._head.document(
            ChatCompletion,
            choices=[
                Choice(
                    answer.index,
                    self._calls.message(answer.text, answer.calls),
                    logprobs_document(answer.logprobs, as_ids=self._as_ids) if self._wants_logprobs else None,
                    self._calls.reason(answer.finish_reason),
                    answer.stop_reason,
                    answer.token_ids if self._wants_ids else UNSET,
                )
                for answer in answers
            ],
            usage=usage,
            prompt_token_ids=_prompt_ids(accepted),
            # Each choice was told of the one prompt.
            prompt_logprobs=prompt_logprobs_document(answers[0].prompt_logprobs, self._prompt_logprobs),
        )

    def chunks(self, accepted: Accepted) -> "ChatChunkWriter":
        """Return a writer of the answer's chunks."""
        return ChatChunkWriter(
            self._head, accepted, self._options, self._calls, self._choices, as_ids=self._as_ids
        )


class CallWriter:
    """Writes an answer's calls: as `tool_calls`, or in the older form as `function_call`.

    Args:
        offered: tools or functions were offered, so an answer may have no content.
        older: the request used `functions`.
    """

    def __init__(self, *, offered: bool, older: bool) -> None:
        self.no_content = None if offered else ""
        """The content of an answer before there is any text."""
        self._older = older

    def reason(self, reason: FinishReason) -> ChatFinishReason:
        """Write the finish reason."""
        return "function_call" if self._older and reason == "tool_calls" else reason

    def message(self, text: str, calls: Sequence[Call]) -> ResponseMessage:
        """Write the whole answer."""
        content = text if text or not calls else None
        if not calls:
            return ResponseMessage(content=content)
        if self._older:
            return ResponseMessage(content=content, function_call=function_call(calls[0]))
        return ResponseMessage(content=content, tool_calls=[tool_call(call) for call in calls])

    def deltas(self, part: CallPart, index: int) -> list[ChunkDelta]:
        """Write part of the answer's call number `index`, as deltas for one chunk each."""
        if self._older:
            return [ChunkDelta(function_call=each) for each in function_call_deltas(part)]
        return [ChunkDelta(tool_calls=[each]) for each in tool_call_deltas(part, index)]


class ChatChunkWriter(ChunkWriter):
    """Writes the roles first, then text, calls and finish reasons, each in chunks of its own.

    The roles of all choices come first and in order, whichever choice has text first: the SDK's accumulator
    numbers choices by the order in which it sees them.
    """

    def __init__(
        self,
        head: Head,
        accepted: Accepted,
        options: StreamOptions | None,
        calls: CallWriter,
        choices: int,
        *,
        as_ids: bool,
    ) -> None:
        super().__init__(head, ChatCompletionChunk, accepted, options, choices)
        self._as_ids = as_ids
        self._prompt_ids = _prompt_ids(accepted)
        self._calls = calls
        self._indices = range(choices)
        self._calls_begun: Counter[int] = Counter()
        """By choice."""
        self._begun = False
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    def _delta(self, delta: Delta, usage: Usage | UnsetType | None) -> list[bytes]:
        piece = delta.pieces[0] if len(delta.pieces) == 1 else None
        # The common case: text only.
        if (
            self._begun
            and isinstance(piece, str)
            and delta.logprobs is None
            and delta.token_ids is None
            and delta.finish_reason is None
        ):
            return [self._text_chunk(delta.index, piece, usage)]
        chunks: list[bytes] = []
        if not self._begun:
            self._begun = True
            role = ChunkDelta(role="assistant", content=self._calls.no_content)
            roles = [[ChunkChoice(index, role)] for index in self._indices]
            nothing_yet = self._running_usage(0)
            chunks.append(self._encode(roles[0], nothing_yet, prompt_token_ids=self._prompt_ids))
            chunks += [self._encode(each, nothing_yet) for each in roles[1:]]
        return chunks + [self._encode([choice], usage) for choice in self._choices(delta)]

    def _choices(self, delta: Delta) -> list[ChunkChoice]:
        """Return what a delta adds to its choice, one item per chunk."""
        choices: list[ChunkChoice] = []
        if delta.text or delta.logprobs or delta.token_ids:
            logprobs = (
                None if delta.logprobs is None else logprobs_document(delta.logprobs, as_ids=self._as_ids)
            )
            content = ChunkDelta(content=delta.text or self._calls.no_content)
            ids = ids_document(delta.token_ids)
            choices.append(ChunkChoice(delta.index, content, logprobs, token_ids=ids))
        for part in delta.calls:
            self._calls_begun[delta.index] += part.name is not None
            deltas = self._calls.deltas(part, self._calls_begun[delta.index] - 1)
            choices += [ChunkChoice(delta.index, each) for each in deltas]
        if delta.finish_reason is not None:
            reason = self._calls.reason(delta.finish_reason)
            choices.append(
                ChunkChoice(delta.index, ChunkDelta(), finish_reason=reason, stop_reason=delta.stop_reason)
            )
        return choices

    def _text_chunk(self, index: int, text: str, usage: Usage | UnsetType | None) -> bytes:
        """Return a chunk of text only: without running usage such chunks differ in nothing but the text."""
        if type(usage) is Usage:
            return self._encode([ChunkChoice(index, ChunkDelta(content=text))], usage)
        template = self._templates.get(index)
        if template is None:
            empty = self._encode([ChunkChoice(index, ChunkDelta(content=""))], usage)
            before, _, after = empty.partition(_NO_CONTENT)
            template = self._templates[index] = before + _CONTENT, after
        return b"%b%b%b" % (template[0], encode(text), template[1])


def _prompt_ids(accepted: Accepted) -> list[int] | UnsetType:
    """Write the ids of the conversation, which is its request's only prompt."""
    return UNSET if accepted.prompt_token_ids is None else list(accepted.prompt_token_ids[0])
