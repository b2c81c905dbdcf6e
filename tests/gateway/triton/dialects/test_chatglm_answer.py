"""Answers of several choices, and log-probabilities; the rest is what `test_chatglm.py` is about."""

import json
from typing import Any

import pytest
from msgspec.structs import replace
from tritonclient.grpc import service_pb2

from gateway.core.events import (
    Accepted,
    Delta,
    Heartbeat,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from gateway.core.request import PlainText
from gateway.errors import UpstreamProtocolError
from gateway.triton.dialects.chatglm import CHATGLM
from gateway.triton.dialects.chatglm_answer import ChatGLMAnswer
from tests.gateway.triton.dialects.test_chatglm import (
    ACCEPTED,
    CHATGLM3,
    END,
    FINAL,
    USAGE,
    decoded,
    generation,
    response,
)
from tests.gateway.triton.dialects.test_chatglm_tools import BERLIN, CALL, OPENED, asked, deltas


def test_choices_are_read_apart_and_end_one_by_one() -> None:
    events = decoded(
        response(),  # it is still being prepared
        response(meta=ACCEPTED),
        response("a ", {"tokens": 1}),
        response("x", {"tokens": 1, "index": 1}),
        response("b", {"tokens": 1}),
        response("", {"tokens": 1, "finish_reason": "length"}),
        response(),  # a heartbeat names no choice, though the first one is over
        response(" y", {"tokens": 1, "index": 1, "finish_reason": "stop", "usage": USAGE}),
        n=2,
    )
    usage = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2)
    assert events == [
        Accepted(prompt_tokens=7),
        Delta(pieces=("a",), tokens=1),
        Delta(pieces=("x",), tokens=1, index=1),
        Delta(pieces=(" b",), tokens=1),
        Delta(tokens=1, finish_reason="length"),
        Heartbeat(),
        Delta(pieces=(" y",), tokens=1, index=1, finish_reason="stop", usage=usage),
    ]


def test_tokens_that_are_told_of_again_count_once() -> None:
    """A server dies under an answer that is not streamed, of which another samples the same tokens."""
    answer = ChatGLMAnswer(generation(n=2, seed=1, resumable=True), CHATGLM3)
    first = [
        response(meta=ACCEPTED),
        response("", {"tokens": 1}),
        response("", {"tokens": 2}),
        response("", {"tokens": 2, "index": 1}),
        response("b", {"tokens": 1, "index": 1, "finish_reason": "stop"}),
    ]
    counts = [event for each in first for event in answer.decode(each)][1:]
    assert [each.tokens for each in counts if isinstance(each, Delta)] == [1, 2, 2, 1]
    assert [each.counts_only for each in counts if isinstance(each, Delta)] == [True] * 3 + [False]
    assert answer.resume() == ((), None)
    second = [
        response(meta=ACCEPTED),
        response("", {"tokens": 1}),
        response("", {"tokens": 4}),
        response("a", {"tokens": 1, "finish_reason": "stop", "usage": USAGE | {"completion_tokens": 6}}),
    ]
    rest = [event for each in second for event in answer.decode(each)]
    assert [each.tokens for each in rest if isinstance(each, Delta)] == [2, 1]
    assert isinstance(rest[-1], Delta)
    assert rest[-1].usage == Usage(prompt_tokens=7, completion_tokens=6 + 3, cached_tokens=2)


OF_TWO_CHOICES = {
    "one without an end": [FINAL],
    "usage before the last end": [FINAL, response("", END | {"index": 1})],
    "no usage at the last end": [
        response("", {"finish_reason": "stop"}),
        response("", {"finish_reason": "stop", "index": 1}),
    ],
    "text after an end": [response("", {"finish_reason": "stop"}), response("x", {"tokens": 1})],
    "an end twice": [response("", {"finish_reason": "stop"})] * 2,
    "a third": [response("x", {"tokens": 1, "index": 2})],
    "one before the first": [response("x", {"tokens": 1, "index": -1})],
}


@pytest.mark.parametrize("responses", OF_TWO_CHOICES.values(), ids=OF_TWO_CHOICES)
def test_two_choices_out_of_order_are_an_error(responses: list[service_pb2.ModelInferResponse]) -> None:
    with pytest.raises(UpstreamProtocolError):
        decoded(response(meta=ACCEPTED), *responses, n=2)


