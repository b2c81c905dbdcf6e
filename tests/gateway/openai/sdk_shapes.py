"""What the official SDK says that responses and their events are: nothing missing, nothing else."""

from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

_RESPONSE = TypeAdapter(Response)
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

SENT_BEYOND_THE_SDK = {"store"}
"""OpenAI's API sends it, and the SDK has no field for it."""


def check_response(document: dict[str, Any]) -> Response:
    """Return `document` as the SDK reads it; it must be exactly such a response."""
    response = _RESPONSE.validate_python(document, strict=True)
    _nothing_else(response)
    return response


def check_event(document: dict[str, Any]) -> Any:
    """Return `document` as the SDK reads it; it must be exactly such an event."""
    event = _EVENT.validate_python(document, strict=True)
    assert event.type == document["type"]
    _nothing_else(event)
    return event


def _nothing_else(value: Any) -> None:
    if isinstance(value, BaseModel):
        extra = set(value.model_extra or {})
        assert extra == (SENT_BEYOND_THE_SDK if isinstance(value, Response) else set()), type(value)
        for name in type(value).model_fields:
            _nothing_else(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            _nothing_else(each)
