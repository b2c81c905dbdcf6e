"""Answers held to schemas and grammars, with the official SDK on the real Triton: random weights obey too."""

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

pytestmark = pytest.mark.e2e

MODELS = ("chatglm3", "chatglm2")
MESSAGES: Any = [{"role": "user", "content": "你好, tell me about 北京 in plain prose."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "sunny": {"type": "boolean"},
        "kind": {"enum": ["大", "small"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["city", "days", "sunny", "kind", "tags"],
    "additionalProperties": False,
}


def response_format(schema: Any = SCHEMA) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "trip", "strict": True, "schema": schema}}


class Trip(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    city: str = pydantic.Field(max_length=10)
    days: int = pydantic.Field(ge=1, le=9)
    kind: Literal["大", "small"] | None
    stops: list[float] = pydantic.Field(max_length=2)


@pytest.mark.parametrize("model", MODELS)
def test_fifty_seeds_at_temperature_2_validate(model: str, sdk: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        answer = sdk.chat.completions.create(
            model=model,
            messages=MESSAGES,
            temperature=2,
            seed=seed,
            max_tokens=150,
            response_format=response_format(),
        )
        choice = answer.choices[0]
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        else:
            assert answer.usage.completion_tokens == 150
        return choice.finish_reason

    with ThreadPoolExecutor(16) as pool:
        reasons = Counter(pool.map(ask, range(50)))
    assert set(reasons) <= {"stop", "length"}
    assert reasons["stop"] >= 25


@pytest.mark.parametrize("model", MODELS)
def test_the_sdk_parses_what_it_asked_for(model: str, sdk: openai.OpenAI) -> None:
    completion = sdk.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Trip, temperature=0.7, seed=3, max_tokens=300
    )
    trip = completion.choices[0].message.parsed
    assert isinstance(trip, Trip)
    assert completion.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("model", MODELS)
def test_streamed_and_whole_are_the_same(model: str, sdk: openai.OpenAI) -> None:
    for seed in range(4):
        asked: Any = {
            "seed": seed,
            "temperature": 1.5,
            "max_tokens": 120,
            "response_format": response_format(),
        }
        whole = sdk.chat.completions.create(model=model, messages=MESSAGES, **asked)
        chunks = list(sdk.chat.completions.create(model=model, messages=MESSAGES, stream=True, **asked))
        assert (
            "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            == whole.choices[0].message.content
        )
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_json_mode_is_an_object_whatever_the_prompt_says(sdk: openai.OpenAI) -> None:
    answers = [
        sdk.chat.completions.create(
            model=model,
            messages=MESSAGES,
            response_format={"type": "json_object"},
            seed=seed,
            temperature=1.2,
            max_tokens=200,
            n=2,
        )
        for model in MODELS
        for seed in range(4)
    ]
    choices = [choice for answer in answers for choice in answer.choices]
    assert all(choice.message.content.startswith("{") for choice in choices)
    ended = [choice for choice in choices if choice.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(choice.message.content), dict) for choice in ended)


@pytest.mark.parametrize("model", MODELS)
def test_structured_outputs_on_both_routes(model: str, sdk: openai.OpenAI) -> None:
    for outputs, pattern in (
        ({"regex": r"\d{3}-[a-z]{2}"}, r"\d{3}-[a-z]{2}"),
        ({"choice": ["是 的", " no"]}, "是 的| no"),
        ({"json": {"type": "array", "items": {"const": 1}, "maxItems": 2}}, r"\[.*\]"),
        ({"grammar": 'start: "a" /[0-9]/{2}'}, "a[0-9]{2}"),
        ({"grammar": 'root ::= "a" [0-9]'}, "a[0-9]"),
    ):
        asked: Any = {
            "model": model,
            "temperature": 2,
            "seed": 1,
            "extra_body": {"structured_outputs": outputs},
        }
        chat = sdk.chat.completions.create(messages=MESSAGES, **asked).choices[0]
        text = sdk.completions.create(prompt="x = ", max_tokens=60, **asked).choices[0]
        for said, reason in ((chat.message.content, chat.finish_reason), (text.text, text.finish_reason)):
            assert re.fullmatch(pattern, said, re.DOTALL), said
            assert reason == "stop"


@pytest.mark.parametrize(
    ("asked", "param", "why"),
    [
        (
            {"response_format": response_format({"type": "object", "not": {}})},
            "response_format.json_schema.schema",
            "not",
        ),
        (
            {"response_format": response_format({"type": "wibble"})},
            "response_format.json_schema.schema",
            "$.type: Expected one of object, array, string",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex", "regex"),
        (
            {"extra_body": {"structured_outputs": {"grammar": "start: <|user|>"}}},
            "structured_outputs.grammar",
            "special",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_a_400_that_names_it(
    asked: Any, param: str, why: str, stream: bool, sdk: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model="chatglm3", messages=MESSAGES, stream=stream, **asked)
    assert refused.value.param == param
    assert why in refused.value.message


TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "sunny": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "plan_trip",
            "description": "Plans a trip.",
            "parameters": SCHEMA,
            "strict": True,
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {
                "type": "object",
                "properties": {"zone": {"enum": ["UTC", "it's late", None]}, "exact": {"type": "boolean"}},
                "required": ["zone"],
            },
        },
    },
]
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
NAMED: Any = {"type": "function", "function": {"name": "plan_trip"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls_obey_their_schemas_whole_and_streamed(choice: Any, demo: openai.OpenAI) -> None:
    pieces: list[int] = []

    def ask(seed: int) -> list[str]:
        asked: Any = {
            "model": "chatglm3-demo",
            "messages": MESSAGES,
            "tools": TOOLS,
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "seed": seed,
            "temperature": 1.5,
            "max_tokens": 200,
        }
        whole = demo.chat.completions.create(**asked).choices[0]
        names: list[str] = []
        arguments: list[str] = []
        reasons = []
        for chunk in demo.chat.completions.create(stream=True, **asked):
            delta = chunk.choices[0].delta
            for call in delta.tool_calls or []:
                if call.function.name:
                    names.append(call.function.name)
                arguments.append(call.function.arguments)
            reasons.append(chunk.choices[0].finish_reason)
        calls = whole.message.tool_calls or []
        assert [call.function.name for call in calls] == names
        assert "".join(call.function.arguments for call in calls) == "".join(arguments)
        assert reasons[-1] == whole.finish_reason
        if whole.finish_reason != "tool_calls":
            assert whole.finish_reason == "length"
            return []
        assert not whole.message.content
        (call,) = calls
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
        pieces.append(len(arguments))
        return names

    with ThreadPoolExecutor(8) as pool:
        called = Counter(name for names in pool.map(ask, range(16)) for name in names)
    assert sum(called.values()) >= 8
    # Pieces that a busy machine joins are one: a short call may come whole.
    assert max(pieces) > 2, "arguments do not stream as they are written"
    assert set(called) == ({"plan_trip"} if choice is NAMED else {"plan_trip", "now"})


def test_strict_tools_that_may_be_called_are_called_right_or_not_at_all(demo: openai.OpenAI) -> None:
    for seed in range(6):
        choice = demo.chat.completions.create(
            model="chatglm3-demo", messages=MESSAGES, tools=TOOLS, seed=seed, temperature=1, max_tokens=150
        ).choices[0]
        for call in choice.message.tool_calls or [] if choice.finish_reason == "tool_calls" else []:
            jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])


def test_a_strict_tool_that_cannot_be_enforced_is_a_400(demo: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError, match=r"tool f: .*uniqueItems") as refused:
        demo.chat.completions.create(model="chatglm3-demo", messages=MESSAGES, tools=[TOOLS[1], tool])
    assert refused.value.param == "tools.1.function.parameters"
    # Beside tools that are not forced, a fault of either is told as its own.
    beside: Any = {"messages": MESSAGES, "response_format": response_format({"not": {}})}
    for tools, param in (
        (TOOLS, "response_format.json_schema.schema"),
        ([tool], "tools.0.function.parameters"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            demo.chat.completions.create(model="chatglm3-demo", tools=tools, **beside)
        assert refused.value.param == param
    flat: Any = {"type": "function", **tool["function"]}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        demo.responses.create(model="chatglm3-demo", input="hi", tools=[flat])
    assert refused.value.param == "tools.0.parameters"


@pytest.mark.parametrize("seed", range(4))
def test_beside_tools_the_answer_is_calls_or_text_that_obeys(seed: int, demo: openai.OpenAI) -> None:
    asked: Any = {
        "model": "chatglm3-demo",
        "messages": MESSAGES,
        "tools": TOOLS,
        "response_format": response_format(TRIP),
        "seed": seed,
        "temperature": 1.5,
        "max_tokens": 200,
    }
    whole = demo.chat.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in demo.chat.completions.create(stream=True, **asked)]
    assert "".join(each.delta.content or "" for each in chunks) == (whole.message.content or "")
    assert chunks[-1].finish_reason == whole.finish_reason
    calls = whole.message.tool_calls or []
    assert bool(whole.message.content) != bool(calls)
    if whole.finish_reason == "length":
        return
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
    if not calls:
        jsonschema.validate(json.loads(whole.message.content), TRIP)


def test_schemas_too_large_or_too_deep_are_a_400_and_end_nothing(demo: openai.OpenAI) -> None:
    large = {"type": "object", "properties": {f"p{at}": {"type": "null"} for at in range(3000)}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": large, "strict": True}}
    for parameters in ({"tools": [tool]}, {"response_format": response_format(large)}):
        asked: Any = {"model": "chatglm3-demo", "messages": MESSAGES, **parameters}
        with pytest.raises(openai.BadRequestError, match="over 500 properties"):
            demo.chat.completions.create(**asked)
    nodes = {f"d{at}": {"properties": {"a": {"$ref": f"#/$defs/d{at + 1}"}}} for at in range(2500)}
    chain = {"$ref": "#/$defs/d0", "$defs": {**nodes, "d2500": {"type": "null"}}}
    choice = demo.chat.completions.create(
        model="chatglm3-demo", messages=MESSAGES, response_format=response_format(chain), max_tokens=5
    ).choices[0]
    assert choice.finish_reason in {"length", "stop"}


def test_strict_tools_and_a_schema_in_the_responses_api(demo: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "plan_trip", "parameters": SCHEMA, "strict": True}
    form: Any = {"format": {"type": "json_schema", "name": "trip", "schema": TRIP, "strict": True}}
    completed = 0
    for choice in ("auto", "required"):
        answer = demo.responses.create(
            model="chatglm3-demo",
            input="你好, plan a trip to 北京.",
            tools=[tool],
            tool_choice=choice,
            text=form,
            temperature=1,
            max_output_tokens=250,
            extra_body={"seed": 2},
        )
        if answer.status != "completed":
            continue
        completed += 1
        (item,) = {each.type: each for each in answer.output}.values()
        if choice == "required" or item.type == "function_call":
            jsonschema.validate(json.loads(item.arguments), SCHEMA)
        else:
            jsonschema.validate(json.loads(answer.output_text), TRIP)
    assert completed
