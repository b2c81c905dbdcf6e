import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState

from gateway.core.events import (
    CallPart,
    Delta,
    Piece,
    Reasoning,
    TokenLogprob,
    TopLogprob,
    Usage,
    joined_pieces,
)
from gateway.errors import (
    ContextLengthError,
    DeadlineError,
    GatewayError,
    InternalError,
    RateLimitError,
    UnavailableError,
    UpstreamProtocolError,
)
from gateway.openai.answer import encode
from gateway.openai.document import Reading
from gateway.openai.responses_answer import ResponsesAnswer
from gateway.openai.responses_request import ResponsesRequest
from tests.gateway.openai.sdk_shapes import check_event, check_response

COUNTS = Usage(prompt_tokens=3, completion_tokens=9, cached_tokens=2)
CALLS = (CallPart("get_weather", '{"city": "北京"}'), CallPart("now", "{}"))
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "get_weather", "description": "Tells it.", "parameters": {"type": "object"}},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
WITH_LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


def build(**asked: Any) -> ResponsesAnswer:
    body = json.dumps({"model": "m", "input": "hi", **asked}).encode()
    return ResponsesAnswer(ResponsesRequest.read(body, Reading()))


def last(reason: Any = "stop", *pieces: Piece) -> Delta:
    return Delta(pieces=pieces, tokens=1, finish_reason=reason, usage=COUNTS)


def logprob(token: str) -> tuple[TokenLogprob]:
    utf8 = token.encode()
    top = (TopLogprob(id=1, token=token, utf8=utf8, logprob=-0.5),)
    return (TokenLogprob(id=7, token=token, utf8=utf8, logprob=-0.5, top=top),)


def documents(events: bytes) -> list[dict[str, Any]]:
    """Return the data of framed `events`, each of which is called by its type."""
    framed = [event.split(b"\n", 1) for event in events.split(b"\n\n") if event]
    found = [(name, msgspec.json.decode(data.removeprefix(b"data: "))) for name, data in framed]
    assert all(name == f"event: {document['type']}".encode() for name, document in found)
    return [document for _, document in found]


