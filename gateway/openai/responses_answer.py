"""`/v1/responses`: the answer, complete or as named events, in OpenAI's format.

A response that is not streamed is the final state of the builder that makes the events, so it cannot differ
from a streamed one.
"""

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from gateway.core.events import Accepted, Delta, Event, FinishReason, Reasoning, TokenLogprob, Usage
from gateway.errors import GatewayError, InvalidRequestError, RateLimitError
from gateway.http.sse import frame_named
from gateway.openai.answer import encode, incomplete
from gateway.openai.chat_answer import logprobs_document, new_call_id
from gateway.openai.responses_document import (
    EVENTS,
    ErrorCode,
    EventLogprob,
    EventTopLogprob,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    Named,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    ResponseDocument,
    ResponseError,
    ResponseUsage,
    new_id,
)
from gateway.openai.responses_request import ResponsesRequest

_CONTENT_INDEX = 0
"""The index of a message's text, its only part."""


def _usage(counts: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=counts.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=counts.cached_tokens),
        output_tokens=counts.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=counts.reasoning_tokens or 0),
        total_tokens=counts.prompt_tokens + counts.completion_tokens,
        timings=counts.timings or UNSET,
    )


def _error(error: GatewayError) -> ResponseError:
    """Write the error that ended a response, with the closest of OpenAI's codes."""
    code: ErrorCode = "server_error"
    if isinstance(error, RateLimitError):
        code = "rate_limit_exceeded"
    elif isinstance(error, InvalidRequestError):
        code = "invalid_prompt"
    return ResponseError(code=code, message=error.message)


def _logprobs(tokens: Iterable[TokenLogprob]) -> list[EventLogprob]:
    """Write log-probabilities; in events they come without bytes."""
    return [
        EventLogprob(
            token.token, token.logprob, [EventTopLogprob(top.token, top.logprob) for top in token.top]
        )
        for token in tokens
    ]


