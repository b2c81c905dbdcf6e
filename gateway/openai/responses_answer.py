"""`/v1/responses`: the answer, complete or as named events, in OpenAI's format."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import replace

from gateway.core.events import Delta, FinishReason, Reasoning, TokenLogprob, Usage
from gateway.errors import GatewayError, InvalidRequestError, RateLimitError
from gateway.openai.answer import EventsAnswer, incomplete
from gateway.openai.chat_answer import logprobs_document, new_call_id
from gateway.openai.responses_document import (
    EVENTS,
    ErrorCode,
    EventLogprob,
    EventTopLogprob,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
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


_TEXT: Final = {
    OutputMessage: "output_text",
    OutputReasoning: "reasoning_text",
    OutputCall: "function_call_arguments",
}
"""What events call the text of an item."""


@dataclass(frozen=True, slots=True)
class _Open:
    """An item that may get more text."""

    began: OutputItem
    """As it was without any."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self) -> OutputText | ReasoningText | None:
        """Return the text as the only part of the item's content; None: it has no parts."""
        if isinstance(self.began, OutputMessage):
            # Here the bytes are never null.
            logprobs = logprobs_document(self.logprobs, no_bytes=[]).content
            return OutputText(text=self.text, logprobs=logprobs)
        return ReasoningText(text=self.text) if isinstance(self.began, OutputReasoning) else None

    def item(self, status: ItemStatus) -> OutputItem:
        if isinstance(self.began, OutputCall):
            return replace(self.began, status=status, arguments=self.text)
        return replace(self.began, status=status, content=[self.part()])


class ResponsesAnswer(EventsAnswer):
    """The answer to a Responses request.

    Text opens a message, reasoning an item of its own; a call closes them and is an item of its own; text
    after a call opens another message.
    """

    document: ResponseDocument

    def __init__(self, request: ResponsesRequest) -> None:
        self.document = ResponseDocument.to(request)
        self._events = 0
        """So many were made."""
        self._done: list[OutputItem] = []
        self._open: _Open | None = None
        self._logprobs: list[TokenLogprob] = []
        """Those of tokens whose text was not shown yet."""
        self._finish_reason: FinishReason | None = None
        self._usage: Usage | None = None

    def _begin(self) -> list[Struct]:
        return [
            self._event("response.created", response=self.document),
            self._event("response.in_progress", response=self.document),
        ]

    def _take(self, delta: Delta) -> list[Struct]:
        events: list[Struct] = []
        self._logprobs.extend(delta.logprobs or ())
        for piece in delta.pieces:
            if isinstance(piece, str):
                events += self._add_text(piece)
            elif isinstance(piece, Reasoning):
                if not self._is_open(OutputReasoning):
                    new = OutputReasoning(id=new_id("rs"), status="in_progress", content=[])
                    events += self._begin_item(new)
                events += self._add(piece.text)
            else:
                if piece.name is not None:
                    events += self._begin_item(_new_call(piece.name))
                if self._is_open(OutputCall):
                    events += self._add(piece.arguments)
        self._usage = delta.usage or self._usage
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            if not self._done and self._open is None:
                events += self._add_text("")  # an empty answer is a message without text
            events += self._close("incomplete" if delta.finish_reason == "length" else "completed")
        return events

    def _end(self) -> list[Struct]:
        if self._finish_reason is None or self._usage is None:
            raise incomplete()
        response = replace(self.document, output=self._done, usage=_usage(self._usage))
        if self._finish_reason == "length":
            details = IncompleteDetails()
            self.document = replace(response, status="incomplete", incomplete_details=details)
            return [self._event("response.incomplete", response=self.document)]
        self.document = replace(response, status="completed", completed_at=int(time.time()))
        return [self._event("response.completed", response=self.document)]

    def _fail(self, error: GatewayError) -> list[Struct]:
        cut = [] if self._open is None else [self._open.item("incomplete")]
        self.document = replace(
            self.document, status="failed", error=_error(error), output=[*self._done, *cut]
        )
        return [
            self._event("error", code=error.code, message=error.message, param=error.param),
            self._event("response.failed", response=self.document),
        ]

    def _event(self, kind: str, **fields: Any) -> Struct:
        event = EVENTS[kind](sequence_number=self._events, **fields)
        self._events += 1
        return event

    def _of_item(self, kind: str, **fields: Any) -> Struct:
        """Return an event about the open item, which follows all that are done."""
        return self._event(f"response.{kind}", output_index=len(self._done), **fields)

    def _of_text(self, opened: _Open, kind: str, **fields: Any) -> Struct:
        """Return an event about the open item's text: its arguments, or the only part of its content."""
        place = {} if isinstance(opened.began, OutputCall) else {"content_index": 0}
        return self._of_item(kind, item_id=opened.began.id, **place, **fields)

    def _is_open(self, kind: type[OutputItem]) -> bool:
        return self._open is not None and isinstance(self._open.began, kind)

    def _begin_item(self, item: OutputItem) -> Iterator[Struct]:
        """Close the open item, and have `item` be open."""
        yield from self._close("completed")
        opened = self._open = _Open(item)
        yield self._of_item("output_item.added", item=item)
        if (part := opened.part()) is not None:
            yield self._of_text(opened, "content_part.added", part=part)

    def _add_text(self, text: str) -> Iterator[Struct]:
        if not self._is_open(OutputMessage):
            new = OutputMessage(id=new_id("msg"), status="in_progress", content=[])
            yield from self._begin_item(new)
        logprobs, self._logprobs = self._logprobs, []
        if self._open is not None and (text or logprobs):
            self._open.logprobs.extend(logprobs)
            yield from self._add(text, logprobs=_logprobs(logprobs))

    def _add(self, text: str, **fields: Any) -> Iterator[Struct]:
        """Add to the open item."""
        if self._open is not None:
            self._open.pieces.append(text)
            kind = _TEXT[type(self._open.began)]
            yield self._of_text(self._open, f"{kind}.delta", delta=text, **fields)

    def _close(self, status: ItemStatus) -> Iterator[Struct]:
        """Close the open item, if there is one; arguments that were complete before the end are complete."""
        if self._is_open(OutputMessage) and self._logprobs:
            yield from self._add_text("")
        opened = self._open
        if opened is None:
            return
        fields: dict[str, Any] = {"text": opened.text}
        if isinstance(opened.began, OutputMessage):
            fields["logprobs"] = _logprobs(opened.logprobs)
        elif isinstance(opened.began, OutputCall):
            fields = {"arguments": opened.text}
            status = "completed" if _is_json(opened.text) else status
        yield self._of_text(opened, f"{_TEXT[type(opened.began)]}.done", **fields)
        if (part := opened.part()) is not None:
            yield self._of_text(opened, "content_part.done", part=part)
        item = opened.item(status)
        yield self._of_item("output_item.done", item=item)
        self._open = None
        self._done.append(item)


def _new_call(name: str) -> OutputCall:
    return OutputCall(id=new_id("fc"), status="in_progress", arguments="", call_id=new_call_id(), name=name)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