def test_each_choice_makes_its_own_calls() -> None:
    answer = CHATGLM.channels.decoder(replace(asked(), n=2), CHATGLM3)
    answer.decode(response(meta=ACCEPTED))
    opened = json.dumps({"segments": [OPENED]}).encode()
    events = answer.deltas(
        [(0, "\n ok", 2, (), None), (1, CALL, 9, (), None), (0, ".", 1, (), None), (1, "", 1, (), opened)]
    )
    assert [(event.index, event.text, event.calls) for event in events if isinstance(event, Delta)] == [
        (0, "ok.", ()),
        (1, "", ()),
        (1, "", (BERLIN,)),
    ]
    delivered = {"delivered": {"deltas": 2, "frame": 1}}
    first = answer.decode(response("", {"finish_reason": "stop", **delivered}))
    second = answer.decode(response("", END | {"index": 1, "tokens": 0, **delivered}))
    assert deltas(first + second) == [("", (), "stop"), ("", (), "tool_calls")]


def scored(*texts: str) -> list[dict[str, Any]]:
    return [
        {"id": 3, "token": each, "bytes": list(each.encode()), "logprob": -0.25, "top": []} for each in texts
    ]


def test_each_choice_lists_the_tokens_of_its_own_text() -> None:
    events = decoded(
        response(meta=ACCEPTED),
        response("\n He", {"tokens": 2, "logprobs": scored("\n", " He")}),
        response(" A", {"index": 1, "tokens": 1, "logprobs": scored(" A")}),
        response("y ", {"tokens": 1, "logprobs": scored("y "), "finish_reason": "stop"}),
        response("", END | {"index": 1, "logprobs": scored("STOP")}),
        logprobs=0,
        n=2,
    )
    listed = [
        (delta.index, delta.text, [each.utf8 for each in delta.logprobs or ()])
        for delta in events
        if isinstance(delta, Delta)
    ]
    assert listed == [(0, "He", [b"He"]), (1, "A", [b"A"]), (0, "y", [b"y"]), (1, "", [])]


def test_an_answer_that_continues_a_text_lists_every_token() -> None:
    """Who scores texts counts them."""
    (_, *events) = decoded(
        response(meta=ACCEPTED),
        response("", {"tokens": 2, "logprobs": scored("\n", "")}),
        response("\n no", END | {"logprobs": scored(" no", " more")}),
        prompt=PlainText("Do it"),
        logprobs=0,
    )
    listed = [each.utf8 for delta in events if isinstance(delta, Delta) for each in delta.logprobs or ()]
    assert listed == [b"\n", b"", b" no", b" more"]


def test_logprobs_are_carried_over() -> None:
    top = {"id": 4, "token": "\ufffd", "bytes": [0xE4], "logprob": -0.5}
    sampled = {"id": 3, "token": "x", "bytes": [120], "logprob": -0.25, "top": [top]}
    (_, delta) = decoded(
        response(meta=ACCEPTED),
        response("x", END | {"logprobs": [sampled]}),
        logprobs=1,
    )
    assert isinstance(delta, Delta)
    assert delta.logprobs == (
        TokenLogprob(
            id=3,
            token="x",
            utf8=b"x",
            logprob=-0.25,
            top=(TopLogprob(id=4, token="\ufffd", utf8=b"\xe4", logprob=-0.5),),
        ),
    )


@pytest.mark.parametrize("rank", [None, 2])
def test_what_is_told_of_a_prompt_is_carried_over_by_itself(rank: int | None) -> None:
    top = {"id": 4, "token": "y", "bytes": [121], "logprob": -0.5}
    first = {"id": 3, "token": "x", "bytes": [120], "logprob": None, "top": []}
    ranked = {} if rank is None else {"rank": rank}
    (_, delta, _) = decoded(
        response(meta={"accepted": {"request_id": "r", "prompt_tokens": 2}}),
        response("", {"prompt_logprobs": [first, first | {"logprob": -1.5, "top": [top]} | ranked]}),
        response("x", END),
        prompt_logprobs=1,
        prompt_ranks=rank is not None,
    )
    assert isinstance(delta, Delta)
    assert (delta.text, delta.tokens, delta.logprobs) == ("", 0, None)
    likely = TopLogprob(id=4, token="y", utf8=b"y", logprob=-0.5)
    assert delta.prompt_logprobs == (
        PromptLogprob(id=3, token="x", utf8=b"x", logprob=None, top=()),
        PromptLogprob(id=3, token="x", utf8=b"x", logprob=-1.5, top=(likely,), rank=rank),
    )


@pytest.mark.parametrize(
    ("asked", "logprob", "rank"), [(True, -1.5, None), (False, -1.5, 2), (True, None, 1)]
)
def test_ranks_that_are_missing_or_too_many_are_not_understood(
    asked: bool, logprob: float | None, rank: int | None
) -> None:
    told = {"id": 3, "token": "x", "bytes": [120], "logprob": logprob, "top": [], "rank": rank}
    with pytest.raises(UpstreamProtocolError, match="ranks"):
        decoded(
            response(meta=ACCEPTED),
            response("", {"prompt_logprobs": [told]}),
            prompt_logprobs=0,
            prompt_ranks=asked,
        )
