import json
from typing import Any

import pytest

from gateway.core.request import (
    Conversation,
    Grammar,
    Message,
    NamedTool,
    PastCall,
    Tool,
    ToolOffer,
)
from gateway.errors import InvalidRequestError
from gateway.openai.document import Reading
from gateway.openai.responses_request import ResponsesRequest, messages_of
from wire.limits import TOOLS_LIMIT

TOOL = {"type": "function", "name": "now"}
LOGPROBS = "message.output_text.logprobs"


def read(**parameters: Any) -> ResponsesRequest:
    return ResponsesRequest.read(json.dumps({"model": "m", "input": "hi", **parameters}).encode())


def test_what_chat_completions_have_is_refused_with_where_it_is() -> None:
    moved = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
    for name, place in moved.items():
        body = {"model": "m", "input": "hi", name: [5]}
        with pytest.raises(InvalidRequestError, match=f"The parameter {name} has moved to {place} here"):
            ResponsesRequest.read(json.dumps(body).encode(), Reading())


def test_the_minimum_asks_for_the_defaults() -> None:
    generation = read().generations(request_id="r", deadline=1.5)[0]
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
    ).generations(request_id="r", deadline=0)[0]
    assert (generation.max_tokens, generation.temperature, generation.top_p) == (5, 0.0, 0.5)
    assert (generation.logprobs, generation.stream, generation.seed, generation.stop) == (20, True, 7, ["x"])
    assert (generation.top_k, generation.min_p, generation.repetition_penalty) == (3, 0.5, 1.5)
    assert (generation.presence_penalty, generation.frequency_penalty) == (1.0, -1.0)
    assert (generation.logit_bias, generation.min_tokens) == ({5: -100.0}, 2)
    assert (generation.ignore_eos, generation.stop_token_ids) == (True, [2])
    assert (generation.priority, generation.show_special) == (-3, True)
    assert read(include=[LOGPROBS]).generations(request_id="r", deadline=0)[0].logprobs == 0
    for choice in ("none", "auto", "required"):
        beside = read(include=[LOGPROBS], tools=[TOOL], tool_choice=choice)
        assert beside.generations(request_id="r", deadline=0)[0].logprobs == 0


def test_instructions_come_before_the_conversation() -> None:
    for said, field in (("hi", "input"), ([{"role": "user", "content": "hi"}], "input.0")):
        prompt = read(instructions="s", input=said).continued
        assert [(message.role, message.content, message.field) for message in prompt.messages] == [
            ("system", "s", "instructions"),
            ("user", "hi", field),
        ]


def test_system_messages_in_a_row_are_one() -> None:
    """As Codex sends them; a chat template, such as Qwen3.5's, refused a second one, or left it out."""
    developer = {"role": "developer", "content": [{"type": "input_text", "text": x} for x in ("t", "u")]}
    said = [developer, {"role": "system", "content": "v"}, ASKED, developer]
    for instructions, first in (
        ("s", ("system", "s\n\ntu\n\nv", "instructions")),
        (None, ("system", "tu\n\nv", "input.0")),
    ):
        prompt = read(instructions=instructions, input=said).continued
        assert [(message.role, message.content, message.field) for message in prompt.messages] == [
            first,
            ("user", "?", "input.2"),
            ("system", "tu", "input.3"),
        ]


