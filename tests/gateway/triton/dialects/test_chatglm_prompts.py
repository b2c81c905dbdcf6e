"""The three kinds of prompt, and how their answers are shown."""

import pytest

from gateway.core.events import Accepted
from gateway.core.request import (
    Conversation,
    Grammar,
    Message,
    PlainText,
    TokenIds,
    Turns,
)
from gateway.errors import InvalidRequestError, UpstreamProtocolError
from gateway.triton.dialects.base import ModelReport
from tests.gateway.triton.dialects.test_chatglm import (
    ACCEPTED,
    CHATGLM2,
    CHATGLM3,
    DIALECT,
    END,
    generation,
    response,
    sampling_of,
    tensors,
)
from wire.grammar import Grammar as WireGrammar
from wire.history import Turn, decode_history
from wire.meta import Segment


def test_what_the_models_chat_format_cannot_hold_is_refused() -> None:
    messages = (Message(role="user", content="a"), Message(role="assistant", content="b"))
    with pytest.raises(InvalidRequestError):
        DIALECT.request(generation(prompt=Conversation(messages)), CHATGLM2, 1)
    assert DIALECT.request(generation(prompt=Conversation(messages)), CHATGLM3, 1)


def test_plain_text_and_token_ids_go_outside_the_chat_format() -> None:
    text = DIALECT.request(generation(prompt=PlainText(" 你")), CHATGLM3, 1)
    assert (tensors(text)["prompt"].decode(), decode_history(tensors(text)["history"])) == (" 你", [])
    assert (sampling_of(text).raw, sampling_of(text).prompt_token_ids) == (True, None)
    ids = DIALECT.request(generation(prompt=TokenIds((5, 6))), CHATGLM2, 1)
    assert (tensors(ids)["prompt"], decode_history(tensors(ids)["history"])) == (b"", [])
    assert (sampling_of(ids).raw, sampling_of(ids).prompt_token_ids) == (True, [5, 6])
    assert not sampling_of(DIALECT.request(generation(), CHATGLM3, 1)).raw


@pytest.mark.parametrize("prompt", [PlainText("a"), TokenIds((1,))])
def test_their_answer_is_text_as_it_stands(prompt: PlainText | TokenIds) -> None:
    answer = DIALECT.decoder(generation(prompt=prompt), CHATGLM3)
    accepted = {"accepted": ACCEPTED["accepted"] | {"prompt_token_ids": [5, 6]}}
    events = [
        *answer.decode(response(meta=accepted)),
        *answer.decode(response(" \n", {"tokens": 1, "token_ids": [7]})),
        *answer.decode(response("a ", END | {"token_ids": [2]})),
    ]
    assert events[0] == Accepted(prompt_tokens=7, prompt_token_ids=((5, 6),))
    assert [(event.text, event.token_ids) for event in events[1:]] == [(" \n", (7,)), ("a ", (2,))]


@pytest.mark.parametrize("prompt", [Conversation((Message(role="user", content="a"),)), PlainText("a")])
def test_an_answer_held_to_a_grammar_is_text_as_it_stands(prompt: Conversation | PlainText) -> None:
    asked = generation(prompt=prompt, grammar=Grammar(kind="regex", text=" a+", field="f"))
    request = DIALECT.request(asked, CHATGLM3, 1)
    assert sampling_of(request).grammar == WireGrammar("regex", " a+")
    answer = DIALECT.decoder(asked, CHATGLM3)
    accepted, *rest = [
        *answer.decode(response(meta=ACCEPTED)),
        *answer.decode(response(" [[训练时间]]", {"tokens": 1})),
        *answer.decode(response(" ", END)),
    ]
    assert isinstance(accepted, Accepted)
    assert [event.text for event in rest] == [" [[训练时间]]", " "]


@pytest.mark.parametrize(
    ("yields", "limit", "sent"),
    [(False, None, None), (True, None, 512), (False, 40, 40), (True, 40, 40), (True, 600, 512)],
)
def test_a_bound_that_yields_to_the_context_comes_with_one_on_all_tokens(
    *, yields: bool, limit: int | None, sent: int | None
) -> None:
    asked = generation(max_tokens=11, max_tokens_yields=yields, max_total_tokens=limit)
    sampling = sampling_of(DIALECT.request(asked, CHATGLM3, 1))
    assert (sampling.max_tokens, sampling.max_total_tokens) == (11, sent)


@pytest.mark.parametrize("report", [CHATGLM2, CHATGLM3])
def test_turns_go_to_the_model_as_they_are_and_its_answer_comes_raw(report: ModelReport) -> None:
    turns = (Turn("system", "s", tools=[{"name": "f"}]), Turn("assistant", "c", metadata="f"))
    asked = generation(prompt=Turns(turns, "q", "observation"))
    request = DIALECT.request(asked, report, 1)
    assert tensors(request)["prompt"] == b"q"
    assert decode_history(tensors(request)["history"]) == list(turns)
    sampling = sampling_of(request)
    assert (sampling.role, sampling.raw, sampling.answer_metadata) == ("observation", False, None)
    answer = DIALECT.decoder(asked, report)
    answer.decode(response(meta=ACCEPTED))
    segment = {"at": 5, "role": "assistant"}
    (delta,) = answer.decode(response(" f\n{}\n [[训练时间]] ", END | {"segments": [segment]}))
    assert delta.text == " f\n{}\n [[训练时间]] "
    assert delta.segments == (Segment(5, "assistant"),)
    assert delta.finish_reason == "stop"


def test_a_segment_outside_a_raw_answers_text_is_an_error() -> None:
    answer = DIALECT.decoder(generation(prompt=Turns((), "q")), CHATGLM3)
    answer.decode(response(meta=ACCEPTED))
    with pytest.raises(UpstreamProtocolError):
        answer.decode(response("x", END | {"segments": [{"at": 2, "role": "assistant"}]}))
