"""Errors speak of JSON, not of Python's types and our classes, and say where a body is no JSON."""

import json
from typing import Any

import pytest

from gateway.errors import InvalidRequestError
from gateway.openai.chat_request import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.document import Body, read_object
from gateway.openai.embeddings import EmbeddingsRequest
from gateway.openai.responses_request import ResponsesRequest

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"messages": ["hi"]}, "messages.0: Input should be an object"),
        ({"messages": "hi"}, "messages: Input should be an array"),
        (
            {"messages": [{"role": "user", "content": ["hi"]}]},
            "messages.0.content.0: Input should be an object",
        ),
        ({"messages": []}, "messages: Array should have at least 1 item, not 0"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content: Input should be a string or an array",
        ),
        ({"messages": HI, "stop": 5}, "stop: Input should be a string or an array"),
        ({"messages": HI, "stop": ["a"] * 17}, "stop: Array should have at most 16 items, not 17"),
        ({"messages": HI, "stop": [5]}, "stop.0: Input should be a string"),
        ({"messages": HI, "tools": ["f"]}, "tools.0: Input should be an object"),
        ({"messages": HI, "tools": {}}, "tools: Input should be an array"),
        ({"messages": HI, "logit_bias": []}, "logit_bias: Input should be an object"),
        ({"messages": HI, "temperature": "1"}, "temperature: Input should be a number"),
        ({"messages": HI, "seed": 1.5}, "seed: Input should be an integer"),
        ({"messages": HI, "stream": "true"}, "stream: Input should be a boolean"),
        ({"messages": HI, "tool_choice": "any"}, "tool_choice: Input should be 'none', 'auto' or 'required'"),
        (
            {"messages": HI, "tools": [{"function": {"name": "a b"}}]},
            "tools.0.function.name: String should match pattern '^[a-zA-Z0-9_-]{1,128}$'",
        ),
    ],
)
def test_faults_are_those_of_json(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        ChatRequest.read(json.dumps({"model": "m", **parameters}).encode())
    assert refused.value.message == message


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, "prompt: Input should be a string or an array"),
        ({"text": "a"}, "prompt: Input should be a string or an array"),
        (["a", [1]], "prompt.1: Input should be a string"),
        ([[1], []], "prompt.1: Array should have at least 1 item, not 0"),
    ],
)
def test_a_prompt_has_several_types(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        CompletionRequest.read(json.dumps({"model": "m", "prompt": prompt}).encode())
    assert refused.value.message == message


@pytest.mark.parametrize("item", ["x", 5, None, ["x"]])
def test_what_may_be_of_several_types_is_an_object(item: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        ResponsesRequest.read(json.dumps({"model": "m", "input": [item]}).encode())
    assert refused.value.message == "input.0: Input should be an object"


@pytest.mark.parametrize("request_type", [EmbeddingsRequest, ResponsesRequest])
def test_an_input_has_several_types(request_type: type[Body]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        request_type.read(b'{"model": "m", "input": 5}')
    assert refused.value.message == "input: Input should be a string or an array"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{'a': 1}", "expecting property name enclosed in double quotes at line 1, column 2"),
        (b'{"a": 1\n "b": 2}', "expecting ',' delimiter at line 2, column 2"),
        (b'{"a": "x', "unterminated string starting at line 1, column 7"),
        (b'{"a": "x\ny"}', "invalid control character at line 1, column 9"),
        (b'{"a": 1}}', "extra data at line 1, column 9"),
        ('{"a": "你好"}'.encode("gbk"), "it is not UTF-8 at byte 7"),
        ('{"a": 1}'.encode("utf-16"), "it is not UTF-8 at byte 0"),
        (b'{"a": NaN}', "NaN is no number of JSON"),
        (b'{"a": -Infinity}', "-Infinity is no number of JSON"),
        (b'{"a": 1e400}', "a number is too large"),
        (rb'{"a": "\ud83d\ude00 \ud83d"}', r"a string has half of a surrogate pair, \ud83d"),
        (rb'{"a": "\uDE00 x"}', r"a string has half of a surrogate pair, \uDE00"),
        (b" ", "expecting value at line 1, column 2"),
    ],
)
def test_a_body_that_is_not_json_is_told_why(body: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_object(body)
    assert refused.value.message == f"The body is not valid JSON: {reason}."


def test_a_byte_order_mark_is_no_fault() -> None:
    assert read_object(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
