"""The joined stream is the answer in one piece, on every route, however the model's deltas are cut.

The answers are the model's side's own responses, made up: random texts, calls, log-probabilities and ends
for each choice, read by the real dialect and sent over HTTP. What joins chats is the official SDK.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from gateway.app import create_app
from gateway.core.events import Event
from gateway.core.request import Generation
from gateway.triton.dialects.base import ModelReport
from gateway.triton.dialects.chatglm import CHATGLM
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.http.made_answers import (
    BEHIND_FENCED,
    BEHIND_JSON,
    CHOICES,
    PROMPT_TOKENS,
    Choice,
    responses,
)
from tests.gateway.serving import CHAT, MESSAGES, settings

DIALECT = CHATGLM
UPSTREAM = FakeUpstream(models=("chatglm2", "chatglm3", "glm4"))
APP = create_app(settings(), UPSTREAM)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("f", "now")
]
FLAT_TOOLS = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


async def post(path: str, body: Any, choices: Sequence[Choice], order: Sequence[int]) -> httpx.Response:
    async def script(request: Generation) -> AsyncGenerator[Event, None]:
        report = ModelReport(heartbeat_age_s=0, chat_format=request.model, max_context=512)
        decoder = DIALECT.decoder(request, report)
        for each in responses(choices, request, order):
            for event in decoder.decode(each):
                yield event
        decoder.end()

    UPSTREAM.script = script
    async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://localhost") as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def both(
    runner: asyncio.Runner, path: str, body: dict[str, Any], choices: list[Choice], order: list[int]
) -> tuple[Any, list[Any]]:
    """Return the answer in one piece, and the events of the stream before its mark."""
    uncut = [replace(choice, cuts=()) for choice in choices]
    whole = runner.run(post(path, body, uncut, [0])).json()
    options = {"stream_options": {"include_usage": True}} if path != "/v1/responses" else {}
    streamed = runner.run(post(path, body | {"stream": True} | options, choices, order)).text
    assert streamed.endswith("\n\n")
    events = [event.rpartition("data: ")[2] for event in streamed.removesuffix("\n\n").split("\n\n")]
    if path != "/v1/responses":
        assert events.pop() == "[DONE]"
    return whole, [json.loads(event) for event in events]


ORDERS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
EXAMPLES = hypothesis_settings(max_examples=100)


@EXAMPLES
@given(
    model=st.sampled_from(["chatglm2", "chatglm3", "glm4"]),
    choices=st.lists(CHOICES, min_size=1, max_size=3),
    order=ORDERS,
    logprobs=st.sampled_from([None, 0, 2]),
    ids=st.booleans(),
    offered=st.sampled_from([{}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required"}]),
)
def test_chats(
    *,
    model: str,
    choices: list[Choice],
    order: list[int],
    logprobs: int | None,
    ids: bool,
    offered: dict[str, Any],
    runner: asyncio.Runner,
) -> None:
    body: dict[str, Any] = {"model": model, "messages": MESSAGES, "n": len(choices), "return_token_ids": ids}
    if model != "chatglm2":
        body |= offered
    if logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": logprobs}
    whole, chunks = both(runner, CHAT, body, choices, order)
    *before, last = chunks
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    state: Any = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    joined = state.current_completion_snapshot.model_dump()
    for one, other in zip(joined["choices"], whole["choices"], strict=True):
        assert one["index"] == other["index"]
        assert one["finish_reason"] == other["finish_reason"]
        assert (one["message"]["content"] or "") == (other["message"]["content"] or "")
        assert functions(one["message"]) == functions(other["message"])
        assert ((one["logprobs"] or {}).get("content") or []) == (
            (other["logprobs"] or {}).get("content") or []
        )
    for index, choice in enumerate(whole["choices"]):
        parts = [part for chunk in before for part in chunk["choices"] if part["index"] == index]
        assert all(chunk["usage"] is None for chunk in before)
        assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        check_stop_reason(parts, choice, choices[index])
        if logprobs is not None:
            listed = b"".join(bytes(token["bytes"] or ()) for token in choice["logprobs"]["content"])
            assert listed.decode() == (choice["message"]["content"] or "")
        if ids:
            assert [each for part in parts for each in part.get("token_ids") or ()] == choice["token_ids"]
        pieces = [piece for part in parts for piece in part["delta"].get("tool_calls", ())]
        for number in range(len(choice["message"].get("tool_calls") or ())):
            first, *rest = [piece for piece in pieces if piece["index"] == number]
            assert len(first["id"]) >= 9
            assert first["function"]["name"] in {"f", "now"}
            assert not any("id" in piece or "name" in piece["function"] for piece in rest)


def check_stop_reason(parts: list[Any], whole: Any, told: Choice) -> None:
    """Hold that the whole choice, and the last part alone, says which stop ended it, or none."""
    assert whole["stop_reason"] == (told.stop if told.finish == "stop" else None)
    assert [part["stop_reason"] for part in parts if "stop_reason" in part] == [whole["stop_reason"]]
    assert "stop_reason" in parts[-1]


def functions(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
    ]


@EXAMPLES
@given(
    choices=st.lists(CHOICES, min_size=1, max_size=3),
    order=ORDERS,
    asked=st.tuples(st.sampled_from([None, 0, 2]), st.booleans(), st.booleans()),
)
def test_completions(choices: list[Choice], order: list[int], asked: Any, runner: asyncio.Runner) -> None:
    logprobs, ids, echo = asked
    choices = [replace(choice, segments=("".join(choice.segments),)) for choice in choices]
    body: dict[str, Any] = {"model": "chatglm3", "prompt": "p", "n": len(choices), "return_token_ids": ids}
    whole, chunks = both(
        runner, "/v1/completions", {**body, "logprobs": logprobs, "echo": echo}, choices, order
    )
    *before, last = chunks
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for index, choice in enumerate(whole["choices"]):
        parts = [part for chunk in before for part in chunk["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"] == choices[index].segments[0]
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [choices[index].finish]
        check_stop_reason(parts, choice, choices[index])
        if logprobs is not None:
            for name, told in choice["logprobs"].items():
                assert len(told) == len(choices[index].tokens) + PROMPT_TOKENS * echo
                nulls = [0] if echo and name in {"token_logprobs", "top_logprobs"} else []
                assert [place for place, each in enumerate(told) if each is None] == nulls
                told_in_parts = [each for part in parts for each in (part["logprobs"] or {}).get(name, ())]
                assert told_in_parts == told
        if ids:
            assert [each for part in parts for each in part["token_ids"] or ()] == choice["token_ids"]


@EXAMPLES
@given(
    model=st.sampled_from(["chatglm3", "glm4"]),
    choice=CHOICES,
    asked=st.sampled_from([{}, LOGPROBS, {"tools": FLAT_TOOLS}, {"tools": FLAT_TOOLS, **LOGPROBS}]),
)
@example(model="chatglm3", choice=BEHIND_FENCED, asked={"tools": FLAT_TOOLS, **LOGPROBS})
@example(model="glm4", choice=BEHIND_JSON, asked={"tools": FLAT_TOOLS, **LOGPROBS})
def test_responses(model: str, choice: Choice, asked: dict[str, Any], runner: asyncio.Runner) -> None:
    body: dict[str, Any] = {"model": model, "input": "hi", **asked}
    whole, events = both(runner, "/v1/responses", body, [choice], [0])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert nameless(events[-1]["response"]) == nameless(whole)
    assert [item["type"] for item in whole["output"]] == [
        event["item"]["type"] for event in events if event["type"] == "response.output_item.added"
    ]
    told = {
        "message": "response.output_text.delta",
        "function_call": "response.function_call_arguments.delta",
    }
    for place, item in enumerate(whole["output"]):
        pieces = [
            event["delta"]
            for event in events
            if event["type"] == told[item["type"]] and event["output_index"] == place
        ]
        text = item["content"][0]["text"] if item["type"] == "message" else item["arguments"]
        assert "".join(pieces) == text
        if "include" in asked and item["type"] == "message":
            told_of = [
                token["token"]
                for event in events
                if event["type"] == told["message"] and event["output_index"] == place
                for token in event["logprobs"]
            ]
            assert told_of == [token["token"] for token in item["content"][0]["logprobs"]]


def nameless(node: Any) -> Any:
    """Leave out what is made anew for each answer."""
    anew = {"id", "call_id", "created_at", "completed_at"}
    if isinstance(node, dict):
        return {name: nameless(value) for name, value in node.items() if name not in anew}
    return [nameless(each) for each in node] if isinstance(node, list) else node
