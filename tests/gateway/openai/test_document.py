"""Objects of a body: the keys they may not have, wherever they lie, and the model that one names."""

import codecs
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from gateway.errors import InvalidRequestError
from gateway.openai.chat_request import ChatRequest
from gateway.openai.document import named_model
from gateway.openai.responses_request import ResponsesRequest
from gateway.openai.tokenize import TokenizeRequest

MANY = {f"x{at}": 1 for at in range(1000)}
MESSAGE = {"role": "user", "content": "hi"}
PLACES: list[tuple[type[BaseModel], Callable[[bytes], Any], Mapping[str, Any], str]] = [
    (ChatRequest, ChatRequest.read, {"messages": [MESSAGE], **MANY}, "x0"),
    (ChatRequest, ChatRequest.read, {"messages": [MESSAGE, MESSAGE | MANY]}, "messages.1.x0"),
    (
        ChatRequest,
        ChatRequest.read,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **MANY}]}]},
        "messages.0.content.0.x0",
    ),
    (
        ChatRequest,
        ChatRequest.read,
        {"messages": [MESSAGE], "stream": True, "stream_options": MANY},
        "stream_options.x0",
    ),
    (
        ChatRequest,
        ChatRequest.read,
        {"messages": [MESSAGE], "structured_outputs": MANY},
        "structured_outputs.x0",
    ),
    (
        ChatRequest,
        ChatRequest.read,
        {
            "messages": [MESSAGE],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, **MANY}},
        },
        "response_format.json_schema.x0",
    ),
    (ResponsesRequest, ResponsesRequest.read, {"input": [MESSAGE | MANY]}, "input.0.x0"),
    (ResponsesRequest, ResponsesRequest.read, {"input": "hi", "text": MANY}, "text.x0"),
    (TokenizeRequest, TokenizeRequest.read, {"messages": [MESSAGE | MANY]}, "messages.0.x0"),
]


@pytest.mark.parametrize(("model", "read", "parameters", "param"), PLACES)
def test_of_many_unknown_keys_the_first_is_told(
    model: type[BaseModel], read: Callable[[bytes], Any], parameters: Mapping[str, Any], param: str
) -> None:
    document = {"model": "m", **parameters}
    with pytest.raises(InvalidRequestError) as refused:
        read(json.dumps(document).encode())
    assert (refused.value.message, refused.value.param) == (f"Unknown parameter: {param}.", param)
    # Listing them all kept the event loop for seconds: half a million are in a body's bound.
    with pytest.raises(ValidationError) as faults:
        model.model_validate(document)
    assert faults.value.error_count() <= 2


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"messages": [{"model": "other"}], "model": "glm"}', "glm"),
        (codecs.BOM_UTF8 + b'{"model": "glm"}', "glm"),
        (b'{"model": null}', None),
        (b'{"model": 5}', None),
        (b'{"model": "\xff"}', None),
        (b'{"model": "glm"} x', None),
        (b'["model"]', None),
        (b"", None),
        (b'{"a": ' + b"[" * 100_000, None),
    ],
)
def test_the_model_that_a_body_names(body: bytes, named: str | None) -> None:
    assert named_model(body) == named
