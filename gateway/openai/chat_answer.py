"""`/v1/chat/completions`: the answer, complete or in chunks, with calls in the newer and the older form."""

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.core.events import CallPart, Delta, Event, FinishReason, StopReason, TokenLogprob
from gateway.openai.answer import (
    ChunksAnswer,
    Document,
    Gathered,
    PromptLogprobs,
    Usage,
    encode,
    gather,
    prompt_logprobs_document,
    shown_token,
)
from gateway.openai.chat_request import ChatRequest


class CalledFunction(Struct, frozen=True):
    """A function's name and arguments; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True):
    """One call of an answer. Its result refers to `id`."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class CalledFunctionDelta(Struct, frozen=True):
    """What a chunk adds to a call: first the whole name, then arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True):
    """What a chunk adds to the call `index`; id and type come once."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunctionDelta | UnsetType = UNSET


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
    """The complete answer. An answer that only calls tools has no content.

    Reasoning stands there twice, since clients read either name (divergence 17).
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
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


class ChatCompletion(Document, frozen=True, kw_only=True):
    """The answer to a request that is not streamed."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChunkDelta(Struct, frozen=True):
    """What a chunk adds to the message; the last one adds nothing."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
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


class ChatCompletionChunk(Document, frozen=True, kw_only=True):
    """One event of a stream. `usage` is present only if requested, and null until the end.

    The first one has the prompt's ids, if requested.
    """

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


_CONTENT = b'"content":'
_NO_CONTENT = _CONTENT + encode("")
"""As it appears in a chunk, exactly once: quotes in the model's name are escaped."""


def new_call_id() -> str:
    """Make the id that a call's result refers to."""
    return f"call_{secrets.token_hex(12)}"


def logprobs_document(
    tokens: Sequence[TokenLogprob], *, as_ids: bool = False, no_bytes: list[int] | None = None
) -> ChoiceLogprobs:
    """Write log-probabilities; `no_bytes` are the bytes of a token that is not text."""
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


class ChatAnswer(ChunksAnswer):
    """The answer to a chat request.

    A stream has the roles first, then reasoning, text, calls and finish reasons, each in chunks of its own.
    The roles of all choices come first and in order, whichever choice has text first: the SDK's accumulator
    numbers choices by the order in which it sees them.
    """

    kind, chunk = "chatcmpl", ChatCompletionChunk

    def __init__(self, request: ChatRequest) -> None:
        super().__init__(request)
        self._request = request
        # An answer that may be calls alone has no content before there is any text.
        self._no_content = None if request.tools or request.functions else ""
        self._calls_started: Counter[int] = Counter()
        """By choice."""
        self._started = False
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    async def complete(self, events: AsyncIterator[Event]) -> ChatCompletion:
        """Return the complete answer."""
        request = self._request
        answers, usage = await gather(events, request.choices)
        as_ids = bool(request.return_tokens_as_token_ids)
        return ChatCompletion(
            **self._head,
            choices=[
                Choice(
                    answer.index,
                    self._message(answer),
                    logprobs_document(answer.logprobs, as_ids=as_ids) if request.logprobs else None,
                    finish_reason(request, answer.finish_reason),
                    answer.stop_reason,
                    answer.token_ids if request.return_token_ids else UNSET,
                )
                for answer in answers
            ],
            usage=usage,
            prompt_token_ids=self._prompt_ids(),
            # The same with each choice: there is one prompt.
            prompt_logprobs=prompt_logprobs_document(answers[0].prompt_logprobs, request.prompt_logprobs),
        )

    def _message(self, answer: Gathered) -> ResponseMessage:
        fields: dict[str, Any] = {"content": answer.text}
        if answer.reasoning and self._request.include_reasoning is not False:
            fields |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
        functions = [CalledFunction(call.name, call.arguments) for call in answer.calls]
        if functions:
            fields["content"] = answer.text or None
        if functions and self._request.functions:
            fields["function_call"] = functions[0]
        elif functions:
            fields["tool_calls"] = [ToolCall(new_call_id(), function) for function in functions]
        return ResponseMessage(**fields)

    def _delta(self, delta: Delta, usage: Usage | UnsetType | None) -> list[bytes]:
        piece = delta.pieces[0] if len(delta.pieces) == 1 else None
        # The common case: text only.
        if (
            self._started
            and isinstance(piece, str)
            and delta.logprobs is None
            and delta.token_ids is None
            and delta.finish_reason is None
        ):
            return [self._text_chunk(delta.index, piece, usage)]
        chunks = [] if self._started else self._roles()
        return chunks + [self._encode([choice], usage) for choice in self._choices(delta)]

    def _roles(self) -> list[bytes]:
        self._started = True
        role = ChunkDelta(role="assistant", content=self._no_content)
        usage = self._usage(0)
        first, *others = ([ChunkChoice(index, role)] for index in range(self._request.choices))
        return [
            self._encode(first, usage, prompt_token_ids=self._prompt_ids()),
            *(self._encode(each, usage) for each in others),
        ]

    def _choices(self, delta: Delta) -> list[ChunkChoice]:
        """Return what a delta adds to its choice, one item per chunk."""
        index, choices = delta.index, []
        if (reasoning := delta.reasoning) and self._request.include_reasoning is not False:
            thought = ChunkDelta(reasoning_content=reasoning, reasoning=reasoning)
            choices.append(ChunkChoice(index, thought))
        if delta.text or delta.logprobs or delta.token_ids:
            as_ids = bool(self._request.return_tokens_as_token_ids)
            logprobs = None if delta.logprobs is None else logprobs_document(delta.logprobs, as_ids=as_ids)
            content = ChunkDelta(content=delta.text or self._no_content)
            ids = UNSET if delta.token_ids is None else list(delta.token_ids)
            choices.append(ChunkChoice(index, content, logprobs, token_ids=ids))
        for part in delta.calls:
            choices += [ChunkChoice(index, each) for each in self._call(part, index)]
        if delta.finish_reason is not None:
            reason = finish_reason(self._request, delta.finish_reason)
            choices.append(
                ChunkChoice(index, ChunkDelta(), finish_reason=reason, stop_reason=delta.stop_reason)
            )
        return choices

    def _call(self, part: CallPart, choice: int) -> list[ChunkDelta]:
        """Write part of a call of `choice`, one item per chunk: its head, with a new id, then arguments."""
        more = CalledFunctionDelta(arguments=part.arguments)
        first = None if part.name is None else CalledFunctionDelta(name=part.name, arguments="")
        if self._request.functions:
            return [ChunkDelta(function_call=each) for each in (first, more) if each is not None]
        self._calls_started[choice] += first is not None
        index = self._calls_started[choice] - 1
        calls = [ToolCallDelta(index, function=more)]
        if first is not None:
            calls.insert(0, ToolCallDelta(index, id=new_call_id(), type="function", function=first))
        return [ChunkDelta(tool_calls=[each]) for each in calls]

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


def finish_reason(request: ChatRequest, reason: FinishReason) -> ChatFinishReason:
    """Write a finish reason in the form that `request` has for calls."""
    return "function_call" if request.functions and reason == "tool_calls" else reason
