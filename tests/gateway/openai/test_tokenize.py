import json
from typing import Any

import pytest

from gateway.core.request import (
    Conversation,
    Message,
    PlainText,
    TokenIds,
)
from gateway.core.upstream import Tokenization, Tokens
from gateway.errors import InvalidRequestError
from gateway.openai.answer import encode
from gateway.openai.chat_request import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.document import Reading
from gateway.openai.tokenize import DetokenizeRequest, TokenizeRequest, tokenize_answer
from wire.limits import IDS_LIMIT

MESSAGES = [
    {"role": "developer", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "q"}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def read(**parameters: Any) -> Tokenization:
    request = TokenizeRequest.read(json.dumps({"model": "m", **parameters}).encode())
    return request.tokenization(request_id="r", deadline=1)


def test_a_text() -> None:
    asked = read(prompt="a")
    assert (asked.request_id, asked.model, asked.deadline) == ("r", "m", 1)
    assert asked.prompt == PlainText("a")
    assert asked.prefix
    assert not asked.strings
    assert read(prompt="", add_special_tokens=False, return_token_strs=True) == Tokenization(
        request_id="r", model="m", deadline=1, prompt=PlainText(""), prefix=False, strings=True
    )


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": NAMED},
        {"tools": TOOLS, "response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"guided_regex": "a+"},
        {"functions": [TOOLS[0]["function"]]},
        {"functions": [TOOLS[0]["function"]], "function_call": {"name": "f"}},
    ],
)
def test_a_conversation_is_what_a_chat_asks_for(more: dict[str, Any]) -> None:
    body = {"model": "m", "messages": MESSAGES, **more}
    chat = ChatRequest.read(json.dumps(body).encode())
    asked = read(messages=MESSAGES, add_special_tokens=False, **more)
    assert (asked.prompt, asked.grammar) == (chat.continued, chat.grammar)
    assert asked.answer_next
    assert not read(messages=MESSAGES, add_generation_prompt=False, **more).answer_next
    assert isinstance(asked.prompt, Conversation)
    assert asked.prompt.messages[0] == Message(role="system", content="s", field="messages.0")


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "messages"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "tools": TOOLS}, "tools"),
        ({"prompt": "a", "tool_choice": "none"}, "tool_choice"),
        ({"prompt": "a", "response_format": {"type": "text"}}, "response_format"),
        ({"prompt": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"prompt": "a", "guided_regex": "a"}, "guided_regex"),
        ({"prompt": "a", "functions": [TOOLS[0]["function"]]}, "functions"),
        ({"messages": MESSAGES, "guided_regex": "a", "guided_json": "{}"}, "guided_regex"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        ({"messages": MESSAGES, "response_format": {"type": "x"}}, "response_format"),
        (
            {
                "messages": MESSAGES,
                "response_format": {"type": "json_object"},
                "structured_outputs": {"regex": "a"},
            },
            "structured_outputs",
        ),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "a", "audio": {}}]}, "messages.0.audio"),
        ({"messages": MESSAGES, "tools": [{"type": "x"}]}, "tools.0.type"),
        ({"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "a", "nonsense": 1}, "nonsense"),
        ({"prompt": "a", "model": 5}, "model"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(**parameters)
    assert refused.value.param == param


@pytest.mark.parametrize("name", TokenizeRequest.unsupported)
def test_neutral_values_are_accepted(name: str) -> None:
    neutral = read(prompt="a", **{name: TokenizeRequest.unsupported[name]})
    assert neutral == read(prompt="a") == read(prompt="a", **{name: None})


def test_ids() -> None:
    asked = DetokenizeRequest.read(b'{"model":"m","tokens":[5,0]}')
    assert asked.tokenization(request_id="r", deadline=1).prompt == TokenIds((5, 0))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":"m"}', "tokens"),
        (b'{"model":"m","tokens":[1,-1]}', "tokens.1"),
        (b'{"model":"m","tokens":[true]}', "tokens.0"),
        (b'{"model":"m","tokens":[4294967296]}', "tokens.0"),
        (b'{"model":"m","tokens":"a"}', "tokens"),
        (b'{"tokens":[]}', "model"),
        (b'{"model":"m","tokens":[],"x":1}', "x"),
    ],
)
def test_ids_that_cannot_be_are_refused_by_place(body: bytes, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        DetokenizeRequest.read(body)
    assert refused.value.param == param


def test_the_answer_counts() -> None:
    answer = tokenize_answer(Tokens(ids=(4, 5)), 64)
    assert encode(answer) == b'{"count":2,"max_model_len":64,"tokens":[4,5]}'
    shown = tokenize_answer(Tokens(ids=(4,), strings=("a",)), None)
    assert encode(shown) == b'{"count":1,"max_model_len":null,"tokens":[4],"token_strs":["a"]}'


def test_as_many_ids_as_a_context_holds_are_taken() -> None:
    for read, field in ((DetokenizeRequest.read, "tokens"), (CompletionRequest.read, "prompt")):
        read(json.dumps({"model": "m", field: [7] * IDS_LIMIT}).encode())
        with pytest.raises(InvalidRequestError) as refused:
            read(json.dumps({"model": "m", field: [7] * (IDS_LIMIT + 1)}).encode())
        assert refused.value.param == field


def test_switches_of_the_template_are_as_in_a_chat() -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    body["chat_template_kwargs"] = {"enable_thinking": False, "other": 1}
    body["reasoning_effort"] = "low"
    reading = Reading(reads=frozenset({"enable_thinking", "reasoning_effort"}))
    asked = TokenizeRequest.read(json.dumps(body).encode(), reading)
    prompt = asked.tokenization(request_id="r", deadline=0).prompt
    assert isinstance(prompt, Conversation)
    assert prompt.switches == {"reasoning_effort": "low", "enable_thinking": False}
    assert list(reading.ignored) == ["chat_template_kwargs.other"]
    assert prompt.switches == ChatRequest.read(json.dumps(body).encode(), reading).continued.switches
