"""What a model reports of a prompt's logits, read part by part."""

import struct
from typing import Any

import pytest

from gateway.core.events import Accepted, Delta, Event, Heartbeat, LogitsPart, Usage
from gateway.core.request import TokenIds
from gateway.errors import UpstreamProtocolError
from gateway.triton.dialects.chatglm import CHATGLM
from tests.gateway.triton.dialects.test_chatglm import CHATGLM3, generation, response, sampling_of

ACCEPTED = {"accepted": {"request_id": "r", "prompt_tokens": 3}}
USAGE = {"prompt_tokens": 3, "completion_tokens": 0}
END = response("", {"finish_reason": "length", "usage": USAGE, "queue_s": 0.5})
ASKED = generation(prompt=TokenIds((1, 2, 3)), max_tokens=0, logits=True)


def part(first: int, count: int, vocabulary: int = 2, **more: Any) -> Any:
    content = struct.pack(f"<{count * vocabulary}f", *range(count * vocabulary))
    return response(content, {"logits": {"first": first, "vocabulary": vocabulary}, **more})


def decoded(*responses: Any) -> list[Event]:
    answer = CHATGLM.decoder(ASKED, CHATGLM3)
    events = [event for each in responses for event in answer.decode(each)]
    answer.end()
    return events


def test_it_is_asked_for_by_its_key() -> None:
    asked = sampling_of(CHATGLM.request(ASKED, CHATGLM3, 5.0))
    assert (asked.logits, asked.max_tokens, asked.prompt_token_ids, asked.raw) == (True, 0, [1, 2, 3], True)


def test_parts_come_in_order() -> None:
    events = decoded(response(), response(meta=ACCEPTED), part(0, 1), response(), part(1, 2), END)
    assert events == [
        Accepted(prompt_tokens=3),
        Delta(tokens=0, logits=LogitsPart(0, 2, struct.pack("<2f", 0, 1))),
        Heartbeat(),
        Delta(tokens=0, logits=LogitsPart(1, 2, struct.pack("<4f", 0, 1, 2, 3))),
        Delta(
            tokens=0,
            finish_reason="length",
            usage=Usage(prompt_tokens=3, completion_tokens=0, queue_s=0.5),
        ),
    ]


FIRST = response(meta=ACCEPTED)
WRONG = {
    "no accepted": [part(0, 3)],
    "a gap": [FIRST, part(0, 1), part(2, 1)],
    "again": [FIRST, part(0, 1), part(0, 1)],
    "part of a token": [FIRST, response(b"\0" * 6, {"logits": {"first": 0, "vocabulary": 2}})],
    "none": [FIRST, response(b"", {"logits": {"first": 0, "vocabulary": 2}})],
    "no vocabulary": [FIRST, response(b"\0" * 8, {"logits": {"first": 0, "vocabulary": 0}})],
    "more": [FIRST, part(0, 3, tokens=1)],
    "too few": [FIRST, part(0, 2), END],
    "text": [FIRST, part(0, 3), response("a", {"tokens": 1})],
    "no usage": [FIRST, part(0, 3), response("", {"finish_reason": "length"})],
    "after the end": [FIRST, part(0, 3), END, END],
    "no end": [FIRST, part(0, 3)],
}


@pytest.mark.parametrize("case", WRONG)
def test_anything_else_is_an_error(case: str) -> None:
    with pytest.raises(UpstreamProtocolError):
        decoded(*WRONG[case])


def test_nobody_else_gets_them() -> None:
    answer = CHATGLM.decoder(generation(), CHATGLM3)
    answer.decode(FIRST)
    with pytest.raises(UpstreamProtocolError, match="not requested"):
        answer.decode(part(0, 1))
