"""Calls that the real vLLM is made to write, of random weights at the highest temperature."""

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.e2e.serve_process import ServeProcess
from tests.vllm.checkpoint import CALL, TEMPLATE, THOUGHT
from tests.vllm.conftest import Served
from tests.vllm.test_answers import say

POINT: Any = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"enum": ["a", "b"]}},
    "required": ["x", "name"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "go": {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/point"}},
        "required": ["to"],
        "additionalProperties": False,
        "$defs": {"point": POINT},
    },
    "wait": {"type": "object", "properties": {"on": {"type": "boolean"}}, "additionalProperties": False},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]


def check(calls: Any) -> None:
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("seed", range(3))
async def test_a_call_is_required(sdk: openai.AsyncOpenAI, seed: int) -> None:
    asked: Any = {"messages": say(), "tools": TOOLS, "tool_choice": "required", "seed": seed}
    asked |= {"model": "llama", "temperature": 2, "max_tokens": 700, "parallel_tool_calls": False}
    (choice,) = (await sdk.chat.completions.create(**asked)).choices
    assert choice.finish_reason == "tool_calls"
    assert len(choice.message.tool_calls or ()) == 1
    check(choice.message.tool_calls)
    parts = [
        part
        async for chunk in await sdk.chat.completions.create(**asked, stream=True)
        for part in chunk.choices[0].delta.tool_calls or ()
    ]
    calls: Any = choice.message.tool_calls
    (call,) = calls
    assert parts[0].function is not None
    assert parts[0].function.name == call.function.name
    written = "".join(part.function.arguments or "" for part in parts if part.function)
    assert written == call.function.arguments


@pytest.mark.parametrize("name", SCHEMAS)
async def test_a_named_tool_is_called(sdk: openai.AsyncOpenAI, name: str) -> None:
    named: Any = {"type": "function", "function": {"name": name}}
    (choice,) = (
        await sdk.chat.completions.create(
            model="llama", messages=say(), tools=TOOLS, tool_choice=named, temperature=2, max_tokens=700
        )
    ).choices
    assert [call.function.name for call in choice.message.tool_calls or () if call.type == "function"] == [
        name
    ]
    if choice.finish_reason == "tool_calls":
        check(choice.message.tool_calls)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_strict_call_comes_among_text(sdk: openai.AsyncOpenAI, served: Served, stream: bool) -> None:
    """Its mark is forced, and what stands behind it comes of random weights."""
    mark = served.tokenizer.token_to_id(CALL)
    strict: Any = [{"type": "function", "function": {**TOOLS[1]["function"], "strict": True}}]
    asked: Any = {"model": "llama", "messages": say(), "tools": strict, "temperature": 2, "max_tokens": 300}
    asked |= {"logit_bias": {str(mark): 100}, "parallel_tool_calls": False, "seed": 1}
    if stream:
        async with sdk.chat.completions.stream(**asked) as events:
            (choice,) = (await events.get_final_completion()).choices
    else:
        (choice,) = (await sdk.chat.completions.create(**asked)).choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    check(choice.message.tool_calls)


def with_template(served: Served, folder: Path, template: str) -> Path:
    """Return a copy of the checkpoint's tokenizer that has another template."""
    copied = shutil.copytree(served.checkpoint, folder / "checkpoint")
    settings = json.loads((copied / "tokenizer_config.json").read_text())
    (copied / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return copied


@pytest.mark.parametrize("mark", ["<parameter=", "<arg_key>"])
@pytest.mark.parametrize("thinks", [False, True])
async def test_strict_calls_without_quotes(
    served: Served, tmp_path: Path, mark: str, *, thinks: bool
) -> None:
    """Of templates that give away Qwen3-Coder and GLM-4.5, and reasoning, which then comes first."""
    template = TEMPLATE.replace(CALL, "") + "<think>" * thinks
    folder = with_template(served, tmp_path, "{# " + mark + THOUGHT * thinks + " #}" + template)
    strict: Any = [{"type": "function", "function": {**each["function"], "strict": True}} for each in TOOLS]
    forced = str(served.tokenizer.token_to_id(CALL))
    asked: Any = {"model": "llama", "messages": say(), "tools": strict[1:], "temperature": 2, "seed": 1}
    asked |= {"logit_bias": {forced: 100}, "parallel_tool_calls": False, "max_tokens": 400}
    gateway = ServeProcess(served.triton.grpc, "--tokenizers", str(folder))
    try:
        async with gateway.sdk() as sdk:
            (choice,) = (await sdk.chat.completions.create(**asked)).choices
            if thinks:
                # The mark that is forced is one of the reasoning's text, and stays there.
                assert choice.finish_reason == "length"
                assert CALL in choice.message.model_extra["reasoning_content"]
            else:
                assert choice.finish_reason == "tool_calls"
                check(choice.message.tool_calls)
            # Of several tools with more in them, too, the grammar is one that vLLM takes.
            asked |= {"tools": strict, "max_tokens": 5}
            await sdk.chat.completions.create(**asked)
    finally:
        gateway.close()


@pytest.mark.parametrize("tools", [False, True])
async def test_what_follows_reasoning_is_held_to_a_schema(
    served: Served, tmp_path: Path, *, tools: bool
) -> None:
    """The prompt begins it, and its end is forced; what stands behind it comes of random weights."""
    folder = with_template(served, tmp_path, "{# " + THOUGHT + " #}" + TEMPLATE + "<think>")
    forced = str(served.tokenizer.token_to_id(THOUGHT))
    asked: Any = {"model": "llama", "messages": say(), "temperature": 2, "seed": 1, "max_tokens": 400}
    asked["logit_bias"] = {forced: 100}
    if tools:
        asked |= {"tools": TOOLS[1:], "tool_choice": "required", "parallel_tool_calls": False}
    else:
        schema = {"name": "point", "strict": True, "schema": POINT}
        asked["response_format"] = {"type": "json_schema", "json_schema": schema}
    gateway = ServeProcess(served.triton.grpc, "--tokenizers", str(folder))
    try:
        async with gateway.sdk() as sdk:
            (choice,) = (await sdk.chat.completions.create(**asked)).choices
    finally:
        gateway.close()
    if tools:
        check(choice.message.tool_calls)
    else:
        jsonschema.validate(json.loads(choice.message.content), POINT)
