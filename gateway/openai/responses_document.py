"""`/v1/responses`: the response and its events as documents, as OpenAI defines them."""

import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal, Union

from msgspec import UNSET, Struct, UnsetType, defstruct

from gateway.core.events import Timings
from gateway.openai.chat_answer import TokenLogprobContent
from gateway.openai.responses_request import (
    FlatJsonSchemaFormat,
    FlatNamedChoice,
    ResponsesRequest,
    TextConfig,
)
from gateway.openai.tools import ChoiceMode

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ErrorCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]


def new_id(kind: str) -> str:
    """Make an id that tells what it is of."""
    return f"{kind}_{secrets.token_hex(24)}"


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
            tool_choice=choice.model_dump() if isinstance(choice, FlatNamedChoice) else choice,
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
