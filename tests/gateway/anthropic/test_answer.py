"""Answers of `/v1/messages`: complete ones are what their events add up to."""

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from pydantic_core import from_json

from gateway.anthropic.answer import MessagesAnswer
from gateway.anthropic.request import MessagesRequest
from gateway.core.events import Accepted, CallPart, Delta, Event, Heartbeat, Piece, Reasoning, Usage
from gateway.errors import DeadlineError, UpstreamProtocolError
from gateway.openai.answer import encode
from gateway.openai.document import Reading


def answer(**parameters: Any) -> MessagesAnswer:
    asked = {"model": "glm", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **parameters}
    return MessagesAnswer(MessagesRequest.read(encode(asked), Reading()), "r1")


def deltas(
    *pieces: Piece, finish: str = "stop", stop_reason: str | int | None = None, **usage: Any
) -> list[Event]:
    counts = Usage(**({"prompt_tokens": 5, "completion_tokens": 3} | usage))
    last = Delta(tokens=0, finish_reason=finish, stop_reason=stop_reason, usage=counts)
    return [Heartbeat(), *(Delta(pieces=(piece,), tokens=1) for piece in pieces), last]


def streamed(events: Iterable[Event], **parameters: Any) -> list[Any]:
    writer = answer(**parameters).accept(Accepted(prompt_tokens=5))
    framed = [writer.begin(), *(writer.write(event) for event in events), writer.close()]
    documents = []
    for event in b"".join(framed).decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        documents.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {documents[-1]['type']}"
    return documents


async def complete(events: Iterable[Event], **parameters: Any) -> Any:
    async def source() -> AsyncIterator[Event]:
        for event in events:
            yield event

    document = await answer(**parameters).accept(Accepted(prompt_tokens=5)).complete(source())
    return json.loads(encode(document))


def added_up(events: list[Any]) -> Any:
    """Return the message that a client makes of the events, as Anthropic describes it."""
    message = dict(events[0]["message"])
    content: list[Any] = []
    inputs: dict[int, str] = {}
    open_block: int | None = None
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert (open_block, event["index"]) == (None, len(content))
                open_block = event["index"]
                content.append(dict(event["content_block"]))
            case "content_block_delta":
                assert event["index"] == open_block
                kind = event["delta"].pop("type")
                ((name, value),) = event["delta"].items()
                if kind == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + value
                else:
                    assert kind == f"{name}_delta"
                    content[-1][name] += value
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
            case kind:
                assert kind == "message_stop"
                assert event is events[-1]
    for at, text in inputs.items():
        content[at]["input"] = from_json(text, allow_partial="trailing-strings")
    return message | {"content": content}


def without_ids(document: Any) -> Any:
    assert document["id"].startswith("msg_")
    for block in document["content"]:
        assert block["type"] != "tool_use" or block.pop("id").startswith("toolu_")
    return {name: value for name, value in document.items() if name != "id"}


MIXED = deltas(
    Reasoning("hm"),
    Reasoning("!"),
    "",
    "Let me",
    " see.",
    CallPart("f", ""),
    CallPart(None, '{"a": '),
    CallPart(None, '"北"}'),
    CallPart("g", ""),
    "Done.",
    finish="tool_calls",
    cached_tokens=2,
    reasoning_tokens=2,
)


async def test_a_complete_answer_is_what_its_events_add_up_to() -> None:
    whole = without_ids(await complete(MIXED))
    assert without_ids(added_up(streamed(MIXED))) == whole
    assert whole == {
        "type": "message",
        "role": "assistant",
        "model": "glm",
        "content": [
            {"type": "thinking", "thinking": "hm!", "signature": ""},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "name": "f", "input": {"a": "北"}},
            {"type": "tool_use", "name": "g", "input": {}},
            {"type": "text", "text": "Done."},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 3,
            "output_tokens_details": {"thinking_tokens": 2},
        },
    }


def test_a_stream_begins_with_what_is_known() -> None:
    start = streamed(MIXED)[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert (start["usage"]["input_tokens"], start["usage"]["output_tokens"]) == (5, 0)


@pytest.mark.parametrize(
    ("events", "stopped"),
    [
        (deltas("a"), ("end_turn", None)),
        (deltas(), ("end_turn", None)),
        (deltas("a", finish="length"), ("max_tokens", None)),
        (deltas("a", stop_reason="x"), ("stop_sequence", "x")),
        (deltas("a", stop_reason="the model's own"), ("end_turn", None)),
        (deltas("a", stop_reason=7), ("end_turn", None)),
        (deltas(CallPart("f", '{"a": "b'), stop_reason="x"), ("stop_sequence", "x")),
        (deltas(CallPart("f", '{"a": "b'), stop_reason=7), ("end_turn", None)),
        (deltas(CallPart("f", "{}"), finish="tool_calls"), ("tool_use", None)),
        (deltas(CallPart("f", "{}"), "a", finish="tool_calls", stop_reason="x"), ("tool_use", None)),
    ],
)
async def test_why_it_stopped(events: list[Event], stopped: tuple[str, str | None]) -> None:
    whole = await complete(events, stop_sequences=["x"])
    assert (whole["stop_reason"], whole["stop_sequence"]) == stopped
    assert without_ids(added_up(streamed(events, stop_sequences=["x"]))) == without_ids(whole)


@pytest.mark.parametrize("cut", [{"finish": "length"}, {"stop_reason": "x"}])
async def test_a_call_that_was_cut_has_what_is_there(cut: Any) -> None:
    whole = await complete(deltas(CallPart("f", '{"a": [1, "be'), **cut))
    assert whole["content"][0]["input"] == {"a": [1, "be"]}
    assert (await complete(deltas(CallPart("f", ""), finish="length")))["content"][0]["input"] == {}


@pytest.mark.parametrize("arguments", ["x = 1", "[1]", '{"a": ', '{"a": NaN}'])
async def test_arguments_that_are_no_object_are_an_error(arguments: str) -> None:
    events = deltas(CallPart("f", arguments), finish="tool_calls")
    with pytest.raises(UpstreamProtocolError, match="'f'"):
        await complete(events)
    with pytest.raises(UpstreamProtocolError, match="'f'"):
        streamed(events)


async def test_an_answer_without_an_end_is_an_error() -> None:
    with pytest.raises(UpstreamProtocolError):
        await complete(deltas("a")[:-1])
    with pytest.raises(UpstreamProtocolError):
        streamed(deltas("a")[:-1])


def test_an_error_ends_the_stream() -> None:
    name, data = answer().fail(DeadlineError("Too late.")).decode().strip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": "timeout_error", "message": "Too late."},
        "request_id": "r1",
    }
