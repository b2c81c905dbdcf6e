"""Tools of a model that reports GLM-4's format: what is asked, and calls that are streamed as they come."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.events import Accepted, CallPart, Delta, Event
from gateway.openai.answer import encode
from gateway.openai.chat_answer import ChatAnswer
from gateway.openai.chat_request import ChatRequest
from gateway.triton.dialects.base import ModelReport
from gateway.triton.dialects.chatglm import CHATGLM
from tests.gateway.openai.framing import chunks_of
from tests.gateway.triton.dialects.test_chatglm import ACCEPTED, END, response, tensors
from tests.gateway.triton.dialects.test_chatglm_tool_streams import as_events, responses_of
from tests.gateway.triton.dialects.test_chatglm_tools import OPENED, TOOLS, USER, asked, deltas
from wire.history import decode_history
from wire.request import decode_request

DIALECT = CHATGLM
GLM4 = ModelReport(heartbeat_age_s=0, chat_format="glm4", max_context=512)
CALL = 'get_weather\n{"city": "Berlin"}'


def read(*responses: Any, **parameters: Any) -> list[Event]:
    answer = DIALECT.decoder(asked(**parameters), GLM4)
    return [event for each in (response(meta=ACCEPTED), *responses) for event in answer.decode(each)][1:]


def test_the_model_is_asked_in_its_own_words() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"zone":"京"}'}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    named = {"type": "function", "function": {"name": "now"}}
    inputs = tensors(DIALECT.request(asked(messages=messages, tool_choice=named), GLM4, 1))
    system, _, called = decode_history(inputs["history"])
    assert (system.content, [tool["name"] for tool in system.tools or ()]) == ("", ["get_weather", "now"])
    assert (called.metadata, called.content) == ("now", '{"zone": "京"}')
    sampling: Any = decode_request(inputs["sampling"])
    assert (sampling.role, sampling.answer_metadata) == ("observation", "now")
    assert sampling.end_after_call_of == ["now"]


def test_arguments_are_passed_on_as_they_come() -> None:
    events = read(
        response("get_", {"tokens": 1}),
        response("weather\n", {"tokens": 1}),
        response('{"ci', {"tokens": 1}),
        response('ty": "Ber', {"tokens": 1}),
        response('lin"}\n', {"tokens": 1}),
        response("", END),
    )
    assert deltas(events) == [
        ("", (), None),
        ("", (), None),
        ("", (CallPart("get_weather", '{"ci'),), None),
        ("", (CallPart(None, 'ty": "Ber'),), None),
        ("", (CallPart(None, 'lin"}'),), None),
        ("", (), "tool_calls"),
    ]


def test_arguments_come_over_a_channel_too() -> None:
    decoder = CHATGLM.channels.decoder(asked(), GLM4)
    pieces = ["get_weather\n", '{"city":', ' "x"}']
    events = [event for piece in pieces for event in decoder.deltas([(0, piece, 2, (), None)])]
    assert [event.calls for event in events if isinstance(event, Delta)] == [
        (),
        (CallPart("get_weather", '{"city":'),),
        (CallPart(None, ' "x"}'),),
    ]
    joined = CHATGLM.channels.decoder(asked(), GLM4).deltas([(0, piece, 2, (), None) for piece in pieces])
    assert joined == [Delta(tokens=6, pieces=(CallPart("get_weather", '{"city": "x"}'),))]


def test_several_calls_and_text_around_them() -> None:
    text = "\nLet me see." + CALL + CALL + " Done"
    opened = [OPENED | {"at": 12}, OPENED | {"at": 12 + len(CALL)}]
    (delta,) = read(response(text, END | {"segments": opened}))
    assert isinstance(delta, Delta)
    call = CallPart("get_weather", '{"city": "Berlin"}')
    assert delta.pieces == ("Let me see.", call, call, "\nDone")
    assert (delta.text, delta.calls) == ("Let me see.\nDone", (call, call))
    assert delta.finish_reason == "tool_calls"


def test_a_call_that_is_cut_short_is_told_as_far_as_it_came() -> None:
    (delta,) = deltas(read(response(CALL[:-3], END | {"finish_reason": "length"})))
    assert delta == ("", (CallPart("get_weather", '{"city": "Berli'),), "length")


@pytest.mark.parametrize("text", ["get_weather", "get_weather\nIs it?", 'tell\n{"city": 1}', '{"city": 1}'])
def test_what_is_no_call_stays_text(text: str) -> None:
    assert deltas(read(response(text, END))) == [(text, (), "stop")]


def test_a_name_that_was_given_begins_the_call() -> None:
    named = {"type": "function", "function": {"name": "now"}}
    assert deltas(read(response('{"zone": 8}', END), tool_choice=named)) == [
        ("", (CallPart("now", '{"zone": 8}'),), "tool_calls")
    ]


PIECES = st.sampled_from(
    [CALL, "\n Hello. ", "get_weather", "\n", " ", '{"city":', '"}', '\\"', "}", "[", "]", "now\n{}"]
)
ANSWERS = st.lists(st.lists(PIECES, max_size=5).map("".join), min_size=1, max_size=4)


@given(ANSWERS, st.lists(st.integers(0, 500), max_size=8), st.sampled_from(["stop", "length"]))
def test_the_joined_stream_is_the_whole_answer(segments: list[str], cuts: list[int], finish: str) -> None:
    """However the deltas were cut: text, calls and the reason of the end."""
    request = ChatRequest.read(json.dumps({"model": "m", "messages": [USER], "tools": TOOLS}).encode())
    accepted = Accepted(prompt_tokens=7)
    events = read(*responses_of(segments, [], finish))
    document = asyncio.run(ChatAnswer(request).accept(accepted).complete(as_events(events)))
    choice = json.loads(encode(document))["choices"][0]
    content, reason = None, None
    calls: dict[int, dict[str, str]] = {}
    ids: dict[int, str] = {}
    writer = ChatAnswer(request).accept(accepted)
    for event in read(*responses_of(segments, cuts, finish)):
        for chunk in chunks_of(writer.write(event)):
            part = json.loads(chunk)["choices"][0]
            reason = part["finish_reason"] or reason
            if part["delta"].get("content") is not None:
                content = (content or "") + part["delta"]["content"]
            for piece in part["delta"].get("tool_calls", []):
                call = calls.setdefault(piece["index"], {"name": "", "arguments": ""})
                if "id" in piece:
                    assert piece["index"] not in ids
                    ids[piece["index"]] = piece["id"]
                for key, value in piece["function"].items():
                    call[key] += value
    message = choice["message"]
    assert reason == choice["finish_reason"]
    assert (content or "") == (message["content"] or "")
    assert list(calls.values()) == [call["function"] for call in message.get("tool_calls", [])]
    assert len(set(ids.values())) == len(calls)
    shown = (message["content"] or "") + "".join(call["name"] + call["arguments"] for call in calls.values())
    # Nothing but white space is lost.
    assert sorted("".join(shown.split())) == sorted("".join("".join(segments).split()))


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_in_json_that_is_cut_ends_with_what_cut_it(choice: str, reason: str) -> None:
    for arguments, told in (('{"a": "x', reason), ("{}", "tool_calls" if reason == "stop" else "length")):
        answer = DIALECT.decoder(asked(tool_choice=choice), GLM4)
        answer.decode(response(meta=ACCEPTED))
        events = answer.decode(response(f"now\n{arguments}", END | {"finish_reason": reason}))
        assert deltas(events) == [("", (CallPart("now", arguments),), told)]
