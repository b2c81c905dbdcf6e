"""Builds a response from the deltas of its answer, with the events for each step.

A response that is not streamed is the final state of the same builder, so it cannot differ from a streamed
one.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import msgspec
from msgspec.structs import replace

from gateway.errors import GatewayError
from gateway.generation import Delta, FinishReason, TokenLogprob, Usage
from gateway.openai.answer import incomplete
from gateway.openai.call_documents import new_call_id
from gateway.openai.chat_answer import logprobs_document
from gateway.openai.responses_documents import (
    IncompleteDetails,
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    begun,
    error_of,
    new_id,
    usage_of,
)
from gateway.openai.responses_events import (
    CallArgumentsDelta,
    CallArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    StreamFailed,
    event_logprobs,
)
from gateway.openai.responses_request import ResponsesRequest

_CONTENT_INDEX = 0
"""The index of a message's text, its only part."""


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


class ResponseBuilder:
    """Follows one answer. Each method returns the resulting events, in order.

    Text opens a message; a call closes it and is an item of its own; text after a call opens another message.
    """

    def __init__(self, asked: ResponsesRequest) -> None:
        self.response = begun(asked, int(time.time()))
        """Its current state."""
        self._sequence_numbers = count()
        self._done: list[OutputItem] = []
        self._message: _OpenMessage | None = None
        self._call: _OpenCall | None = None
        """At most one of message and call is open."""
        self._logprobs: list[TokenLogprob] = []
        """Those of tokens whose text was not shown yet."""
        self._finish_reason: FinishReason | None = None
        self._usage: Usage | None = None

    def begin(self) -> list[ResponseEvent]:
        """The request was accepted."""
        return [
            ResponseCreated(sequence_number=self._number(), response=self.response),
            ResponseInProgress(sequence_number=self._number(), response=self.response),
        ]

    def take(self, delta: Delta) -> list[ResponseEvent]:
        """Add a piece of the answer."""
        events: list[ResponseEvent] = []
        self._logprobs.extend(delta.logprobs or ())
        for piece in delta.pieces:
            if isinstance(piece, str):
                events += self._close_call("completed")
                events += self._add_text(piece)
            elif piece.name is None:
                events += self._add_arguments(piece.arguments)
            else:
                events += self._close_message("completed")
                events += self._close_call("completed")
                events += self._open_call(piece.name, piece.arguments)
        self._usage = delta.usage or self._usage
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            if not self._done and self._call is None:
                events += self._add_text("")  # an empty answer is a message without text
            status: ItemStatus = "incomplete" if delta.finish_reason == "length" else "completed"
            events += self._close_message(status)
            events += self._close_call(status)
        return events

    def end(self) -> list[ResponseEvent]:
        """Complete the response.

        Raises:
            UpstreamProtocolError: the answer ended without a finish reason or usage.
        """
        if self._finish_reason is None or self._usage is None:
            raise incomplete()
        self.response = replace(self.response, output=self._done, usage=usage_of(self._usage))
        if self._finish_reason == "length":
            self.response = replace(
                self.response, status="incomplete", incomplete_details=IncompleteDetails()
            )
            return [ResponseIncomplete(sequence_number=self._number(), response=self.response)]
        self.response = replace(self.response, status="completed", completed_at=int(time.time()))
        return [ResponseCompleted(sequence_number=self._number(), response=self.response)]

    def fail(self, error: GatewayError) -> list[ResponseEvent]:
        """End the response with an error."""
        cut = [each.item("incomplete") for each in (self._message, self._call) if each is not None]
        self.response = replace(
            self.response, status="failed", error=error_of(error), output=[*self._done, *cut]
        )
        return [
            StreamFailed(
                sequence_number=self._number(), code=error.code, message=error.message, param=error.param
            ),
            ResponseFailed(sequence_number=self._number(), response=self.response),
        ]

    def _number(self) -> int:
        return next(self._sequence_numbers)

    def _add_text(self, text: str) -> Iterator[ResponseEvent]:
        message, index = self._message, len(self._done)
        if message is None:
            message = self._message = _OpenMessage()
            item = OutputMessage(id=message.id, status="in_progress", content=[])
            yield OutputItemAdded(sequence_number=self._number(), output_index=index, item=item)
            yield ContentPartAdded(
                sequence_number=self._number(),
                item_id=message.id,
                output_index=index,
                content_index=_CONTENT_INDEX,
                part=message.part(),
            )
        logprobs, self._logprobs = self._logprobs, []
        message.texts.append(text)
        message.logprobs.extend(logprobs)
        if text or logprobs:
            yield OutputTextDelta(
                sequence_number=self._number(),
                item_id=message.id,
                output_index=index,
                content_index=_CONTENT_INDEX,
                delta=text,
                logprobs=event_logprobs(logprobs),
            )

    def _close_message(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Close the open message, if there is one."""
        if self._message is None:
            return
        if self._logprobs:
            yield from self._add_text("")
        message, self._message, index = self._message, None, len(self._done)
        item = message.item(status)
        (part,) = item.content
        yield OutputTextDone(
            sequence_number=self._number(),
            item_id=message.id,
            output_index=index,
            content_index=_CONTENT_INDEX,
            text=part.text,
            logprobs=event_logprobs(message.logprobs),
        )
        yield ContentPartDone(
            sequence_number=self._number(),
            item_id=message.id,
            output_index=index,
            content_index=_CONTENT_INDEX,
            part=part,
        )
        yield self._done_with(item)

    def _open_call(self, name: str, arguments: str) -> Iterator[ResponseEvent]:
        call = self._call = _OpenCall(name)
        yield OutputItemAdded(
            sequence_number=self._number(), output_index=len(self._done), item=call.item("in_progress")
        )
        yield from self._add_arguments(arguments)

    def _add_arguments(self, arguments: str) -> Iterator[ResponseEvent]:
        if self._call is None:
            return
        self._call.arguments.append(arguments)
        yield CallArgumentsDelta(
            sequence_number=self._number(),
            item_id=self._call.id,
            output_index=len(self._done),
            delta=arguments,
        )

    def _close_call(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Close the open call, if there is one; arguments that were whole before the end are complete."""
        if self._call is None:
            return
        item, self._call = self._call.item(status), None
        if _is_json(item.arguments):
            item = replace(item, status="completed")
        yield CallArgumentsDone(
            sequence_number=self._number(),
            item_id=item.id,
            output_index=len(self._done),
            arguments=item.arguments,
        )
        yield self._done_with(item)

    def _done_with(self, item: OutputItem) -> ResponseEvent:
        self._done.append(item)
        return OutputItemDone(sequence_number=self._number(), output_index=len(self._done) - 1, item=item)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