def run(*deltas: Delta, **asked: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return all events and the last response, each checked against the SDK."""
    way = build(**asked)
    events = documents(way.begin())
    for delta in deltas:
        events += documents(way.write(delta))
    events += documents(way.close())
    for number, event in enumerate(events):
        check_event(event)
        assert event["sequence_number"] == number
    response = msgspec.json.decode(encode(way.document))
    assert events[-1]["response"] == response
    check_response(response)
    assert put_together(events) == response["output"]
    return events, response


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items, after checking that what came in pieces is what came whole."""
    items: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
        if "output_index" in event:
            assert event["output_index"] == len(items) - 1, "items come one after the other"
            assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
            add(event, items)
    return items


def add(event: dict[str, Any], items: list[dict[str, Any]]) -> None:
    """Add what `event` says to the last item."""
    match event:
        case {"type": "response.content_part.added", "part": part}:
            items[-1]["content"].append(part)
        case {"type": "response.output_text.delta", "delta": text, "logprobs": logprobs}:
            (part,) = items[-1]["content"]
            part["text"] += text
            part["logprobs"] += logprobs
        case {"type": "response.output_text.done", "text": text, "logprobs": logprobs}:
            assert [(part["text"], part["logprobs"]) for part in items[-1]["content"]] == [(text, logprobs)]
        case {"type": "response.reasoning_text.delta", "delta": text}:
            (part,) = items[-1]["content"]
            part["text"] += text
        case {"type": "response.reasoning_text.done", "text": text}:
            assert [part["text"] for part in items[-1]["content"]] == [text]
        case {"type": "response.content_part.done", "part": part}:
            assert items[-1]["content"][event["content_index"]]["text"] == part["text"]
            items[-1]["content"] = [part]
        case {"type": "response.function_call_arguments.delta", "delta": text}:
            items[-1]["arguments"] += text
        case {"type": "response.function_call_arguments.done", "arguments": text}:
            assert items[-1]["arguments"] == text
        case {"type": "response.output_item.done", "item": item}:
            assert {**items[-1], "status": item["status"]} == item
            items[-1] = item


MESSAGE = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
CALL = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]
BEGIN = ["response.created", "response.in_progress"]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, each once where it repeats."""
    return [kind for kind, _ in itertools.groupby(event["type"] for event in events)]


def test_text() -> None:
    events, response = run(Delta(pieces=("Hel",), tokens=1), Delta(tokens=1), last("stop", "lo"))
    assert kinds(events) == [*BEGIN, *MESSAGE, "response.completed"]
    (item,) = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "annotations": [], "logprobs": [], "text": "Hello"}]
    assert (response["status"], response["error"], response["incomplete_details"]) == (
        "completed",
        None,
        None,
    )
    assert response["completed_at"] >= response["created_at"]
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 2},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }
    assert response["id"].startswith("resp_")
    assert item["id"].startswith("msg_")


def test_a_response_that_ends_at_its_bound_is_incomplete() -> None:
    events, response = run(Delta(pieces=("Hel",), tokens=1), last("length"), max_output_tokens=2)
    assert events[-1]["type"] == "response.incomplete"
    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert response["max_output_tokens"] == 2


def test_calls_are_items_behind_the_text() -> None:
    events, response = run(
        Delta(pieces=("Let me see.",), tokens=2),
        Delta(tokens=1, pieces=CALLS[:1]),
        last("tool_calls", *CALLS[1:]),
        tools=TOOLS,
    )
    assert kinds(events) == [*BEGIN, *MESSAGE, *CALL, *CALL, "response.completed"]
    message, *calls = response["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert [(call["name"], call["arguments"], call["status"]) for call in calls] == [
        (call.name, call.arguments, "completed") for call in CALLS
    ]
    assert len({call["call_id"] for call in calls}) == 2
    assert all(len(call["call_id"]) >= 9 and call["id"].startswith("fc_") for call in calls)


def test_text_and_calls_keep_their_order() -> None:
    _, response = run(
        Delta(tokens=1, pieces=CALLS[:1]),
        Delta(pieces=("And",), tokens=1),
        last("tool_calls", " then", *CALLS[1:]),
        tools=TOOLS,
    )
    assert [item["type"] for item in response["output"]] == ["function_call", "message", "function_call"]
    assert response["output"][1]["content"][0]["text"] == "And then"


def test_a_call_that_comes_in_parts_is_one_item() -> None:
    events, response = run(
        Delta(tokens=1, pieces=(CallPart("now", '{"zo'),)),
        Delta(tokens=1, pieces=(CallPart(None, 'ne": 8'),)),
        Delta(tokens=1, pieces=(CallPart(None, "}"), "Then", CallPart("now", "{"))),
        last("length"),
        tools=TOOLS,
    )
    assert [(item["type"], item["status"], item.get("arguments")) for item in response["output"]] == [
        ("function_call", "completed", '{"zone": 8}'),
        ("message", "completed", None),
        ("function_call", "incomplete", "{"),
    ]
    parts = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert parts == ['{"zo', 'ne": 8', "}", "{"]


BEGUN: tuple[Piece, ...] = (CallPart("now", '{"zo'), CallPart(None, 'ne"'), CallPart(None, ": 8}"))
PIECES = st.lists(st.sampled_from([("Hel",), ("lo", "!"), BEGUN[:1], BEGUN, CALLS])).map(
    lambda parts: [piece for part in parts for piece in part]
)


@given(PIECES, st.lists(st.integers(0, 9)), st.sampled_from(["stop", "length"]))
def test_pieces_make_the_same_items_however_they_come(pieces: list[Piece], cuts: list[int], end: str) -> None:
    """Calls and messages in the order of the pieces, which may come in one delta or in several."""
    bounds = [0, *sorted(min(cut, len(pieces)) for cut in cuts), len(pieces)]
    parted = [Delta(pieces=tuple(pieces[span[0] : span[1]]), tokens=1) for span in itertools.pairwise(bounds)]
    _, whole = run(last(end, *joined_pieces(pieces)), tools=TOOLS)
    _, streamed = run(*parted, last(end), tools=TOOLS)
    told = [kind for kind, _ in itertools.groupby(item["type"] for item in whole["output"])]
    kinds = {str: "message", CallPart: "function_call"}
    assert told == [kinds[kind] for kind, _ in itertools.groupby(map(type, pieces or [""]))]
    anew = {"id": "", "call_id": ""}
    assert [item | anew for item in streamed["output"]] == [item | anew for item in whole["output"]]


@pytest.mark.parametrize("behind", [(), ("Then",)])
def test_a_call_that_a_stop_or_the_model_broke_off_is_incomplete(behind: tuple[str, ...]) -> None:
    _, response = run(last("stop", CallPart("now", '{"zo'), *behind), tools=TOOLS)
    assert response["output"][0]["status"] == "incomplete"
    assert response["status"] == "completed"


def test_a_failure_leaves_the_call_as_far_as_it_came() -> None:
    way = build(tools=TOOLS)
    way.write(Delta(tokens=1, pieces=(CallPart("now", '{"zo'),)))
    way.fail(UpstreamProtocolError("x"))
    (item,) = msgspec.json.decode(encode(way.document))["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"zo')


def test_a_call_alone_has_no_message_and_no_words_are_an_empty_one() -> None:
    _, response = run(last("tool_calls", *CALLS[:1]), tools=TOOLS)
    assert [item["type"] for item in response["output"]] == ["function_call"]
    _, response = run(last())
    assert response["output"][0]["content"][0]["text"] == ""


def test_log_probabilities() -> None:
    held = Delta(tokens=1, logprobs=logprob("a"))
    said = Delta(pieces=("ab",), tokens=1, logprobs=logprob("b"))
    end = Delta(tokens=1, logprobs=logprob("</s>"), finish_reason="stop", usage=COUNTS)
    events, response = run(held, said, end, **WITH_LOGPROBS)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [(delta["delta"], [each["token"] for each in delta["logprobs"]]) for delta in deltas] == [
        ("ab", ["a", "b"]),
        ("", ["</s>"]),
    ]
    assert response["output"][0]["content"][0]["logprobs"][0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
    }
    assert response["top_logprobs"] == 1


def test_log_probabilities_beside_calls_are_those_of_the_messages() -> None:
    """Each delta has those of one text, which its calls follow."""
    deltas = (
        Delta(pieces=("a",), tokens=1, logprobs=logprob("a")),
        Delta(pieces=CALLS[:1], tokens=2, logprobs=logprob(" ")),
        Delta(pieces=CALLS[1:], tokens=1, logprobs=()),
        Delta(pieces=("b", *CALLS[:1]), tokens=2, logprobs=logprob("b")),
        Delta(pieces=("c",), tokens=1, logprobs=logprob("c")),
    )
    _, response = run(*deltas, last("tool_calls"), tools=TOOLS, **WITH_LOGPROBS)
    told = [item["content"][0] if item["type"] == "message" else item["name"] for item in response["output"]]
    assert [each if isinstance(each, str) else each["text"] for each in told] == [
        "a",
        "get_weather",
        "now",
        "b",
        "get_weather",
        "c",
    ]
    tokens = [[token["token"] for token in each["logprobs"]] for each in told if not isinstance(each, str)]
    assert tokens == [["a", " "], ["b"], ["c"]]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeadlineError("late"), "server_error"),
        (InternalError("broken"), "server_error"),
        (RateLimitError("full"), "rate_limit_exceeded"),
        (ContextLengthError("long", param="input"), "invalid_prompt"),
    ],
)
def test_an_error_ends_the_response_as_failed(error: GatewayError, code: str) -> None:
    way = build()
    way.begin()
    way.write(Delta(pieces=("Hel",), tokens=1))
    failed, ended = documents(way.fail(error))
    check_event(failed)
    check_event(ended)
    assert (failed["type"], failed["code"], failed["message"]) == ("error", error.code, error.message)
    assert failed["param"] == error.param
    response = ended["response"]
    assert (ended["type"], response["status"], response["usage"]) == ("response.failed", "failed", None)
    assert response["error"] == {"code": code, "message": error.message}
    (item,) = response["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hel")
    assert ended["sequence_number"] == failed["sequence_number"] + 1


def test_a_stream_that_fails_before_its_response_has_begun_begins_with_it_all_the_same() -> None:
    """As where the model cannot be loaded: the SDK knows no stream that begins with anything else."""
    state = ResponseStreamState(input_tools=omit, text_format=omit)
    events = documents(build().fail(UnavailableError("no room")))
    told = [each for event in events for each in state.handle_event(check_event(event))]
    assert [each.type for each in told] == [*BEGIN, "error", "response.failed"]
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "deltas", [[], [Delta(pieces=("a",), tokens=1)], [Delta(tokens=1, finish_reason="stop")]]
)
def test_an_answer_without_an_end_is_the_upstreams_fault(deltas: list[Delta]) -> None:
    way = build()
    for delta in deltas:
        way.write(delta)
    with pytest.raises(UpstreamProtocolError):
        way.close()


def test_what_the_request_said_is_repeated() -> None:
    _, response = run(
        last(),
        instructions="Be kind.",
        max_output_tokens=7,
        temperature=0,
        top_p=0.5,
        tools=TOOLS,
        tool_choice={"type": "function", "name": "now"},
        parallel_tool_calls=False,
        metadata={"a": "b"},
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        service_tier="auto",
    )
    repeated = {
        "model": "m",
        "instructions": "Be kind.",
        "max_output_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "tool_choice": {"type": "function", "name": "now"},
        "parallel_tool_calls": False,
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    assert {name: response[name] for name in repeated} == repeated
    assert response["tools"] == [
        {**TOOLS[0], "strict": False},
        {**TOOLS[1], "strict": False, "description": None},
    ]


@pytest.mark.parametrize(
    ("asked", "repeated"),
    [
        ({"format": {"type": "json_object"}}, {"type": "json_object"}),
        (
            {"format": {"type": "json_schema", "name": "a", "schema": {"type": "null"}, "strict": None}},
            {
                "type": "json_schema",
                "name": "a",
                "description": None,
                "schema": {"type": "null"},
                "strict": True,
            },
        ),
    ],
)
def test_the_form_of_the_text_is_repeated(asked: Any, repeated: Any) -> None:
    _, response = run(last("stop", "null"), text=asked)
    assert response["text"] == {"format": repeated}


def test_what_the_request_left_open_is_told() -> None:
    _, response = run(last())
    told = {
        "object": "response",
        "background": False,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }
    assert {name: response[name] for name in told} == told


def test_reasoning_is_an_item_of_its_own() -> None:
    usage = Usage(prompt_tokens=3, completion_tokens=9, reasoning_tokens=2)
    call = CallPart("now", "{}")
    end = Delta(pieces=(), tokens=1, finish_reason="tool_calls", usage=usage)
    pieces: tuple[Piece, ...] = (Reasoning("H"), Reasoning("m."), "Two.", call)
    events, response = run(*[Delta(pieces=(piece,), tokens=1) for piece in pieces], end)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert response["output"][0]["summary"] == []
    assert [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"] == [
        "H",
        "m.",
    ]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_reasoning_that_the_limit_ends_is_incomplete() -> None:
    _, response = run(last("length", Reasoning("Hm")))
    (item,) = response["output"]
    assert (item["type"], item["status"], response["status"]) == ("reasoning", "incomplete", "incomplete")
