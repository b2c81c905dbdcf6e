import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.core.request import Conversation, Message
from gateway.errors import InvalidRequestError
from gateway.openai.chat_request import ChatMessage, ChatRequest
from gateway.openai.document import Reading

USER = {"role": "user", "content": "hi"}
MINIMUM = {"model": "m", "messages": [USER]}


def read(**parameters: Any) -> ChatRequest:
    return ChatRequest.read(json.dumps({**MINIMUM, **parameters}).encode())


def test_the_minimum_asks_for_the_defaults() -> None:
    generation = read().generations(request_id="r", deadline=1.5)[0]
    assert (generation.request_id, generation.model, generation.deadline) == ("r", "m", 1.5)
    assert generation.prompt == Conversation((Message(role="user", content="hi"),))
    assert (generation.temperature, generation.top_p, generation.top_k) == (1.0, 1.0, 0)
    assert (generation.max_tokens, generation.seed, generation.logprobs, generation.stop) == (
        None,
        None,
        None,
        [],
    )
    assert not generation.stream


def test_every_parameter_arrives() -> None:
    asked = read(
        max_tokens=5,
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        seed=-(2**63),
        stop=["a", "b"],
        logit_bias={"5": -100, "7": 1.5},
        logprobs=True,
        top_logprobs=20,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False},
        top_k=3,
        min_p=1,
        repetition_penalty=1.5,
        presence_penalty=-2,
        frequency_penalty=0.5,
        min_tokens=7,
        ignore_eos=True,
        stop_token_ids=[2, 3],
    )
    generation = asked.generations(request_id="r", deadline=0)[0]
    assert (generation.max_tokens, generation.min_tokens) == (7, 7)
    assert (generation.temperature, generation.top_p, generation.top_k) == (0.0, 0.5, 3)
    assert (generation.seed, generation.stop, generation.stop_token_ids) == (-(2**63), ["a", "b"], [2, 3])
    assert (generation.min_p, generation.repetition_penalty) == (1.0, 1.5)
    assert (generation.presence_penalty, generation.frequency_penalty) == (-2.0, 0.5)
    assert generation.logit_bias == {5: -100.0, 7: 1.5}
    assert generation.logprobs == 20
    assert generation.ignore_eos
    assert generation.stream


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": "I can ", "refusal": "not."}, "I can not."),
        ({"content": None, "refusal": "No."}, "No."),
        (
            {"content": [{"type": "text", "text": "I can "}, {"type": "refusal", "refusal": "not."}]},
            "I can not.",
        ),
    ],
)
def test_what_an_earlier_answer_may_be(message: dict[str, Any], content: str) -> None:
    (_, earlier) = read(messages=[USER, {"role": "assistant", **message}]).continued.messages
    assert (earlier.role, earlier.content, earlier.reasoning) == ("assistant", content, "")


@pytest.mark.parametrize(
    "thinking", ["Let me see.", [{"type": "text", "text": "Let me "}, {"type": "text", "text": "see."}]]
)
@pytest.mark.parametrize("reads", [frozenset(), frozenset({"reasoning_content"})])
def test_thinking_in_an_earlier_answer_is_for_templates_that_read_it(
    reads: frozenset[str], thinking: Any
) -> None:
    parts = [
        {"type": "thinking", "thinking": thinking, "signature": "x", "closed": True},
        {"type": "text", "text": "Two."},
    ]
    messages = [USER, {"role": "assistant", "content": parts}, USER]
    reading = Reading(reads=reads)
    asked = ChatRequest.read(json.dumps({**MINIMUM, "messages": messages}).encode(), reading)
    earlier = asked.continued.messages[1]
    assert (earlier.content, earlier.reasoning) == ("Two.", "Let me see." if reads else "")
    assert list(reading.ignored) == ([] if reads else ["messages.content.thinking"])


