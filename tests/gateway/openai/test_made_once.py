"""What a request's generations are made of is made once, and a conversation's messages are counted."""

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from gateway.errors import InvalidRequestError
from gateway.openai import chat_request, completions, structured, tokenize
from gateway.openai import responses_request as responses
from gateway.openai.document import Body

MESSAGES = [{"role": "user", "content": "hi"}]
LIMIT = 16_384


@pytest.mark.parametrize(
    ("module", "maker", "kind", "parameters"),
    [
        (chat_request, "conversation", chat_request.ChatRequest, {"messages": MESSAGES}),
        (responses, "messages_of", responses.ResponsesRequest, {"input": MESSAGES}),
        (tokenize, "conversation", tokenize.TokenizeRequest, {"messages": MESSAGES}),
        (completions, "TokenIds", completions.CompletionRequest, {"prompt": [1, 2]}),
        (
            structured,
            "schema_grammar",
            chat_request.ChatRequest,
            {
                "messages": MESSAGES,
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
            },
        ),
    ],
)
def test_it_is_made_once(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    maker: str,
    kind: type[Body],
    parameters: dict[str, Any],
) -> None:
    make = Mock(side_effect=getattr(module, maker))
    monkeypatch.setattr(module, maker, make)
    request: Any = kind.read(json.dumps({"model": "m", **parameters}).encode())
    ask = request.tokenization if module is tokenize else request.generations
    ask(request_id="r", deadline=0.0)
    assert make.call_count == 1


@pytest.mark.parametrize(
    ("read", "field"),
    [
        (chat_request.ChatRequest.read, "messages"),
        (responses.ResponsesRequest.read, "input"),
        (tokenize.TokenizeRequest.read, "messages"),
    ],
)
def test_a_conversation_has_so_many_messages(read: Callable[[bytes], Any], field: str) -> None:
    read(json.dumps({"model": "m", field: MESSAGES * LIMIT}).encode())
    with pytest.raises(InvalidRequestError) as refused:
        read(json.dumps({"model": "m", field: MESSAGES * (LIMIT + 1)}).encode())
    assert refused.value.message == f"{field}: at most {LIMIT} entries are allowed"
    assert refused.value.param == field