@dataclass(slots=True)
class _OpenMessage:
    """A message that may get more text."""

    id: str = field(default_factory=lambda: new_id("msg"))
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def part(self) -> OutputText:
        # Here the bytes are never null.
        logprobs = logprobs_document(self.logprobs, no_bytes=[]).content
        return OutputText(text="".join(self.texts), logprobs=logprobs)

    def item(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(id=self.id, status=status, content=[self.part()])


@dataclass(frozen=True, slots=True)
class _OpenCall:
    """A call that may get more arguments."""

    name: str
    arguments: list[str] = field(default_factory=list)
    id: str = field(default_factory=lambda: new_id("fc"))
    call_id: str = field(default_factory=new_call_id)

    def item(self, status: ItemStatus) -> OutputCall:
        return OutputCall(
            id=self.id,
            status=status,
            arguments="".join(self.arguments),
            call_id=self.call_id,
            name=self.name,
        )


@dataclass(frozen=True, slots=True)
class _OpenReasoning:
    """Reasoning that may get more text."""

    id: str = field(default_factory=lambda: new_id("rs"))
    texts: list[str] = field(default_factory=list)

    def part(self) -> ReasoningText:
        return ReasoningText(text="".join(self.texts))

    def item(self, status: ItemStatus) -> OutputReasoning:
        content = [self.part()] if self.texts else []
        return OutputReasoning(id=self.id, status=status, content=content)


class ResponseBuilder:
    """Follows one answer. Each method returns the resulting events, in order.

    Text opens a message, reasoning an item of its own; a call closes them and is an item of its own; text
    after a call opens another message.
    """

    def __init__(self, request: ResponsesRequest) -> None:
        self.response = ResponseDocument.to(request)
        """Its current state."""
        self._events = 0
        """So many were made."""
        self._done: list[OutputItem] = []
        self._open: _OpenMessage | _OpenCall | _OpenReasoning | None = None
        self._logprobs: list[TokenLogprob] = []
        """Those of tokens whose text was not shown yet."""
        self._finish_reason: FinishReason | None = None
        self._usage: Usage | None = None

    def begin(self) -> list[Named]:
        """The request was accepted."""
        return [
            self._event("response.created", response=self.response),
            self._event("response.in_progress", response=self.response),
        ]

    def take(self, delta: Delta) -> list[Named]:
        """Add a piece of the answer."""
        events: list[Named] = []
        self._logprobs.extend(delta.logprobs or ())
        for piece in delta.pieces:
            if isinstance(piece, str):
                events += self._add_text(piece)
            elif isinstance(piece, Reasoning):
                events += self._add_reasoning(piece.text)
            elif piece.name is None:
                events += self._add_arguments(piece.arguments)
            else:
                events += self._close("completed")
                events += self._open_call(piece.name, piece.arguments)
        self._usage = delta.usage or self._usage
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            if not self._done and self._open is None:
                events += self._add_text("")  # an empty answer is a message without text
            events += self._close("incomplete" if delta.finish_reason == "length" else "completed")
        return events

    def end(self) -> list[Named]:
        """Complete the response.

        Raises:
            UpstreamProtocolError: the answer ended without a finish reason or usage.
        """
        if self._finish_reason is None or self._usage is None:
            raise incomplete()
        response = replace(self.response, output=self._done, usage=_usage(self._usage))
        if self._finish_reason == "length":
            details = IncompleteDetails()
            self.response = replace(response, status="incomplete", incomplete_details=details)
            return [self._event("response.incomplete", response=self.response)]
        self.response = replace(response, status="completed", completed_at=int(time.time()))
        return [self._event("response.completed", response=self.response)]

    def fail(self, error: GatewayError) -> list[Named]:
        """End the response with an error."""
        cut = [] if self._open is None else [self._open.item("incomplete")]
        self.response = replace(
            self.response, status="failed", error=_error(error), output=[*self._done, *cut]
        )
        return [
            self._event("error", code=error.code, message=error.message, param=error.param),
            self._event("response.failed", response=self.response),
        ]

    def _event(self, kind: str, **fields: Any) -> Named:
        event = EVENTS[kind](sequence_number=self._events, **fields)
        self._events += 1
        return kind, event

    def _in_message(self, kind: str, message: _OpenMessage | _OpenReasoning, **fields: Any) -> Named:
        return self._event(
            kind, item_id=message.id, output_index=len(self._done), content_index=_CONTENT_INDEX, **fields
        )

    def _in_call(self, kind: str, call: _OpenCall, **fields: Any) -> Named:
        return self._event(kind, item_id=call.id, output_index=len(self._done), **fields)

    def _add_text(self, text: str) -> Iterator[Named]:
        if not isinstance(self._open, _OpenMessage):
            yield from self._close("completed")
            message = self._open = _OpenMessage()
            item = OutputMessage(id=message.id, status="in_progress", content=[])
            yield self._event("response.output_item.added", output_index=len(self._done), item=item)
            yield self._in_message("response.content_part.added", message, part=message.part())
        message = self._open
        logprobs, self._logprobs = self._logprobs, []
        message.texts.append(text)
        message.logprobs.extend(logprobs)
        if text or logprobs:
            yield self._in_message(
                "response.output_text.delta", message, delta=text, logprobs=_logprobs(logprobs)
            )

    def _add_reasoning(self, text: str) -> Iterator[Named]:
        if not isinstance(self._open, _OpenReasoning):
            yield from self._close("completed")
            thought = self._open = _OpenReasoning()
            item = thought.item("in_progress")
            yield self._event("response.output_item.added", output_index=len(self._done), item=item)
            yield self._in_message("response.content_part.added", thought, part=thought.part())
        thought = self._open
        thought.texts.append(text)
        yield self._in_message("response.reasoning_text.delta", thought, delta=text)

    def _open_call(self, name: str, arguments: str) -> Iterator[Named]:
        call = self._open = _OpenCall(name)
        item = call.item("in_progress")
        yield self._event("response.output_item.added", output_index=len(self._done), item=item)
        yield from self._add_arguments(arguments)

    def _add_arguments(self, arguments: str) -> Iterator[Named]:
        if isinstance(self._open, _OpenCall):
            self._open.arguments.append(arguments)
            yield self._in_call("response.function_call_arguments.delta", self._open, delta=arguments)

    def _close(self, status: ItemStatus) -> Iterator[Named]:
        """Close the open item, if there is one; arguments that were complete before the end are complete."""
        opened = self._open
        item: OutputItem
        if opened is None:
            return
        if isinstance(opened, _OpenMessage):
            if self._logprobs:
                yield from self._add_text("")
            item = opened.item(status)
            (part,) = item.content
            logprobs = _logprobs(opened.logprobs)
            yield self._in_message("response.output_text.done", opened, text=part.text, logprobs=logprobs)
            yield self._in_message("response.content_part.done", opened, part=part)
        elif isinstance(opened, _OpenReasoning):
            item = opened.item(status)
            thought = opened.part()
            yield self._in_message("response.reasoning_text.done", opened, text=thought.text)
            yield self._in_message("response.content_part.done", opened, part=thought)
        else:
            arguments = "".join(opened.arguments)
            item = opened.item("completed" if _is_json(arguments) else status)
            yield self._in_call("response.function_call_arguments.done", opened, arguments=arguments)
        yield self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._open = None
        self._done.append(item)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


class ResponsesAnswer:
    """An `Answer` to a Responses request, and the `StreamWriter` of its events."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._builder = ResponseBuilder(request)

    async def complete(self, _accepted: Accepted, events: AsyncIterator[Event]) -> ResponseDocument:
        """Return the complete response."""
        async for event in events:
            if type(event) is Delta:
                self._builder.take(event)
        self._builder.end()
        return self._builder.response

    def stream(self, _accepted: Accepted) -> "ResponsesAnswer":
        """Return this, as the writer of the response's events."""
        return self

    def begin(self) -> bytes:
        """Return the events before the first token."""
        return _frame(self._builder.begin())

    def write(self, event: Event) -> bytes:
        """Return what `event` adds."""
        return _frame(self._builder.take(event)) if type(event) is Delta else b""

    def close(self) -> bytes:
        """Return the complete response."""
        return _frame(self._builder.end())

    def fail(self, error: GatewayError) -> bytes:
        """Return the error, and the response so far."""
        return _frame(self._builder.fail(error))


def _frame(events: Iterable[Named]) -> bytes:
    return frame_named((name, encode(event)) for name, event in events)
