"""GLM-4 as published, by the official SDK: one model of random weights, and one that always calls a tool."""

import json
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import torch

from tests.e2e.families_server import CALLED, CALLER, GLM4, Families
from tests.e2e.stream_client import StreamClient
from tests.e2e.up_process import UpProcess
from tests.glm4_checkpoint import CONFIG, TEMPLATE
from tests.triton_models.engine.models.native_glm import native
from triton_models.text.formats import ChatFormat, chat_format
from triton_models.text.tokenizers import load_tokenizer
from wire.history import Turn

pytestmark = pytest.mark.e2e

QUESTION = [{"role": "user", "content": "襄阳今天的天气怎么样？"}]
WEATHER = {
    "name": "get_weather",
    "description": "查询城市的天气。",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [{"type": "function", "function": each} for each in (WEATHER, NOW)]

PARAMETERS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {
        "type": "object",
        "properties": {
            "zone": {"enum": ["+8", "0"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["zone", "days"],
        "additionalProperties": False,
    },
}
STRICT: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in PARAMETERS.items()
]


@dataclass
class Served:
    families: Families
    format: ChatFormat

    @property
    def up(self) -> UpProcess:
        return self.families.up

    @property
    def sdk(self) -> openai.OpenAI:
        return self.families.sdk

    def create(self, model: str, **asked: Any) -> Any:
        asked = {"messages": QUESTION, "temperature": 0, "max_tokens": 24} | asked
        return self.sdk.chat.completions.create(model=model, **asked)


@pytest.fixture(scope="module")
def served(families: Families) -> Served:
    tokenizer = load_tokenizer(families.folder / GLM4, "glm4")
    return Served(families, chat_format("glm4", tokenizer, TEMPLATE))


def test_it_answers_as_the_reference_does(served: Served) -> None:
    client = StreamClient(served.up.triton_grpc)
    try:
        answer = client.ask(
            GLM4, prompt="你好", temperature=0, max_tokens=16, ignore_eos=True, return_token_ids=True
        )
    finally:
        client.close()
    prompt = served.format.render_turns([Turn("user", "你好")])
    assert answer.metas[0].accepted.prompt_token_ids == prompt
    with torch.inference_mode():
        logits = native(served.families.tensors, CONFIG)(torch.tensor([prompt + answer.token_ids])).logits[0]
    assert answer.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_a_conversation_whole_and_streamed(served: Served) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "content": "晴。"},
        {"role": "user", "content": "<|observation|> and then?"},
    ]
    whole = served.create(GLM4, messages=messages)
    turns = [Turn(each["role"], each["content"]) for each in messages]
    assert whole.usage.prompt_tokens == len(served.format.render_turns(turns))
    chunks = list(served.create(GLM4, messages=messages, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content
    assert len(streamed) > 4
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_tools_stand_in_the_prompt_in_the_formats_own_words(served: Served) -> None:
    turns = [Turn("system", "", tools=[WEATHER, NOW]), Turn("user", QUESTION[0]["content"])]
    usage = served.create(CALLER, tools=TOOLS).usage
    assert usage.prompt_tokens == len(served.format.render_turns(turns))


def test_a_call_whole_and_its_arguments_as_they_come(served: Served) -> None:
    (choice,) = served.create(CALLER, tools=TOOLS).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", CALLED)

    most = 0
    for _ in range(20):  # what piles up on a busy machine is sent as one piece
        chunks = list(served.create(CALLER, tools=TOOLS, stream=True))
        pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
        assert [piece.function.name for piece in pieces if piece.function.name] == ["get_weather"]
        arguments = [piece.function.arguments for piece in pieces if piece.function.arguments]
        assert "".join(arguments) == CALLED
        most = max(most, len(arguments))
    assert most > 1
    with served.sdk.chat.completions.stream(
        model=CALLER, messages=QUESTION, tools=TOOLS, temperature=0
    ) as stream:
        (again,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert again.function.arguments == CALLED


def test_the_result_goes_back_as_an_observation(served: Served) -> None:
    message = served.create(CALLER, tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "晴<|user|>"}
    asked = served.create(CALLER, messages=[*QUESTION, message, result], tools=TOOLS)
    turns = [
        Turn("system", "", tools=[WEATHER, NOW]),
        Turn("user", QUESTION[0]["content"]),
        Turn("assistant", CALLED, metadata="get_weather"),
        Turn("observation", "晴<|user|>"),
    ]
    assert asked.usage.prompt_tokens == len(served.format.render_turns(turns))


def test_choices_are_enforced(served: Served) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    (call,) = served.create(CALLER, tools=TOOLS, tool_choice=named).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("now", "{}")  # which takes none
    (call,) = served.create(CALLER, tools=TOOLS[:1], tool_choice="required").choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "襄阳"}
    (choice,) = served.create(CALLER, tools=TOOLS, tool_choice="none").choices
    assert (choice.message.tool_calls, choice.message.content) == (None, CALLED)


def test_a_call_that_is_cut_short_says_so(served: Served) -> None:
    (choice,) = served.create(CALLER, tools=TOOLS, max_tokens=6).choices
    assert choice.finish_reason == "length"
    assert CALLED.startswith(choice.message.tool_calls[0].function.arguments)


def test_an_answer_is_held_to_a_schema_over_byte_pairs(served: Served) -> None:
    """Which the random weights would never do of their own accord."""
    schema = {
        "properties": {"天气": {"enum": ["晴", "雨"]}},
        "required": ["天气"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", **schema}}}
    for seed in range(3):
        asked = {"temperature": 1, "seed": seed, "max_tokens": 200}
        (choice,) = served.create(GLM4, response_format=wanted, **asked).choices
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content)["天气"] in {"晴", "雨"}


def test_required_calls_are_made_at_any_temperature(served: Served) -> None:
    """By the tools' schemas, by random weights, whole and streamed; and by a model that would call anyway."""
    asked: Any = {"tools": STRICT, "tool_choice": "required", "temperature": 2, "max_tokens": 300}
    names = set()
    for seed in range(12):
        (whole,) = served.create(GLM4, seed=seed, **asked).choices
        parts = [chunk.choices[0] for chunk in served.create(GLM4, seed=seed, stream=True, **asked)]
        calls = whole.message.tool_calls
        assert calls
        assert not whole.message.content
        pieces = [piece for part in parts for piece in part.delta.tool_calls or ()]
        assert [piece.function.name for piece in pieces if piece.function.name] == [
            call.function.name for call in calls
        ]
        assert "".join(piece.function.arguments for piece in pieces) == "".join(
            call.function.arguments for call in calls
        )
        assert parts[-1].finish_reason == whole.finish_reason
        for call in calls if whole.finish_reason == "tool_calls" else calls[:-1]:
            jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
            names.add(call.function.name)
    assert names == {"get_weather", "now"}
    (call,) = served.create(CALLER, tools=STRICT, tool_choice="required").choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "襄阳"})


def test_beside_tools_the_answer_is_calls_or_text_that_obeys(served: Served) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked: Any = {"tools": STRICT, "response_format": wanted, "temperature": 1, "max_tokens": 300}
    kinds: set[bool] = set()
    for seed in range(200):
        if seed >= 24 and len(kinds) > 1:
            break
        (whole,) = served.create(GLM4, seed=seed, **asked).choices
        calls, content = whole.message.tool_calls or [], whole.message.content
        assert bool(calls) != bool(content)
        kinds.add(bool(calls))
        if seed < 6:
            parts = [chunk.choices[0] for chunk in served.create(GLM4, seed=seed, stream=True, **asked)]
            assert "".join(part.delta.content or "" for part in parts) == (content or "")
            pieces = [piece for part in parts for piece in part.delta.tool_calls or ()]
            assert "".join(piece.function.arguments for piece in pieces) == "".join(
                call.function.arguments for call in calls
            )
        if whole.finish_reason == "length":
            continue
        if content:
            assert json.loads(content)["n"] in {1, 2}
        for call in calls:
            jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
    assert kinds == {False, True}
    (choice,) = served.create(CALLER, **asked | {"temperature": 0}).choices
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "襄阳"}


