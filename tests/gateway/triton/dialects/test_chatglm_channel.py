from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from gateway.core.events import Delta
from gateway.core.request import (
    Conversation,
    Generation,
    Message,
    PlainText,
)
from gateway.errors import UpstreamProtocolError
from gateway.triton.dialects.base import ModelReport
from gateway.triton.dialects.chatglm import CHATGLM
from tests.gateway.triton.dialects.test_chatglm import CHATGLM3
from wire.channel import Frame, encode_frame
from wire.meta import Delivered, Meta, Usage, encode_meta
from wire.request import ChannelStream, OpenChannel, decode_request
from wire.strings import pack_strings, unpack_strings

DIALECT = CHATGLM
REPORT = ModelReport(heartbeat_age_s=0, chat_format="chatglm3", max_context=512)
END = Meta(
    tokens=1,
    finish_reason="stop",
    usage=Usage(prompt_tokens=1, completion_tokens=3),
    delivered=Delivered(deltas=2, frame=9),
)


def response(text: str, document: bytes) -> service_pb2.ModelInferResponse:
    built = service_pb2.ModelInferResponse()
    for name, value in (("response", text.encode()), ("meta", document)):
        built.outputs.add(name=name, datatype="BYTES", shape=(1, 1))
        built.raw_output_contents.append(pack_strings([value]))
    return built


def generation(**changes: Any) -> Generation:
    fields: dict[str, Any] = {
        "request_id": "req-1",
        "model": "m",
        "prompt": Conversation((Message(role="user", content="hi"),)),
        "deadline": 0.0,
        "stream": True,
    }
    return Generation(**(fields | changes))


def sampling_of(request: service_pb2.ModelInferRequest) -> Any:
    return decode_request(unpack_strings(request.raw_input_contents[2])[0])


def test_a_channel_is_opened_by_a_request_of_its_own() -> None:
    request = DIALECT.channels.open("m", "c")
    assert request.model_name == "m"
    assert [tensor.name for tensor in request.inputs] == ["prompt", "history", "sampling"]
    assert not request.parameters
    assert sampling_of(request) == OpenChannel("c")


def test_a_generation_names_its_channel_and_is_otherwise_what_it_is_without() -> None:
    channel = ChannelStream(id="c", stream=4)
    request = DIALECT.channels.request(generation(seed=3), REPORT, 2, channel)
    sampling = sampling_of(request)
    assert sampling.channel == channel
    assert (sampling.seed, sampling.deadline_ms) == (3, 2000)


def test_a_frame_is_read() -> None:
    frame = Frame(frame=3, streams=[1], tokens=[1], texts=["a"])
    assert DIALECT.channels.read_frame(response("", encode_frame(frame))) == frame


@pytest.mark.parametrize(
    "broken",
    [
        service_pb2.ModelInferResponse(),
        response("", b"{}"),
        response("", b'{"frame":1,"streams":[1]}'),
        response("", encode_meta(Meta(tokens=1))),
    ],
)
def test_what_is_no_frame_is_a_protocol_error(broken: service_pb2.ModelInferResponse) -> None:
    with pytest.raises(UpstreamProtocolError):
        DIALECT.channels.read_frame(broken)


def test_deltas_are_joined_where_they_are_text_alone() -> None:
    decoder = DIALECT.channels.decoder(generation(), CHATGLM3)
    details = encode_meta(Meta(token_ids=[7]))
    events = decoder.deltas(
        [
            (0, "a", 1, (), None),
            (0, "b", 2, (), None),
            (0, "c", 1, (), details),
            (0, "d", 1, (), None),
            (0, " ", 1, (), None),
        ]
    )
    assert events == [
        Delta(pieces=("ab",), tokens=3),
        Delta(pieces=("c",), tokens=1, token_ids=(7,)),
        Delta(pieces=("d",), tokens=2),  # a blank may turn out to be the answer's end
    ]
    assert decoder.deltas([]) == []


def test_deltas_of_several_choices_are_joined_choice_by_choice() -> None:
    decoder = DIALECT.channels.decoder(generation(n=3), CHATGLM3)
    details = encode_meta(Meta(token_ids=[7]))
    assert decoder.deltas(
        [
            (2, "x", 1, (), None),
            (0, "a", 1, (), None),
            (2, "y", 1, (), None),
            (1, "m", 1, (), details),
            (0, "b", 1, (), None),
        ]
    ) == [
        Delta(pieces=("ab",), tokens=2),
        Delta(pieces=("m",), tokens=1, index=1, token_ids=(7,)),
        Delta(pieces=("xy",), tokens=2, index=2),
    ]
    with pytest.raises(UpstreamProtocolError):
        decoder.deltas([(3, "z", 1, (), None)])


@pytest.mark.parametrize(("tokens", "ids"), [(2, [7]), (1, []), (1, [7, 8])])
def test_what_is_resumable_has_the_ids_of_all_tokens(tokens: int, ids: list[int]) -> None:
    decoder = DIALECT.channels.decoder(generation(resumable=True, n=2), CHATGLM3)
    decoder.deltas([(1, "a", 1, [5], None)])
    with pytest.raises(UpstreamProtocolError, match=f"{len(ids)} ids of {tokens} tokens of choice 1"):
        decoder.deltas([(0, "b", 1, [6], None), (1, "c", tokens, ids, None)])


def test_a_continued_text_is_shown_as_it_is() -> None:
    decoder = DIALECT.channels.decoder(generation(prompt=PlainText("x")), CHATGLM3)
    assert decoder.deltas([(0, " a ", 1, (), None)]) == [Delta(pieces=(" a ",), tokens=1)]


def test_the_last_response_says_what_was_delivered() -> None:
    decoder = DIALECT.channels.decoder(generation(), CHATGLM3)
    assert decoder.delivered(response("x", encode_meta(END))) == (0, Delivered(deltas=2, frame=9))
    assert decoder.delivered(response("", encode_meta(Meta()))) is None


SCORED = Meta(prompt_logprobs=[])


@pytest.mark.parametrize(
    "document", [b"[", encode_meta(END), encode_meta(Meta(index=1)), encode_meta(SCORED)]
)
def test_what_does_not_belong_to_a_delta_is_a_protocol_error(document: bytes) -> None:
    with pytest.raises(UpstreamProtocolError):
        DIALECT.channels.decoder(generation(), CHATGLM3).deltas([(0, "x", 1, (), document)])