def test_roles_and_parts() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]},
        {"role": "assistant", "content": "", "tool_calls": None, "refusal": None, "annotations": []},
    ]
    assert read(messages=messages).generations(request_id="r", deadline=0)[0].prompt == Conversation(
        (
            Message(role="system", content="be kind"),
            Message(role="assistant", content=""),
        )
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {"stop": "x"},
        {"top_k": -1},
        {"top_p": 0, "top_k": 0},
        {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "store": False},
        {"safety_identifier": "s", "prompt_cache_key": ""},
        {"stream_options": {}},
        {"stream_options": {"include_usage": False, "continuous_usage_stats": None}},
        {"stream": True, "stream_options": {"include_usage": None}},
        {"parallel_tool_calls": False},
        {"functions": [{"name": "f"}], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": [{"function": {"name": "f"}}], "tool_choice": {"function": {"name": "f"}}},
        {"messages": [USER, {"role": "assistant", "content": None}, USER]},
        {"messages": [USER, {"role": "assistant", "tool_calls": []}, USER]},
        {"n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "none", "modalities": ["text"], "skip_special_tokens": True},
        dict.fromkeys({*ChatRequest.model_fields, *ChatRequest.unsupported} - {"model", "messages"}),
    ],
)
def test_accepted(parameters: dict[str, Any]) -> None:
    read(**parameters)


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"model": 5}, "model"),
        ({"model": ""}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": [USER, {"role": "user"}]}, "messages.1.content"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "system", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "a", "refusal": "No."}]}, "messages.0.refusal"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]},
            "messages.0.content.0.refusal",
        ),
        ({"prompt_cache_key": "k"}, "prompt_cache_key"),
        ({"prompt_embeds": "AA=="}, "prompt_embeds"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"repetition_detection": {"max_pattern_size": 5}}, "repetition_detection"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, "truncation_side"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{**USER, "name": "ann"}]}, "messages.0.name"),
        ({"messages": [{**USER, "colour": "red"}]}, "messages.0.colour"),
        ({"messages": [{**USER, "tool_call_id": "c"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages.0.tool_call_id"),
        (
            {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages.1.tool_calls.0.id",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
            "messages.0.content.0.image_url.url",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.01}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"stop": [1]}, "stop.0"),
        ({"stop": "a" * 1025}, "stop"),
        ({"stop": ["a", "a" * 1025]}, "stop.1"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias.05"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"x" * 5000: 1}, "x" * 100 + "…"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo"),
        ({"top_k": -2}, "top_k"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": "2"}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"store": True}, "store"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_refused_by_name(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read(**parameters)
    assert refusal.value.param == param
    assert param in refusal.value.message


@pytest.mark.parametrize(
    "parameters",
    [
        {"messages": [1] * 1000},
        {"messages": [{"role": "user", "content": [1] * 1000}]},
        {"stop": [1] * 1000},
        {"stop_token_ids": [-1] * 1000},
    ],
)
def test_a_list_is_read_up_to_its_first_fault(parameters: dict[str, Any]) -> None:
    # Collected, the faults that fit into one body would take gigabytes, and the event loop's time for long.
    with pytest.raises(ValidationError) as refusal:
        ChatRequest.model_validate({**MINIMUM, **parameters})
    assert refusal.value.error_count() <= 2


def test_a_real_parameter_is_told_from_an_unknown_one() -> None:
    usual = "is not supported by this server"
    for name in ChatRequest.unsupported:
        with pytest.raises(InvalidRequestError, match=re.escape(ChatRequest.refusals.get(name, usual))):
            read(**{name: {"some": "thing"}})
    for name in ChatMessage.unsupported:
        with pytest.raises(InvalidRequestError, match=re.escape(ChatMessage.refusals.get(name, usual))):
            read(messages=[{**USER, name: {"some": "thing"}}])
    with pytest.raises(InvalidRequestError, match=re.escape(f'{usual}; only ["text"] is.')):
        read(modalities=["audio"])
    with pytest.raises(InvalidRequestError, match=re.escape(f"{usual}.")):
        read(documents=[1])
    with pytest.raises(InvalidRequestError, match="Unknown parameter"):
        read(some="thing")


def test_the_supported_and_the_unsupported_do_not_overlap() -> None:
    assert not set(ChatRequest.unsupported) & set(ChatRequest.model_fields)


def test_special_tokens_cannot_be_text_where_they_tell_calls_apart() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert read(skip_special_tokens=False).generations(request_id="r", deadline=0)[0].show_special
    for offered in ({"tools": [tool]}, {"functions": [{"name": "f"}]}):
        with pytest.raises(InvalidRequestError) as refused:
            read(skip_special_tokens=False, **offered)
        assert refused.value.param == "skip_special_tokens"


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"functions": [{"name": "f"}], "tool_choice": "none"}, "tool_choice"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}], "function_call": "none"},
            "function_call",
        ),
    ],
)
def test_a_choice_in_the_other_form_is_refused(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(**parameters)
    assert refused.value.param == param


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_what_a_template_reads_reaches_it(name: str, field: str) -> None:
    reads = frozenset({field, "enable_thinking", "reasoning_effort"})
    reading = Reading(reads=reads)
    earlier = {"role": "assistant", "content": "Two.", name: "Hm."}
    body: dict[str, Any] = MINIMUM | {
        "messages": [USER | {name: "x"}, earlier, USER],
        "reasoning_effort": "low",
    }
    body |= {"chat_template_kwargs": {"enable_thinking": False, "other": 1}}
    prompt = ChatRequest.read(json.dumps(body).encode(), reading).continued
    assert [message.reasoning for message in prompt.messages] == ["", "Hm.", ""]
    assert prompt.switches == {"reasoning_effort": "low", "enable_thinking": False}
    assert set(reading.ignored) == {f"messages.{name}", "chat_template_kwargs.other"}
    reading = Reading(reads=frozenset())
    prompt = ChatRequest.read(json.dumps(body).encode(), reading).continued
    assert (prompt.switches, [message.reasoning for message in prompt.messages]) == ({}, ["", "", ""])
    assert "reasoning_effort" in reading.ignored
