"""What a request that waits keeps of its bulk: a text once, and nothing of what it only sends along."""

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from gateway.anthropic.request import MessagesRequest
from gateway.openai.chat_request import ChatRequest
from gateway.openai.responses_request import ResponsesRequest
from gateway.openai.tokenize import TokenizeRequest

PIECES = 5_000
SMALL_OBJECTS: list[dict[str, list[object]]] = [{"a": []} for _ in range(PIECES)]
TEXTS = [{"type": "text", "text": "äb"}] * PIECES
INPUT_TEXTS = [{"type": "input_text", "text": "äb"}] * PIECES
CALL = {"name": "f", "arguments": "{}", "parsed_arguments": SMALL_OBJECTS}
LARGE_CALL = {"name": "f", "arguments": json.dumps({"a": SMALL_OBJECTS})}
TOOL_CALL = {"id": "c", "type": "function", "function": CALL}
ANSWER = {"type": "output_text", "text": "x", "logprobs": SMALL_OBJECTS}


def held_per_byte(read: Callable[[bytes], Any], parameters: dict[str, Any]) -> float:
    """Return how many bytes a read request holds for each byte of its body, its generations among them."""
    body = json.dumps({"model": "m", **parameters}, ensure_ascii=False).encode()
    read(body)  # what is made once for all requests
    tracemalloc.start()
    try:
        request = read(body)
        ask = getattr(request, "generations", None) or request.tokenization
        asked = ask(request_id="r", deadline=0.0)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert asked
    return held / len(body)


@pytest.mark.parametrize(
    ("read", "parameters"),
    [
        (ChatRequest.read, {"messages": [{"role": "assistant", "content": "x", "parsed": SMALL_OBJECTS}]}),
        (ChatRequest.read, {"messages": [{"role": "assistant", "tool_calls": [TOOL_CALL]}]}),
        (ChatRequest.read, {"messages": [{"role": "assistant", "function_call": CALL}]}),
        (ChatRequest.read, {"messages": [{"role": "assistant", "function_call": LARGE_CALL}]}),
        (ResponsesRequest.read, {"input": [{"type": "function_call", "call_id": "c", **LARGE_CALL}]}),
        (ChatRequest.read, {"messages": [{"role": "user", "content": TEXTS}]}),
        (TokenizeRequest.read, {"messages": [{"role": "user", "content": TEXTS}]}),
        (ResponsesRequest.read, {"input": [{"role": "assistant", "content": [ANSWER]}]}),
        (ResponsesRequest.read, {"input": [{"type": "function_call", "call_id": "c", **CALL}]}),
        (ResponsesRequest.read, {"input": [{"role": "user", "content": INPUT_TEXTS}]}),
        (
            ResponsesRequest.read,
            {
                "input": [
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": INPUT_TEXTS},
                ]
            },
        ),
    ],
)
def test_a_request_holds_hardly_more_than_its_body(
    read: Callable[[bytes], Any], parameters: dict[str, Any]
) -> None:
    assert held_per_byte(read, parameters) < 1.5


@pytest.mark.parametrize(
    "content", ["one two", [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]]
)
def test_pieces_of_a_text_are_the_text(content: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    (message,) = ChatRequest.read(json.dumps(body).encode()).messages
    assert message.content == "one two"


@pytest.mark.parametrize(
    ("content", "text"),
    [(["1", "2", "3"], "1\n2\n3"), (["", "1", ""], "1"), ([], ""), ("1\n2", "1\n2"), (["1"], "1")],
)
def test_texts_of_a_result_are_lines(content: Any, text: str) -> None:
    """Servers of tools send each item of a list as a text of its own."""

    def parts(kind: str) -> Any:
        return content if isinstance(content, str) else [{"type": kind, "text": each} for each in content]

    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = {
        "messages": [
            {"role": "assistant", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "c", "content": parts("text")},
        ]
    }
    items = {
        "input": [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": parts("input_text")},
        ]
    }
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": parts("text")}
    blocks = {
        "max_tokens": 1,
        "messages": [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}],
    }
    for kind, body in ((ChatRequest, chat), (ResponsesRequest, items), (MessagesRequest, blocks)):
        request = kind.read(json.dumps({"model": "m", **body}).encode())
        assert request.continued.messages[-1].content == text