def test_messages_of_a_user_in_a_row_are_one() -> None:
    """As Codex sends them; chat templates that demand alternating roles, such as Mistral's, refused them."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,cGljdHVyZQ=="}
    seen = [{"type": "input_text", "text": "b"}, image, {"type": "input_text", "text": "c"}]
    said = messages(
        {"role": "user", "content": "a"},
        {"role": "user", "content": seen},
        {"role": "user", "content": ""},
        {"role": "user", "content": [image]},
        answer("d"),
        answer("e"),
    )
    assert [(each.role, each.content, each.field) for each in said] == [
        ("user", "a\n\nbc", "input.0"),
        ("assistant", "d\n\ne", "input.4"),
    ]
    assert [(each.at, each.field) for each in said[0].images] == [
        (4, "input.1.content.1"),
        (5, "input.3.content.0"),
    ]


def test_tools_are_flat() -> None:
    schema = {"type": "object", "properties": {"zone": {"type": "string"}}}
    tools = [{**TOOL, "description": "Tells it.", "parameters": schema, "strict": False}]
    assert read(tools=tools).continued.offer == ToolOffer(
        tools=(Tool(name="now", description="Tells it.", parameters=schema),),
        schema_field="tools.{}.parameters",
    )
    named = read(tools=tools, tool_choice=TOOL, parallel_tool_calls=False).continued.offer
    assert named is not None
    assert (named.choice, named.single) == (NamedTool("now"), True)
    some = {"type": "allowed_tools", "mode": "required", "tools": [TOOL]}
    offered = read(tools=[{**TOOL, "name": "then"}, TOOL], tool_choice=some).continued.offer
    assert offered == ToolOffer(
        tools=(Tool(name="now", description=None, parameters={}),),
        choice="required",
        schema_field="tools.{}.parameters",
    )
    for choice in ("auto", "none", "required"):
        offer = read(tools=[TOOL], tool_choice=choice).continued.offer
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
        grammar = read(text={"format": form}, **more).generations(request_id="r", deadline=0)[0].grammar
        assert grammar is not None
        assert (grammar.kind, grammar.field) == (kind, field)
        assert (json.loads(grammar.text) if kind == "json_schema" else grammar.text) == text
    free = read(text={"format": {"type": "text"}}, tools=[TOOL]).generations(request_id="r", deadline=0)[0]
    assert free.grammar is None
    chosen = read(structured_outputs={"choice": ["a"]}).generations(request_id="r", deadline=0)[0]
    assert chosen.grammar == Grammar(kind="choice", text='["a"]', field="structured_outputs.choice")


@pytest.mark.parametrize(
    "parameters",
    [
        {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s"},
        {"store": False, "background": False, "truncation": "disabled"},
        {"stream_options": {"include_obfuscation": False}, "prompt_cache_key": ""},
        {"text": {"verbosity": "medium"}},
        {"text": {"format": {"type": "text"}, "verbosity": None}, "reasoning": {"effort": None}},
        {"text": {}, "reasoning": {}, "include": [], "tools": [], "top_logprobs": 0},
        {"parallel_tool_calls": True, "tool_choice": "auto"},
        {"tools": [{**TOOL, "defer_loading": False, "output_schema": None}]},
        {"input": ""},
        dict.fromkeys({*ResponsesRequest.model_fields, *ResponsesRequest.unsupported} - {"model", "input"}),
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
        ({"top_p": -0.01}, "top_p"),
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": [{}]}, "messages"),
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
        ({"tools": [{**TOOL, "name": f"f{number}"} for number in range(TOOLS_LIMIT + 1)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "min_tokens": 1}, "min_tokens"),
        ({"tools": [{**TOOL, "strict": True}], "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": TOOL}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {**TOOL, "name": "then"}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.tools",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{**TOOL, "name": "then"}]},
            },
            "tool_choice",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"min_tokens": 6, "max_output_tokens": 5}, "min_tokens"),
    ],
)
def test_refused(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(**parameters)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("parameters", "instead"),
    [
        ({"background": True}, "give background=false"),
        ({"conversation": "c"}, "send the whole conversation in input (as many clients do with store=False)"),
    ],
)
def test_the_refusal_of_state_says_what_to_do_instead(parameters: dict[str, Any], instead: str) -> None:
    (name,) = parameters
    with pytest.raises(InvalidRequestError) as refused:
        read(**parameters)
    assert refused.value.message == (
        f"The parameter {name} needs a server that keeps responses, which this one does not: {instead}."
    )


def test_items_that_make_no_message_are_no_input() -> None:
    body = {"model": "m", "input": [{"type": "reasoning", "summary": []}]}
    with pytest.raises(InvalidRequestError, match="at least one message") as refused:
        ResponsesRequest.read(json.dumps(body).encode(), Reading())
    assert refused.value.param == "input"


ASKED = {"role": "user", "content": "?"}


@pytest.mark.parametrize(("value", "message"), [([], "at least 1 item"), (5, "a string")])
def test_an_input_of_the_right_type_is_told_what_it_lacks(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        ResponsesRequest.read(json.dumps({"model": "m", "input": value}).encode())
    assert refused.value.param == "input"


def call(call_id: str = "call_a", name: str = "now", arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **more}


def result(call_id: str = "call_a", output: Any = "noon", **more: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output, **more}


def answer(text: str = "Let me see.") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def messages(*items: Any) -> list[Message]:
    asked = read(input=list(items)).input
    assert not isinstance(asked, str)
    return messages_of(asked)


PAST = PastCall(id="call_a", name="now", arguments="{}")
OTHER = PastCall(id="call_b", name="add", arguments='{"a": 1}')


def test_messages_of_every_role_and_form() -> None:
    said = messages(
        {"role": "developer", "content": "s"},
        {"role": "user", "content": "r"},
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "t"}]},
        {"type": None, "role": "user", "content": [{"type": "input_text", "text": x} for x in "ab"]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
        {**answer("e"), "phase": None},
    )
    assert said == [
        Message(role="system", content="s"),
        Message(role="user", content="r"),
        Message(role="system", content="t"),
        Message(role="user", content="ab"),
        Message(role="assistant", content="c"),
        Message(role="user", content="d"),
        Message(role="assistant", content="e"),
    ]
    assert [message.field for message in said] == [f"input.{at}" for at in range(7)]


def test_a_calls_message_is_the_one_before_it_or_an_empty_one() -> None:
    assert messages(ASKED, call(), result()) == [
        Message(role="user", content="?"),
        Message(role="assistant", content="", calls=(PAST,)),
        Message(role="tool", content="noon", answers="call_a"),
    ]
    said = messages(
        ASKED,
        answer(),
        call(id="fc_1", status="completed"),
        call("call_b", "add", '{"a": 1}'),
        result("call_b", [{"type": "input_text", "text": x} for x in "12"], id="o", status="completed"),
        result(),
        answer("Noon."),
    )
    assert said[1:] == [
        Message(role="assistant", content="Let me see.", calls=(PAST, OTHER)),
        Message(role="tool", content="1\n2", answers="call_b"),
        Message(role="tool", content="noon", answers="call_a"),
        Message(role="assistant", content="Noon."),
    ]
    assert [message.field for message in said] == [f"input.{at}" for at in (0, 1, 4, 5, 6)]


def test_text_between_the_calls_of_one_answer_is_of_the_same_message() -> None:
    later = call("call_b", "add", '{"a": 1}')
    said = messages(ASKED, call(), answer("And "), answer("then"), later, result(), result("call_b", "1"))
    assert said[1] == Message(role="assistant", content="And then", calls=(PAST, OTHER))
    assert [message.role for message in said] == ["user", "assistant", "tool", "tool"]


def test_a_call_after_a_result_is_another_message() -> None:
    said = messages(ASKED, call(), result(), call("call_b", "add", '{"a": 1}'), result("call_b", "1"))
    assert [message.calls for message in said] == [(), (PAST,), (), (OTHER,), ()]


@pytest.mark.parametrize(
    ("item", "path"),
    [
        ("hi", "input.1"),
        ({"type": "reasoning", "id": "rs_1", "summary": []}, "input.1"),
        ({"type": "item_reference", "id": "msg_1"}, "input.1"),
        ({"type": 5}, "input.1"),
        ({"content": "a"}, "input.1.role"),
        ({"role": "user"}, "input.1.content"),
        ({"role": "tool", "content": "a"}, "input.1.role"),
        ({**ASKED, "name": "ann"}, "input.1.name"),
        ({"role": "user", "content": 5}, "input.1.content"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "u"}]},
            "input.1.content.0.image_url",
        ),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input.1.content.0"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input.1.content.0.text"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "input.1.content.0.refusal"),
        ({**answer(), "phase": "commentary"}, "input.1.phase"),
        (call(arguments={}), "input.1.arguments"),
        (call(call_id=""), "input.1.call_id"),
        (call(namespace="n"), "input.1.namespace"),
        ({"type": "function_call", "name": "now", "arguments": "{}"}, "input.1.call_id"),
        ({"type": "function_call_output", "output": ""}, "input.1.call_id"),
        ({"type": "function_call_output", "call_id": "call_a"}, "input.1.output"),
        (result(output=[{"type": "input_image", "image_url": "u"}]), "input.1.output.0.type"),
        (result(output={"a": 1}), "input.1.output"),
    ],
)
def test_items_refused(item: Any, path: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        messages(ASKED, item)
    assert refused.value.param == path


def test_a_reference_to_an_item_says_how_clients_send_it_whole() -> None:
    with pytest.raises(InvalidRequestError, match="store=False"):
        messages(ASKED, {"type": "item_reference", "id": "msg_1"})


def test_a_refusal_in_an_earlier_answer_is_its_text() -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert [(each.role, each.content) for each in messages(ASKED, refused)][1:] == [("assistant", "No.")]


def test_a_call_id_twice_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        messages(ASKED, call(), call())
    assert refused.value.param == "input.2.call_id"


def test_a_blank_line_parts_the_texts_before_and_after_a_call() -> None:
    said = messages(ASKED, answer("Let me look."), call(), answer("One "), answer("moment."), result())
    assert said[1].content == "Let me look.\n\nOne moment."


def test_what_a_template_reads_reaches_it() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Two."}]}
    call = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "3"}
    items = [{"role": "user", "content": "?"}, thought, said, call, result, thought, call | {"call_id": "d"}]
    body = {"model": "m", "input": items, "reasoning": {"effort": "low"}}
    body["chat_template_kwargs"] = {"enable_thinking": False, "other": 1}
    reads = frozenset({"reasoning_content", "reasoning_effort", "enable_thinking"})
    reading = Reading(reads=reads)
    prompt = ResponsesRequest.read(json.dumps(body).encode(), reading).continued
    assert list(reading.ignored) == ["chat_template_kwargs.other"]
    assert prompt.switches == {"reasoning_effort": "low", "enable_thinking": False}
    assert [(each.role, each.reasoning, each.content, len(each.calls)) for each in prompt.messages] == [
        ("user", "", "?", 0),
        ("assistant", "Hm.", "Two.", 1),
        ("tool", "", "3", 0),
        ("assistant", "Hm.", "", 1),
    ]


def test_reasoning_between_the_calls_of_one_answer_is_of_the_same_message() -> None:
    """As items of other servers' models have it: the first call's result seemed not to follow it."""
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    items = [ASKED, thought, call(), thought, call("call_b"), result(), result("call_b")]
    reading = Reading(reads=frozenset({"reasoning_content"}))
    body = json.dumps({"model": "m", "input": items}).encode()
    said = ResponsesRequest.read(body, reading).continued.messages
    assert [(each.role, each.reasoning, len(each.calls)) for each in said] == [
        ("user", "", 0),
        ("assistant", "Hm.\n\nHm.", 2),
        ("tool", "", 0),
        ("tool", "", 0),
    ]


def test_reasoning_behind_text_is_of_the_same_message() -> None:
    """A call behind it stood in a message of its own, which templates of alternating roles refused."""
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    body = json.dumps({"model": "m", "input": [ASKED, thought, answer(), thought, call(), result()]}).encode()
    reading = Reading(reads=frozenset({"reasoning_content"}))
    said = ResponsesRequest.read(body, reading).continued.messages
    assert [(each.role, each.reasoning, each.content, len(each.calls)) for each in said] == [
        ("user", "", "?", 0),
        ("assistant", "Hm.\n\nHm.", "Let me see.", 1),
        ("tool", "", "noon", 0),
    ]
