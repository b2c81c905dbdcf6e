"""What a request's generations are made of is made once, and a conversation's messages are counted."""

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from gateway.errors import InvalidRequestError
from gateway.openai import (
    chat_request,
    completion_request,
    responses_request,
    structured,
    tokenize_request,
)

MESSAGES = [{"role": "user", "content": "hi"}]
LIMIT = 16_384


@pytest.mark.parametrize(
    ("module", "maker", "read", "parameters"),
    [
        (chat_request, "conversation", "read_chat_request", {"messages": MESSAGES}),
        (responses_request, "messages_of", "read_responses_request", {"input": MESSAGES}),
        (tokenize_request, "conversation", "read_tokenize_request", {"messages": MESSAGES}),
        (completion_request, "TokenIds", "read_completion_request", {"prompt": [1, 2]}),
        (
            structured,
            "schema_grammar",
            "read_chat_request",
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
    read: str,
    parameters: dict[str, Any],
) -> None:
    made = []
    make: Callable[..., Any] = getattr(module, maker)
    monkeypatch.setattr(module, maker, lambda *given: made.append(given) or make(*given))
    reader = getattr(module, read, None) or getattr(chat_request, read)
    request = reader(json.dumps({"model": "m", **parameters}).encode())
    ask = request.tokenization if module is tokenize_request else request.generations
    ask(request_id="r", deadline=0.0)
    assert len(made) == 1


@pytest.mark.parametrize(
    ("read", "field"),
    [
        (chat_request.read_chat_request, "messages"),
        (responses_request.read_responses_request, "input"),
        (tokenize_request.read_tokenize_request, "messages"),
    ],
)
def test_a_conversation_has_so_many_messages(read: Callable[[bytes], Any], field: str) -> None:
    read(json.dumps({"model": "m", field: MESSAGES * LIMIT}).encode())
    with pytest.raises(InvalidRequestError) as refused:
        read(json.dumps({"model": "m", field: MESSAGES * (LIMIT + 1)}).encode())
    assert refused.value.message == f"{field}: at most {LIMIT} entries are allowed"
    assert refused.value.param == field
