"""What of a request has no effect is accepted and noted; a strict reading refuses it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.anthropic.request import CountTokensRequest
from gateway.errors import InvalidRequestError
from gateway.openai.chat_request import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.document import Reading
from gateway.openai.responses_request import InputTokensRequest, ResponsesRequest
from gateway.openai.tokenize import DetokenizeRequest, TokenizeRequest

MESSAGE = {"role": "user", "content": "hi"}
CALL = {"id": "call_12345", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}

Read = Callable[[bytes, Reading], Any]

CHAT: list[tuple[dict[str, Any], list[str]]] = [
    ({"reasoning_effort": "high", "verbosity": "low"}, ["reasoning_effort", "verbosity"]),
    ({"store": True, "prediction": {"type": "content", "content": "x"}}, ["store", "prediction"]),
    ({"chat_template_kwargs": {"enable_thinking": False}}, ["chat_template_kwargs.enable_thinking"]),
    ({"prompt_cache_retention": "24h", "cache_salt": "s"}, ["prompt_cache_retention", "cache_salt"]),
    ({"prompt_cache_key": "k"}, ["prompt_cache_key"]),
    ({"thinking_token_budget": 100, "return_mm_kwargs": True}, ["thinking_token_budget"]),
    ({"thinking_token_budget": 0, "enable_thinking": False}, ["thinking_token_budget", "enable_thinking"]),
    ({"thinking_token_budget": None, "enable_thinking": True}, []),
    ({"stream_options": {"include_obfuscation": True}}, ["stream_options.include_obfuscation"]),
    (
        {"messages": [{"role": "user", "content": "a", "refusal": "b"}]},
        ["messages.refusal"],
    ),
    (
        {"options": {"num_ctx": 9}, "keep_alive": "5m", "request_id": "r"},
        ["options", "keep_alive", "request_id"],
    ),
    (
        {"kv_transfer_params": {"a": 1}, "mm_processor_kwargs": {"b": 2}},
        ["kv_transfer_params", "mm_processor_kwargs"],
    ),
    ({"messages": [{**MESSAGE, "name": "ann"}, {**MESSAGE, "name": "bob"}]}, ["messages.name"]),
    (
        {"messages": [{**MESSAGE, "type": "message", "cache_control": {"type": "x"}}]},
        ["messages.type", "messages.cache_control"],
    ),
    (
        {
            "messages": [
                {"role": "assistant", "content": "a", "reasoning_content": "b", "refusal": None},
                MESSAGE,
            ]
        },
        ["messages.reasoning_content"],
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}
            ]
        },
        ["messages.content.cache_control"],
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{**CALL, "provider_specific_fields": {"a": 1}}],
                },
                {"role": "tool", "tool_call_id": "call_12345", "content": "1", "name": "f"},
            ]
        },
        ["messages.tool_calls.provider_specific_fields", "messages.name"],
    ),
    ({"tools": [{**TOOL, "cache_control": {"type": "x"}}]}, ["tools.cache_control"]),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        ["stream_options.include_obfuscation"],
    ),
    ({"nothing": None, "off": False, "none": [], "empty": {}, "blank": "", "zero": 0}, []),
    ({"na,me": 1, "é": 1, "x" * 100: 1}, ["na?me", "'\\xe9'", "x" * 64]),
]
RESPONSES: list[tuple[dict[str, Any], list[str]]] = [
    ({"reasoning": {"effort": "low", "summary": "auto"}}, ["reasoning.effort", "reasoning.summary"]),
    ({"store": True, "truncation": "auto"}, ["store", "truncation"]),
    ({"include": ["reasoning.encrypted_content"]}, ["include"]),
    ({"prompt_cache_key": "k"}, ["prompt_cache_key"]),
    ({"text": {"verbosity": "low"}}, ["text.verbosity"]),
    ({"include_reasoning": False}, ["include_reasoning"]),
    ({"include_reasoning": True}, []),
    (
        {"input": [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}, MESSAGE]},
        ["input.reasoning"],
    ),
    ({"input": [{**MESSAGE, "phase": "commentary"}]}, ["input.phase"]),
    ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, ["tools.defer_loading"]),
]


def read(reader: Read, base: dict[str, Any], parameters: dict[str, Any], reading: Reading) -> Any:
    return reader(json.dumps({"model": "m", **base, **parameters}).encode(), reading)


CASES = [
    *((ChatRequest.read, {"messages": [MESSAGE]}, *case) for case in CHAT),
    *((ResponsesRequest.read, {"input": "hi"}, *case) for case in RESPONSES),
    (CompletionRequest.read, {"prompt": "a"}, {"reasoning_effort": "low"}, ["reasoning_effort"]),
    (TokenizeRequest.read, {"messages": [{**MESSAGE, "name": "a"}]}, {"x": 1}, ["x", "messages.name"]),
    (DetokenizeRequest.read, {"tokens": [1]}, {"x": 1}, ["x"]),
]


@pytest.mark.parametrize(("reader", "base", "parameters", "names"), CASES)
def test_it_is_accepted_and_noted(
    reader: Read, base: dict[str, Any], parameters: dict[str, Any], names: list[str]
) -> None:
    reading = Reading()
    read(reader, base, parameters, reading)
    assert set(reading.ignored) == set(names)


@pytest.mark.parametrize(
    ("reader", "base", "parameters"), [(reader, base, case) for reader, base, case, names in CASES if names]
)
def test_a_strict_reading_refuses_it(reader: Read, base: dict[str, Any], parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(reader, base, parameters, Reading(strict=True))
    assert refused.value.param


def test_what_a_body_makes_up_is_noted_up_to_a_limit() -> None:
    reading = Reading()
    made_up = {f"x{at}": 1 for at in range(100_000)}
    read(ChatRequest.read, {"messages": [{**MESSAGE, **made_up}] * 3}, made_up, reading)
    assert len(reading.ignored) == 16


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"audio": {"voice": "a"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"web_search_options": {"a": 1}}, "web_search_options"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"length_penalty": 1.5}, "length_penalty"),
        ({"guided_json": {}, "guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
        ({"structural_tag": '{"type": "structural_tag"}'}, "structural_tag"),
        ({"messages": [{**MESSAGE, "audio": {"id": "a"}}]}, "messages.0.audio"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.image_url.url",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ],
)
def test_what_would_change_the_answer_is_refused(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(ChatRequest.read, {"messages": [MESSAGE]}, parameters, Reading())
    assert refused.value.param == param


@pytest.mark.parametrize("way", ["json", "regex", "choice", "grammar"])
def test_older_names_of_structured_outputs(way: str) -> None:
    value: Any = {"json": {"type": "object"}, "regex": "a+", "choice": ["a", "b"], "grammar": 'start: "a"'}[
        way
    ]
    older = read(CompletionRequest.read, {"prompt": "a"}, {f"guided_{way}": value}, Reading(strict=True))
    newer = read(CompletionRequest.read, {"prompt": "a"}, {"structured_outputs": {way: value}}, Reading())
    assert (older.grammar.kind, older.grammar.text) == (newer.grammar.kind, newer.grammar.text)
    assert older.grammar.field == f"guided_{way}"
    with pytest.raises(InvalidRequestError) as both:
        read(
            CompletionRequest.read,
            {"prompt": "a"},
            {f"guided_{way}": value, "structured_outputs": {"regex": "b"}},
            Reading(),
        )
    assert both.value.param == f"guided_{way}"


@pytest.mark.parametrize(
    ("reader", "base"),
    [
        (InputTokensRequest.read, {"input": "a"}),
        (CountTokensRequest.read, {"messages": [MESSAGE]}),
        (TokenizeRequest.read, {"messages": [MESSAGE]}),
    ],
)
@pytest.mark.parametrize("given", [{"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}])
def test_a_prompt_to_be_counted_may_have_one(reader: Read, base: dict[str, Any], given: Any) -> None:
    work = read(reader, base, given, Reading(strict=True)).tokenization(request_id="r", deadline=1.0)
    assert (work.grammar.kind, work.grammar.text) == ("regex", "a+")


def test_a_completion_may_have_a_response_format() -> None:
    asked = read(
        CompletionRequest.read, {"prompt": "a"}, {"response_format": {"type": "json_object"}}, Reading()
    )
    assert asked.grammar.kind == "json_object"


def test_the_model_may_be_left_out_where_one_is_served() -> None:
    body = json.dumps({"messages": [MESSAGE]}).encode()
    assert ChatRequest.read(body, Reading(model="only")).model == "only"
    with pytest.raises(InvalidRequestError) as missing:
        ChatRequest.read(body, Reading())
    assert missing.value.param == "model"
