"""Own models whose conversations a chat template writes, by the official SDK."""

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from tests.e2e.families_server import BASE, BEGINNING, CHAT, LINE, LISTING, SCRIPTED, Families
from tests.e2e.up_process import UpProcess
from tests.template_checkpoint import CALL, REASONING

pytestmark = pytest.mark.e2e

QUESTION: list[Any] = [{"role": "user", "content": "How is the weather in 襄阳?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tell the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ARGUMENTS = '{"city": "襄阳"}'


@pytest.fixture
def folders(families: Families) -> Path:
    return families.folder


@pytest.fixture
def up(families: Families) -> UpProcess:
    return families.up


@pytest.fixture
def client(families: Families) -> openai.OpenAI:
    return families.sdk


def prompt_ids(folder: Path, **arguments: Any) -> list[int]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, tokenize=False, **arguments
    )
    ids: list[int] = tokenizer.encode(rendered, add_special_tokens=False)
    return ids


def test_reasoning_and_calls_come_apart(client: openai.OpenAI, folders: Path) -> None:
    answer = client.chat.completions.create(model=SCRIPTED, messages=QUESTION, tools=TOOLS, temperature=0)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.model_dump()["reasoning_content"] == REASONING
    calls = [each.function for each in choice.message.tool_calls or ()]
    assert [(each.name, each.arguments) for each in calls] == [("get_weather", ARGUMENTS)]
    assert answer.usage.prompt_tokens == len(prompt_ids(folders / SCRIPTED, tools=TOOLS))
    assert answer.usage.completion_tokens == 7


def test_they_are_streamed(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=SCRIPTED,
            messages=QUESTION,
            tools=TOOLS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(each.model_dump().get("reasoning_content") or "" for each in deltas) == REASONING
    calls = [call.function for each in deltas for call in each.tool_calls or ()]
    assert [call.name for call in calls if call.name] == ["get_weather"]
    assert "".join(call.arguments or "" for call in calls) == ARGUMENTS
    assert not any(each.content for each in deltas)
    assert next(chunk.choices[0].finish_reason for chunk in reversed(chunks) if chunk.choices) == "tool_calls"
    assert chunks[-1].usage.completion_tokens == 7


def test_without_tools_a_call_is_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=SCRIPTED, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=1
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == f"<tool_call>{CALL}</tool_call>"
    assert "".join(each.token for each in choice.logprobs.content) == choice.message.content


@pytest.mark.parametrize("arguments", [{}, {"tools": TOOLS}, {"enable_thinking": False}])
def test_prompts_are_those_of_transformers(up: UpProcess, folders: Path, arguments: dict[str, Any]) -> None:
    body: dict[str, Any] = {"model": SCRIPTED, "messages": QUESTION}
    switches = {name: value for name, value in arguments.items() if name != "tools"}
    body |= {"chat_template_kwargs": switches} if switches else arguments
    told = httpx.post(f"{up.base_url}/tokenize", json=body, timeout=60).raise_for_status().json()
    assert told["tokens"] == prompt_ids(folders / SCRIPTED, **arguments)


def test_reasoning_is_switched_off(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=SCRIPTED,
        messages=QUESTION,
        temperature=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    message = answer.choices[0].message
    assert not message.model_dump().get("reasoning_content")
    assert message.content == f"<tool_call>{CALL}</tool_call>"


def test_a_stop_string_and_a_limit_end_answers(client: openai.OpenAI) -> None:
    stopped = client.chat.completions.create(model=SCRIPTED, messages=QUESTION, stop=["weather"])
    assert stopped.choices[0].finish_reason == "stop"
    limited = client.chat.completions.create(model=CHAT, messages=QUESTION, temperature=0, max_tokens=5)
    assert limited.choices[0].finish_reason in ("length", "stop")
    assert limited.usage.completion_tokens <= 5


def test_a_schema_is_held_to(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=CHAT,
        messages=QUESTION,
        max_tokens=40,
        extra_body={
            "structured_outputs": {"choice": ["yes", "no"]},
            "chat_template_kwargs": {"enable_thinking": False},  # of which there is no end to random weights'
        },
    )
    assert answer.choices[0].message.content in ("yes", "no")


@pytest.mark.parametrize("model", [CHAT, BASE])
def test_texts_are_continued(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="the weather", max_tokens=4, temperature=0)
    assert answer.usage.prompt_tokens == 7
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_a_base_model_has_no_conversations(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model=BASE, messages=QUESTION)


OTHER: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"zone": {"$ref": "#/$defs/zone"}},
            "required": ["zone"],
            "additionalProperties": False,
            "$defs": {"zone": {"enum": ["UTC", "CET"]}},
        },
    },
}