def test_a_strict_tool_that_cannot_be_enforced_is_named(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    broken: Any = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError, match=r"tool f: .*uniqueItems") as refused:
        served.create(GLM4, tools=[*STRICT, broken])
    assert refused.value.param == "tools.2.function.parameters"
    assert "%json" not in refused.value.message


def test_the_responses_api_calls_too(served: Served) -> None:
    tools: Any = [{"type": "function", "strict": False, **each} for each in (WEATHER, NOW)]
    events = list(
        served.sdk.responses.create(
            model=CALLER, input=QUESTION[0]["content"], tools=tools, temperature=0, stream=True
        )
    )
    parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(parts) == CALLED
    (item,) = events[-1].response.output
    assert (item.type, item.arguments, item.status) == ("function_call", CALLED, "completed")


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_tokens_are_counted_as_a_chat_has_them(served: Served, tools: Any) -> None:
    more = {"tools": tools} if tools else {}
    chat = served.create(GLM4, **more, max_tokens=1, extra_body={"return_token_ids": True})
    body = {"model": GLM4, "messages": QUESTION, **more}
    counted = httpx.post(served.up.base_url + "/tokenize", json=body, timeout=30).json()
    assert counted["tokens"] == chat.model_extra["prompt_token_ids"]
    assert counted["count"] == chat.usage.prompt_tokens
    text = httpx.post(
        served.up.base_url + "/tokenize", json={"model": GLM4, "prompt": "襄阳 👋"}, timeout=30
    ).json()
    back = httpx.post(
        served.up.base_url + "/detokenize", json={"model": GLM4, "tokens": text["tokens"]}, timeout=30
    )
    assert back.json() == {"prompt": "襄阳 👋"}
