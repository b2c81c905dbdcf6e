from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gateway.core.request import (
    Conversation,
    Generation,
    Grammar,
    Message,
    NamedTool,
    PlainText,
    Tool,
    ToolOffer,
)
from gateway.core.request import TokenIds as Ids
from gateway.core.upstream import Tokenization, Tokens
from gateway.errors import InvalidRequestError, UpstreamProtocolError
from gateway.triton.dialects.base import ModelReport
from gateway.triton.dialects.chatglm import CHATGLM
from tests.gateway.triton.dialects.test_chatglm import response, tensors
from wire.request import Detokenize, Tokenize, decode_request

TOKENIZER = CHATGLM.tokenizer
CHATGLM3 = ModelReport(heartbeat_age_s=0, chat_format="chatglm3", max_context=64)
CHATGLM2 = ModelReport(heartbeat_age_s=0, chat_format="chatglm2", max_context=64)
OFFER = ToolOffer(tools=(Tool(name="f", description=None, parameters={}),))
SPOKEN = (
    Message(role="system", content="s", field="messages.0"),
    Message(role="user", content="q", field="messages.1"),
)


def tokenized(prompt: Any, report: ModelReport = CHATGLM3, **changes: Any) -> dict[str, bytes]:
    """The tensors of a tokenization."""
    tokenization = Tokenization(request_id="r", model="m", prompt=prompt, deadline=0, **changes)
    request = TOKENIZER.request(tokenization, report, 2)
    assert (request.model_name, request.id) == ("m", "r")
    return tensors(request)


def document(prompt: Any, report: ModelReport = CHATGLM3, **changes: Any) -> Any:
    return decode_request(tokenized(prompt, report, **changes)["sampling"])


def test_text_and_ids() -> None:
    sent = tokenized(PlainText("a"))
    assert (sent["prompt"], sent["history"]) == (b"a", b"")
    assert document(PlainText("a")) == Tokenize(tokenize="text", prefix=True, deadline_ms=2000)
    assert document(PlainText(""), prefix=False, strings=True) == Tokenize(
        tokenize="text", strings=True, deadline_ms=2000
    )
    assert document(Ids((3, 4))) == Detokenize(detokenize=[3, 4], deadline_ms=2000)
    assert tokenized(Ids((3, 4)))["prompt"] == b""


@pytest.mark.parametrize("offer", [None, OFFER])
def test_a_conversation_is_what_a_generation_sends(offer: ToolOffer | None) -> None:
    conversation = Conversation(SPOKEN, offer)
    generation = Generation(request_id="r", model="m", prompt=conversation, deadline=0)
    sent = tensors(CHATGLM.request(generation, CHATGLM3, 1))
    counted = tokenized(conversation)
    assert [counted[name] for name in ("prompt", "history")] == [sent[name] for name in ("prompt", "history")]
    assert (document(conversation).tokenize, document(conversation).role) == ("conversation", "user")
    assert not document(conversation, answer_next=False).add_generation_prompt


CHOICES = [
    (None, None),
    (OFFER, None),
    *((replace(OFFER, choice=choice), None) for choice in ("none", "required", NamedTool("f"))),
    (None, Grammar(kind="json_object", field="response_format")),
    (OFFER, Grammar(kind="json_object", field="response_format")),
    (replace(OFFER, choice="none"), Grammar(kind="regex", text="a", field="structured_outputs.regex")),
]


@pytest.mark.parametrize(("offer", "grammar"), CHOICES)
def test_the_answers_first_line_is_the_one_that_a_generation_sends(
    offer: ToolOffer | None, grammar: Grammar | None
) -> None:
    conversation = Conversation(SPOKEN, offer)
    generation = Generation(request_id="r", model="m", prompt=conversation, deadline=0, grammar=grammar)
    request = CHATGLM.request(generation, CHATGLM3, 1)
    sampling: Any = decode_request(tensors(request)["sampling"])
    line = document(conversation, grammar=grammar).answer_metadata
    assert line == sampling.answer_metadata
    text_alone = grammar is not None and offer is None
    assert (line is None) == (offer in (None, OFFER) and not text_alone)
    assert document(conversation, grammar=grammar, answer_next=False).answer_metadata is None
    if offer is None:
        assert document(conversation, CHATGLM2, grammar=grammar).answer_metadata is None


def test_what_the_format_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        document(Conversation(SPOKEN, OFFER), CHATGLM2)


TEXT = Tokenization(request_id="r", model="m", prompt=PlainText("é"), deadline=0)
SHOWN = msgspec.structs.replace(TEXT, strings=True)
BACK = msgspec.structs.replace(TEXT, prompt=Ids((7,)))


def test_the_answer_is_read() -> None:
    assert TOKENIZER.read(BACK, [response("é", {"tokenized": {}})]) == Tokens(text="é")
    plain = TOKENIZER.read(TEXT, [response("", {"tokenized": {"ids": [7, 2**40]}})])
    assert (list(plain.ids), plain.strings) == ([7, 2**40], None)
    both = {"ids": [7, 2**40], "strings": ["a", "b"]}
    shown = TOKENIZER.read(SHOWN, [response("", {"tokenized": both})])
    assert (list(shown.ids), shown.strings) == ([7, 2**40], ["a", "b"])


@pytest.mark.parametrize(
    ("tokenization", "responses"),
    [
        (TEXT, []),
        (TEXT, [response("", {"tokenized": {"ids": [7]}})] * 2),
        (TEXT, [response()]),
        (TEXT, [response("", {"tokenized": {}})]),
        (TEXT, [response("", {"tokenized": {"ids": [7], "strings": ["a"]}})]),
        (TEXT, [response("", {"tokenized": {"ids": ["7"]}})]),
        (SHOWN, [response("", {"tokenized": {"ids": [7]}})]),
        (SHOWN, [response("", {"tokenized": {"ids": [7], "strings": []}})]),
        (BACK, [response(b"\xff", {"tokenized": {}})]),
        (BACK, [response("x")]),
    ],
)
def test_what_cannot_be_read_is_an_error(tokenization: Tokenization, responses: list[Any]) -> None:
    with pytest.raises(UpstreamProtocolError):
        TOKENIZER.read(tokenization, responses)
