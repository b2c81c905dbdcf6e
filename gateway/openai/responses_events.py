"""The events of a streamed response, as OpenAI names them. Each has the next number of its stream."""

from collections.abc import Sequence

from msgspec import Struct

from gateway.generation import TokenLogprob
from gateway.openai.responses_documents import OutputItem, OutputText, ResponseDocument


class ResponseEvent(Struct, frozen=True, kw_only=True, tag_field="type"):
    """One event; its `type` is also the name of its server-sent event."""

    sequence_number: int


class ResponseCreated(ResponseEvent, frozen=True, kw_only=True, tag="response.created"):
    """The request was accepted."""

    response: ResponseDocument


class ResponseInProgress(ResponseEvent, frozen=True, kw_only=True, tag="response.in_progress"):
    """The response is being made."""

    response: ResponseDocument


class ResponseCompleted(ResponseEvent, frozen=True, kw_only=True, tag="response.completed"):
    """The response is whole."""

    response: ResponseDocument


class ResponseIncomplete(ResponseEvent, frozen=True, kw_only=True, tag="response.incomplete"):
    """The response ended at a bound."""

    response: ResponseDocument


class ResponseFailed(ResponseEvent, frozen=True, kw_only=True, tag="response.failed"):
    """The response broke; what there is of it stays."""

    response: ResponseDocument


class StreamFailed(ResponseEvent, frozen=True, kw_only=True, tag="error"):
    """What went wrong after the stream had begun."""

    code: str | None
    message: str
    param: str | None


class OutputItemAdded(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: OutputItem


class OutputItemDone(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item is whole."""

    output_index: int
    item: OutputItem


class ContentPartAdded(ResponseEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    """A message's text begins."""

    item_id: str
    output_index: int
    content_index: int
    part: OutputText


class ContentPartDone(ResponseEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    """A message's text is whole."""

    item_id: str
    output_index: int
    content_index: int
    part: OutputText


class EventTopLogprob(Struct, frozen=True):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float


class EventLogprob(Struct, frozen=True):
    """A sampled token's log-probability and the most likely ones beside it."""

    token: str
    logprob: float
    top_logprobs: list[EventTopLogprob]


class OutputTextDelta(ResponseEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More of a message's text."""

    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[EventLogprob]


class OutputTextDone(ResponseEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    """All of a message's text."""

    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[EventLogprob]


class CallArgumentsDelta(
    ResponseEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    """More of a call's arguments."""

    item_id: str
    output_index: int
    delta: str


class CallArgumentsDone(
    ResponseEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    """All of a call's arguments."""

    item_id: str
    output_index: int
    arguments: str


StreamEvent = (
    ResponseCreated
    | ResponseInProgress
    | OutputItemAdded
    | ContentPartAdded
    | OutputTextDelta
    | OutputTextDone
    | ContentPartDone
    | CallArgumentsDelta
    | CallArgumentsDone
    | OutputItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | StreamFailed
)


def event_logprobs(tokens: Sequence[TokenLogprob]) -> list[EventLogprob]:
    """Write log-probabilities; events have them without bytes."""
    return [
        EventLogprob(
            token.token, token.logprob, [EventTopLogprob(top.token, top.logprob) for top in token.top]
        )
        for token in tokens
    ]


def name_of(event: ResponseEvent) -> str:
    """Return the event's type."""
    return str(event.__struct_config__.tag)
