import json
from typing import Any

import pytest

from gateway.errors import InvalidRequestError
from gateway.generation import Conversation, Grammar, Message, NamedTool, Tool, ToolOffer
from gateway.openai.responses_request import NOT_YET, STORED, ResponsesRequest, read_responses_request

TOOL = {"type": "function", "name": "now"}
LOGPROBS = "message.output_text.logprobs"


def read(**parameters: Any) -> ResponsesRequest:
    return read_responses_request(json.dumps({"model": "m", "input": "hi", **parameters}).encode())


def test_the_minimum_asks_for_the_defaults() -> None:
    generation = read().generation(request_id="r", deadline=1.5)
    assert (generation.request_id, generation.model, generation.deadline) == ("r", "m", 1.5)
    assert generation.prompt == Conversation((Message(role="user", content="hi"),))
    assert (generation.n, generation.max_tokens, generation.temperature, generation.top_p) == (
        1,
        None,
        1.0,
        1.0,
    )
    assert generation.logprobs is None
    assert not generation.stream


def test_every_parameter_arrives() -> None:
    generation = read(
        max_output_tokens=5,
        temperature=0,
        top_p=0.5,
        include=[LOGPROBS],
        top_logprobs=20,
        stream=True,
        stream_options={"include_obfuscation": False},
        seed=7,
        stop="x",
        top_k=3,
        min_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": -100},
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[2],
        priority=-3,
        skip_special_tokens=False,
    ).generation(request_id="r", deadline=0)
    assert (generation.max_tokens, generation.temperature, generation.top_p) == (5, 0.0, 0.5)
    assert (generation.logprobs, generation.stream, generation.seed, generation.stop) == (20, True, 7, ["x"])
    assert (generation.top_k, generation.min_p, generation.repetition_penalty) == (3, 0.5, 1.5)
    assert (generation.presence_penalty, generation.frequency_penalty) == (1.0, -1.0)
    assert (generation.logit_bias, generation.min_tokens) == ({5: -100.0}, 2)
    assert (generation.ignore_eos, generation.stop_token_ids) == (True, [2])
    assert (generation.priority, generation.show_special) == (-3, True)
    assert read(include=[LOGPROBS]).generation(request_id="r", deadline=0).logprobs == 0
    for choice in ("none", "auto", "required"):
        beside = read(include=[LOGPROBS], tools=[TOOL], tool_choice=choice)
        assert beside.generation(request_id="r", deadline=0).logprobs == 0


def test_instructions_come_before_the_conversation() -> None:
    said = [{"role": "developer", "content": "t"}, {"role": "user", "content": "hi"}]
    prompt = read(instructions="s", input=said).prompt_asked()
    assert [(message.role, message.content, message.field) for message in prompt.messages] == [
        ("system", "s", "instructions"),
        ("system", "t", "input.0"),
        ("user", "hi", "input.1"),
    ]


def test_tools_are_flat() -> None:
    schema = {"type": "object", "properties": {"zone": {"type": "string"}}}
    tools = [{**TOOL, "description": "Tells it.", "parameters": schema, "strict": False}]
    assert read(tools=tools).prompt_asked().offer == ToolOffer(
        tools=(Tool(name="now", description="Tells it.", parameters=schema),),
        schema_field="tools.{}.parameters",
    )
    named = read(tools=tools, tool_choice=TOOL, parallel_tool_calls=False).prompt_asked().offer
    assert named is not None
    assert (named.choice, named.single) == (NamedTool("now"), True)
    for choice in ("auto", "none", "required"):
        offer = read(tools=[TOOL], tool_choice=choice).prompt_asked().offer
        assert offer is not None
        assert offer.choice == choice


SCHEMA = {"type": "object", "properties": {"城": {"type": "string"}}}


@pytest.mark.parametrize(
    ("form", "kind", "text", "field"),
    [
        ({"type": "json_object"}, "json_object", "", "text.format"),
        (
            {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True, "description": "d"},
            "json_schema",
            SCHEMA,
            "text.format.schema",
        ),
    ],
)
def test_what_the_text_is_held_to(form: dict[str, Any], kind: str, text: Any, field: str) -> None:
    for more in ({}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL]}):
        grammar = read(text={"format": form}, **more).generation(request_id="r", deadline=0).grammar
        assert grammar is not None
        assert (grammar.kind, grammar.field) == (kind, field)
        assert (json.loads(grammar.text) if kind == "json_schema" else grammar.text) == text
    free = read(text={"format": {"type": "text"}}, tools=[TOOL]).generation(request_id="r", deadline=0)
    assert free.grammar is None
    chosen = read(structured_outputs={"choice": ["a"]}).generation(request_id="r", deadline=0)
    assert chosen.grammar == Grammar(kind="choice", text='["a"]', field="structured_outputs.choice")


@pytest.mark.parametrize(
    "parameters",
    [
        {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s"},
        {"store": False, "background": False, "truncation": "disabled", "prompt_cache_key": "k"},
        {"text": {"format": {"type": "text"}, "verbosity": None}, "reasoning": {"effort": None}},
        {"text": {}, "reasoning": {}, "include": [], "tools": [], "top_logprobs": 0},
        {"parallel_tool_calls": True, "tool_choice": "auto"},
        {"tools": [{**TOOL, "defer_loading": False, "output_schema": None}]},
        {"input": ""},
        dict.fromkeys({*ResponsesRequest.model_fields, *NOT_YET, *STORED} - {"model", "input"}),
    ],
)
def test_accepted(parameters: dict[str, Any]) -> None:
    read(**parameters)


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"model": ""}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"instructions": ["a"]}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 1}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning": {"colour": "red"}}, "reasoning.colour"),
        ({"reasoning": "low"}, "reasoning"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "json_schema": {"name": "a"}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_object"}}, "min_tokens": 1}, "min_tokens"),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"text": {"colour": "red"}}, "text.colour"),
        ({"include": ["reasoning.encrypted_content"]}, "include.0"),
        ({"include": LOGPROBS}, "include"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "now"}}]}, "tools.0.name"),
        ({"tools": [{**TOOL, "strict": "yes"}]}, "tools.0.strict"),
        ({"tools": [TOOL, {**TOOL, "defer_loading": True}]}, "tools.1.defer_loading"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": TOOL}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {**TOOL, "name": "then"}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.type",
        ),
        ({"min_tokens": 6, "max_output_tokens": 5}, "min_tokens"),
    ],
)
def test_refused(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(**parameters)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("parameters", "only"),
    [
        ({"store": True}, "; only false is."),
        ({"background": True}, "; only false is."),
        ({"conversation": "c"}, "."),
    ],
)
def test_the_refusal_of_state_says_what_to_do_instead(parameters: dict[str, Any], only: str) -> None:
    with pytest.raises(InvalidRequestError, match="send the whole conversation in input") as refused:
        read(**parameters)
    assert refused.value.message.endswith(only)
