from typing import Any

import pytest

from gateway.errors import InvalidRequestError
from gateway.generation import Message, PastCall
from gateway.openai.responses_items import messages_of
from tests.gateway.openai.test_responses_request import read

ASKED = {"role": "user", "content": "?"}


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
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "t"}]},
        {"type": None, "role": "user", "content": [{"type": "input_text", "text": x} for x in "ab"]},
        {"role": "assistant", "content": "c"},
        {**answer("d"), "phase": None},
    )
    assert said == [
        Message(role="system", content="s"),
        Message(role="system", content="t"),
        Message(role="user", content="ab"),
        Message(role="assistant", content="c"),
        Message(role="assistant", content="d"),
    ]
    assert [message.field for message in said] == [f"input.{at}" for at in range(5)]


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
        Message(role="tool", content="12", answers="call_b"),
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
        ({"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}, "input.1.content.0"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input.1.content.0.text"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "input.1.content.0"),
        ({**answer(), "phase": "commentary"}, "input.1.phase"),
        (call(arguments="[1]"), "input.1.arguments"),
        (call(arguments="{"), "input.1.arguments"),
        (call(call_id=""), "input.1.call_id"),
        (call(namespace="n"), "input.1.namespace"),
        ({"type": "function_call", "name": "now", "arguments": "{}"}, "input.1.call_id"),
        ({"type": "function_call_output", "output": ""}, "input.1.call_id"),
        ({"type": "function_call_output", "call_id": "call_a"}, "input.1.output"),
        (result(output=[{"type": "input_image", "image_url": "u"}]), "input.1.output.0.type"),
        (result(output={"a": 1}), "input.1.output"),
    ],
)
def test_refused(item: Any, path: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        messages(ASKED, item)
    assert refused.value.param == path


def test_a_call_id_twice_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        messages(ASKED, call(), call())
    assert refused.value.param == "input.2.call_id"


def test_a_blank_line_parts_the_texts_before_and_after_a_call() -> None:
    said = messages(ASKED, answer("Let me look."), call(), answer("One "), answer("moment."), result())
    assert said[1].content == "Let me look.\n\nOne moment."
