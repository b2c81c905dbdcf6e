"""`/v1/responses`: the response and its events, as OpenAI defines them, and how they are written."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Union

import msgspec
from msgspec import UNSET, Struct, UnsetType, defstruct
from msgspec.structs import replace

from gateway.core.events import Delta, FinishReason, Reasoning, Timings, TokenLogprob, Usage
from gateway.errors import GatewayError, InvalidRequestError, RateLimitError
from gateway.openai.answer import EventsAnswer, incomplete, new_id
from gateway.openai.chat_answer import TokenLogprobContent, logprobs_document, new_call_id
from gateway.openai.responses_request import FlatJsonSchemaFormat, ResponsesRequest, TextConfig
from gateway.openai.tools import ChoiceMode

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ErrorCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]


class OutputText(Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message. `logprobs` is empty unless the request included them."""

    annotations: list[Any] = []
    logprobs: list[TokenLogprobContent] = []
    text: str


class OutputMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """An item with text of the model."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """An item with a call. `arguments` is a JSON object as text; its result refers to `call_id`."""

    id: str
    status: ItemStatus
    arguments: str
    call_id: str
    name: str


class ReasoningText(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str


class OutputReasoning(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """An item with what the model thought before its answer, as it wrote it: nobody sums it up."""

    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputTokensDetails(Struct, frozen=True, kw_only=True):
    """How much of the input was found in the prefix cache. No request asks for writes to it."""

    cache_write_tokens: int = 0
    cached_tokens: int


class OutputTokensDetails(Struct, frozen=True, kw_only=True):
    """How much of the output is reasoning: of models that do not reason apart from their answer, nothing."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True, kw_only=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int
    timings: Timings | UnsetType = UNSET


class ResponseError(Struct, frozen=True, kw_only=True):
    """The error that ended a response that had started."""

    code: ErrorCode
    message: str


class IncompleteDetails(Struct, frozen=True, kw_only=True):
    """Why a response ended before it was complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseReasoning(Struct, frozen=True, kw_only=True):
    """Reasoning options: those that had an effect."""

    effort: str | None = None
    summary: None = None


class InputTokens(Struct, frozen=True, kw_only=True):
    """How many tokens an input has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseDocument(Struct, frozen=True, kw_only=True):
    """A response in any state. It repeats the request; what that left open has the value that was used."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning = ResponseReasoning()
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: ChoiceMode | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]

    @classmethod
    def to(cls, request: ResponsesRequest) -> "ResponseDocument":
        """Return the initial response to `request`."""
        choice = request.tool_choice or "auto"
        return cls(
            id=new_id("resp"),
            created_at=int(time.time()),
            status="in_progress",
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            model=request.model,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            prompt_cache_key=request.prompt_cache_key,
            reasoning=ResponseReasoning(effort=request.reasoning.effort if request.reasoning else None),
            safety_identifier=request.safety_identifier,
            temperature=1.0 if request.temperature is None else request.temperature,
            text={"format": _format(request.text)},
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[{**tool.model_dump(), "strict": bool(tool.strict)} for tool in request.tools or ()],
            top_logprobs=request.top_logprobs or 0,
            top_p=1.0 if request.top_p is None else request.top_p,
            user=request.user,
            metadata=request.metadata or {},
        )


def _format(text: TextConfig | None) -> dict[str, Any]:
    form = text.format if text else None
    if isinstance(form, FlatJsonSchemaFormat):
        return {**form.model_dump(by_alias=True), "strict": True}  # it is always enforced
    return {"type": form.type if form else "text"}


class EventTopLogprob(Struct, frozen=True):
    """One of the most likely tokens at its position."""

    token: str
    logprob: float


class EventLogprob(Struct, frozen=True):
    """A sampled token's log-probability, and the most likely alternatives."""

    token: str
    logprob: float
    top_logprobs: list[EventTopLogprob]


_RESPONSE = {"response": ResponseDocument}
_ITEM = {"output_index": int, "item": OutputItem}
_IN_CALL = {"item_id": str, "output_index": int}
_IN_MESSAGE = {**_IN_CALL, "content_index": int}
_PART = {**_IN_MESSAGE, "part": OutputText | ReasoningText}

_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "response.created": _RESPONSE,
    "response.in_progress": _RESPONSE,
    "response.output_item.added": _ITEM,
    "response.content_part.added": _PART,
    "response.output_text.delta": {**_IN_MESSAGE, "delta": str, "logprobs": list[EventLogprob]},
    "response.output_text.done": {**_IN_MESSAGE, "text": str, "logprobs": list[EventLogprob]},
    "response.reasoning_text.delta": {**_IN_MESSAGE, "delta": str},
    "response.reasoning_text.done": {**_IN_MESSAGE, "text": str},
    "response.content_part.done": _PART,
    "response.function_call_arguments.delta": {**_IN_CALL, "delta": str},
    "response.function_call_arguments.done": {**_IN_CALL, "arguments": str},
    "response.output_item.done": _ITEM,
    "response.completed": _RESPONSE,
    "response.incomplete": _RESPONSE,
    "response.failed": _RESPONSE,
    "error": {"code": str | None, "message": str, "param": str | None},
}
"""OpenAI's events: the fields of each type, beside its place in the stream."""

EVENTS: Mapping[str, type[Struct]] = {
    name: defstruct(
        name.title().replace(".", "").replace("_", "") + "Event",
        [("sequence_number", int), *fields.items()],
        tag_field="type",
        tag=name,
        frozen=True,
        kw_only=True,
    )
    for name, fields in _FIELDS.items()
}
StreamEvent: Any = Union[tuple(EVENTS.values())]  # noqa: UP007 - made from a table
"""The data of any event; its `type` is also the name of its server-sent event."""


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
        begun = [] if self._events else self._begin()  # clients know no stream without
        cut = [] if self._open is None else [self._open.item("incomplete")]
        self.document = replace(
            self.document, status="failed", error=_error(error), output=[*self._done, *cut]
        )
        return [
            *begun,
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
        """Close the open item, if there is one; a call is as complete as its arguments."""
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
            status = "completed" if _is_json(opened.text) else "incomplete"
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
