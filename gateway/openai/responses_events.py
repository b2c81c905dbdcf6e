"""The events of a streamed response, with OpenAI's names. They are numbered in order."""

from collections.abc import Sequence

from msgspec import Struct

from gateway.generation import TokenLogprob
from gateway.openai.responses_documents import OutputItem, OutputText, ResponseDocument


class ResponseEvent(Struct, frozen=True, kw_only=True, tag_field="type"):
    """One event; its `type` is also the name of its server-sent event."""

    sequence_number: int


class _OfResponse(ResponseEvent, frozen=True, kw_only=True):
    response: ResponseDocument


class ResponseCreated(_OfResponse, frozen=True, kw_only=True, tag="response.created"):
    """The request was accepted."""


class ResponseInProgress(_OfResponse, frozen=True, kw_only=True, tag="response.in_progress"):
    """The response is being made."""


class ResponseCompleted(_OfResponse, frozen=True, kw_only=True, tag="response.completed"):
    """The response is complete."""


class ResponseIncomplete(_OfResponse, frozen=True, kw_only=True, tag="response.incomplete"):
    """The response ended at a limit."""


class ResponseFailed(_OfResponse, frozen=True, kw_only=True, tag="response.failed"):
    """The response failed; the output so far stays."""


class StreamFailed(ResponseEvent, frozen=True, kw_only=True, tag="error"):
    """What went wrong after the stream had begun."""

    code: str | None
    message: str
    param: str | None


class _OfItem(ResponseEvent, frozen=True, kw_only=True):
    output_index: int
    item: OutputItem


class OutputItemAdded(_OfItem, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins."""


class OutputItemDone(_OfItem, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item is complete."""


class _WithinItem(ResponseEvent, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class _WithinMessage(_WithinItem, frozen=True, kw_only=True):
    content_index: int


class _OfPart(_WithinMessage, frozen=True, kw_only=True):
    part: OutputText


class ContentPartAdded(_OfPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    """A message's text begins."""


class ContentPartDone(_OfPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    """A message's text is complete."""


class EventTopLogprob(Struct, frozen=True):
    """One of the most likely tokens at its position."""

    token: str
    logprob: float


class EventLogprob(Struct, frozen=True):
    """A sampled token's log-probability, and the most likely alternatives."""

    token: str
    logprob: float
    top_logprobs: list[EventTopLogprob]


class OutputTextDelta(_WithinMessage, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More of a message's text."""

    delta: str
    logprobs: list[EventLogprob]


class OutputTextDone(_WithinMessage, frozen=True, kw_only=True, tag="response.output_text.done"):
    """All of a message's text."""

    text: str
    logprobs: list[EventLogprob]


class CallArgumentsDelta(
    _WithinItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    """More of a call's arguments."""

    delta: str


class CallArgumentsDone(_WithinItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """All of a call's arguments."""

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
    """Write log-probabilities; in events they come without bytes."""
    return [
        EventLogprob(
            token.token, token.logprob, [EventTopLogprob(top.token, top.logprob) for top in token.top]
        )
        for token in tokens
    ]


def name_of(event: ResponseEvent) -> str:
    """Return the event's type."""
    return str(event.__struct_config__.tag)