@pytest.mark.parametrize("seed", range(4))
def test_a_call_is_required(client: openai.OpenAI, seed: int) -> None:
    """Of random weights at the highest temperature."""
    asked: dict[str, Any] = {"model": CHAT, "messages": QUESTION, "tools": [*TOOLS, OTHER], "seed": seed}
    asked |= {"tool_choice": "required", "temperature": 2, "max_tokens": 400}
    asked["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    (choice,) = client.chat.completions.create(**asked).choices
    assert not choice.message.content
    calls = [(each.function.name, each.function.arguments) for each in choice.message.tool_calls or ()]
    assert calls
    whole = calls if choice.finish_reason == "tool_calls" else calls[:-1]
    for name, arguments in whole:
        assert name in ("get_weather", "get_time")
        assert name == "get_weather" or json.loads(arguments) in ({"zone": "UTC"}, {"zone": "CET"})
    chunks = client.chat.completions.create(**asked, stream=True)
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    streamed = [
        "".join(each.function.arguments or "" for each in parts if each.index == at)
        for at in range(len(calls))
    ]
    assert streamed == [arguments for _, arguments in calls]


def test_a_named_tool_is_called_once(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_time"}}
    (choice,) = client.chat.completions.create(
        model=CHAT,
        messages=QUESTION,
        tools=[*TOOLS, OTHER],
        tool_choice=named,
        temperature=2,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    ).choices
    assert choice.finish_reason == "tool_calls"
    calls: Any = choice.message.tool_calls
    (call,) = calls
    assert call.function.name == "get_time"
    assert json.loads(call.function.arguments) in ({"zone": "UTC"}, {"zone": "CET"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_strict_call_comes_behind_reasoning(client: openai.OpenAI, stream: bool) -> None:
    """What the model would write else, `get_weather`, the schema does not allow."""
    strict: Any = {"type": "function", "function": OTHER["function"] | {"name": "get_weather"}}
    asked: Any = {"model": SCRIPTED, "messages": QUESTION, "tools": [strict], "temperature": 0}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            (choice,) = events.get_final_completion().choices
    else:
        (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.model_dump()["reasoning_content"] == REASONING
    calls: Any = choice.message.tool_calls
    (call,) = calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) in ({"zone": "UTC"}, {"zone": "CET"})


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_schema_is_held_to_behind_reasoning(client: openai.OpenAI, tools: Any) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked: Any = {"model": SCRIPTED, "messages": QUESTION, "temperature": 0, "response_format": form}
    (choice,) = client.chat.completions.create(**asked, **({"tools": tools} if tools else {})).choices
    assert choice.message.model_dump()["reasoning_content"] == REASONING
    if tools:  # which the model calls
        assert choice.finish_reason == "tool_calls"
    else:
        assert json.loads(choice.message.content or "")["a"] in (1, 2)
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("model", "city"),
    [(LISTING, "襄阳"), (LISTING, "Berlin"), (BEGINNING, "襄阳"), (LINE, "襄阳"), (LINE, "Berlin")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_strict_calls_that_may_come_are_held_to_their_schema(
    client: openai.OpenAI, model: str, city: str, *, stream: bool
) -> None:
    """As OpenAI's Agents SDK asks for them; the model by itself calls for 襄阳."""
    asked: dict[str, Any] = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 200}
    asked["tools"] = [strict_for(city)]
    # Of several calls in a list, random weights would not come to the end.
    asked["parallel_tool_calls"] = False
    if stream:
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        calls = [call.function for each in chunks for call in each.delta.tool_calls or ()]
        content = "".join(each.delta.content or "" for each in chunks)
        reason = chunks[-1].finish_reason
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        calls = [call.function for call in choice.message.tool_calls or ()]
        content, reason = choice.message.content, choice.finish_reason
    assert (content or "", reason) == ("", "tool_calls")
    assert [call.name for call in calls if call.name] == ["get_weather"]
    assert json.loads("".join(call.arguments or "" for call in calls)) == {"city": city}


def strict_for(city: str) -> Any:
    """Return a tool that is for one city alone."""
    parameters = {"type": "object", "properties": {"city": {"enum": [city]}}, "required": ["city"]}
    function = {"name": "get_weather", "strict": True, "parameters": parameters}
    return {"type": "function", "function": function}


def test_what_begins_as_no_strict_call_is_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=BEGINNING, messages=QUESTION, tools=[strict_for("Berlin")], temperature=0, max_tokens=20
    )
    message = answer.choices[0].message
    assert not message.tool_calls
    assert "name" not in (message.content or "")[:10]


@pytest.mark.parametrize("model", [LISTING, BEGINNING, LINE])
def test_without_strict_tools_they_call_as_they_will(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, tools=TOOLS, temperature=0)
    calls = [call.function for call in answer.choices[0].message.tool_calls or ()]
    assert [(call.name, call.arguments) for call in calls] == [("get_weather", ARGUMENTS)]
