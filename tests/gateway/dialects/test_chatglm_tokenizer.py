from dataclasses import replace
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from gateway.dialects.base import ModelReport
from gateway.dialects.chatglm import ChatGLMDialect
from gateway.dialects.chatglm_tokenizer import ChatGLMTokenizer
from gateway.dialects.registry import choose_tokenizer
from gateway.errors import InvalidRequestError, UpstreamProtocolError
from gateway.generation import (
    Conversation,
    Generation,
    Grammar,
    Message,
    NamedTool,
    PlainText,
    Tool,
    ToolOffer,
)
from gateway.generation import TokenIds as Ids
from gateway.tokenization import Tokenization, Tokens
from wire.history import decode_history
from wire.sampling import decode_sampling
from wire.strings import pack_strings, unpack_strings
from wire.tokenizing import Tokenizing, decode_tokenizing

TOKENIZER = ChatGLMTokenizer()
CHATGLM3 = ModelReport(heartbeat_age_s=0, chat_format="chatglm3", max_context=64)
CHATGLM2 = ModelReport(heartbeat_age_s=0, chat_format="chatglm2", max_context=64)
OFFER = ToolOffer(tools=(Tool(name="f", description=None, parameters={}),))
SPOKEN = (
    Message(role="system", content="s", field="messages.0"),
    Message(role="user", content="q", field="messages.1"),
)


def asked(prompt: Any, report: ModelReport = CHATGLM3, **changes: Any) -> Tokenizing:
    tokenization = Tokenization(request_id="r", model="m", prompt=prompt, deadline=0, **changes)
    request = TOKENIZER.request(tokenization, report)
    assert (request.model_name, request.id, list(request.inputs[0].shape)) == ("m-tokenizer", "r", [1])
    (document,) = unpack_strings(request.raw_input_contents[0])
    return decode_tokenizing(document)


def test_text_and_ids() -> None:
    assert asked(PlainText("a")) == Tokenizing(text="a", prefix=True)
    assert asked(PlainText(""), prefix=False, strings=True) == Tokenizing(text="", strings=True)
    assert asked(Ids((3, 4))) == Tokenizing(ids=[3, 4])


@pytest.mark.parametrize("offer", [None, OFFER])
def test_a_conversation_is_what_a_generation_sends(offer: ToolOffer | None) -> None:
    conversation = Conversation(SPOKEN, offer)
    generation = Generation(request_id="r", model="m", prompt=conversation, deadline=0)
    sent = ChatGLMDialect().request(generation, CHATGLM3, remaining_s=1)
    tensors = {
        tensor.name: unpack_strings(raw)[0]
        for tensor, raw in zip(sent.inputs, sent.raw_input_contents, strict=True)
    }
    *history, newest = asked(conversation).messages or []
    assert history == decode_history(tensors["history"])
    assert (newest.role, newest.content) == ("user", tensors["prompt"].decode())
    assert not asked(conversation, answer_next=False).add_generation_prompt


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
    request = ChatGLMDialect().request(generation, CHATGLM3, remaining_s=1)
    sampling: Any = decode_sampling(unpack_strings(request.raw_input_contents[2])[0])
    line = asked(conversation, grammar=grammar).answer_metadata
    assert line == sampling.answer_metadata
    text_alone = grammar is not None and offer is None
    assert (line is None) == (offer in (None, OFFER) and not text_alone)
    assert asked(conversation, grammar=grammar, answer_next=False).answer_metadata is None
    if offer is None:
        assert asked(conversation, CHATGLM2, grammar=grammar).answer_metadata is None


def test_what_the_format_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        asked(Conversation(SPOKEN, OFFER), CHATGLM2)


def response(**raw: bytes) -> service_pb2.ModelInferResponse:
    answer = service_pb2.ModelInferResponse()
    for name, contents in raw.items():
        answer.outputs.add(name=name)
        answer.raw_output_contents.append(contents)
    return answer


IDS = (7).to_bytes(8, "little") + (2**40).to_bytes(8, "little")


TEXT = Tokenization(request_id="r", model="m", prompt=PlainText("é"), deadline=0)
SHOWN = replace(TEXT, strings=True)
BACK = replace(TEXT, prompt=Ids((7,)))


def test_only_what_is_needed_is_asked_for() -> None:
    for tokenization, names in ((TEXT, ["input_ids"]), (SHOWN, ["input_ids", "tokens"]), (BACK, ["text"])):
        request = TOKENIZER.request(tokenization, CHATGLM3)
        assert [output.name for output in request.outputs] == names


def test_the_answer_is_read() -> None:
    assert TOKENIZER.read(BACK, response(text=pack_strings(["é".encode()]))) == Tokens(text="é")
    plain = TOKENIZER.read(TEXT, response(input_ids=IDS))
    assert (list(plain.ids), plain.strings) == ([7, 2**40], None)
    shown = TOKENIZER.read(SHOWN, response(input_ids=IDS, tokens=pack_strings([b"a", b"b"])))
    assert (list(shown.ids), list(shown.strings or ())) == ([7, 2**40], ["a", "b"])


@pytest.mark.parametrize(
    ("tokenization", "raw"),
    [
        (TEXT, {}),
        (TEXT, {"input_ids": IDS[:-1]}),
        (SHOWN, {"input_ids": IDS}),
        (BACK, {"text": b""}),
        (BACK, {"text": pack_strings([b"\xff"])}),
        (SHOWN, {"input_ids": IDS, "tokens": pack_strings([b"\xff"])}),
        (SHOWN, {"input_ids": IDS, "tokens": b"\x01"}),
    ],
)
def test_what_cannot_be_read_is_an_error(tokenization: Tokenization, raw: dict[str, bytes]) -> None:
    with pytest.raises(UpstreamProtocolError):
        list(TOKENIZER.read(tokenization, response(**raw)).strings or ())


def test_our_own_contract_has_a_tokenizer() -> None:
    assert isinstance(choose_tokenizer(ChatGLMDialect()), ChatGLMTokenizer)
    assert choose_tokenizer(object()) is None
