import json
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from gateway.core.events import (
    Accepted,
    Delta,
    Event,
    Heartbeat,
    Usage,
)
from gateway.core.request import Conversation, Generation, Message
from gateway.errors import UpstreamProtocolError
from gateway.triton.dialects.base import ModelReport
from gateway.triton.dialects.chatglm import CHATGLM
from wire.history import Turn, decode_history
from wire.request import Generation as WireGeneration
from wire.request import Probe, decode_request, traced_id
from wire.strings import pack_strings, unpack_strings

DIALECT = CHATGLM
CHATGLM3 = ModelReport(heartbeat_age_s=0, chat_format="chatglm3", max_context=512)
CHATGLM2 = ModelReport(heartbeat_age_s=0, chat_format="chatglm2", max_context=512)

ACCEPTED = {"accepted": {"request_id": "r", "prompt_tokens": 7}}
PROBE = {
    "heartbeat_age_s": 0.5,
    "running": 1,
    "waiting": 2,
    "kv_usage": 0.25,
    "format": "chatglm2",
    "max_context": 99,
}
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 2}
END = {"tokens": 1, "finish_reason": "stop", "usage": USAGE, "queue_s": 0.25}


def response(text: str | bytes = "", meta: Any = None, *, order: int = 1) -> service_pb2.ModelInferResponse:
    built = service_pb2.ModelInferResponse()
    raw_text = text if isinstance(text, bytes) else text.encode()
    document = meta if isinstance(meta, bytes) else json.dumps(meta or {}).encode()
    for name, value in [("response", raw_text), ("meta", document)][::order]:
        built.outputs.add(name=name, datatype="BYTES", shape=(1, 1))
        built.raw_output_contents.append(pack_strings([value]))
    return built


def decoded(*responses: service_pb2.ModelInferResponse, **asked: Any) -> list[Event]:
    answer = DIALECT.decoder(generation(**asked), CHATGLM3)
    events = [event for response in responses for event in answer.decode(response)]
    answer.end()
    return events


def generation(**changes: Any) -> Generation:
    fields: dict[str, Any] = {
        "request_id": "req-1",
        "model": "m",
        "prompt": Conversation((Message(role="user", content="hi"),)),
        "deadline": 0.0,
    }
    return Generation(**(fields | changes))


def tensors(request: service_pb2.ModelInferRequest) -> dict[str, bytes]:
    assert all(tensor.datatype == "BYTES" and list(tensor.shape) == [1, 1] for tensor in request.inputs)
    return {
        tensor.name: unpack_strings(raw)[0]
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
    }


def sampling_of(request: service_pb2.ModelInferRequest) -> WireGeneration:
    document = decode_request(tensors(request)["sampling"])
    assert isinstance(document, WireGeneration)
    return document


def test_a_conversation_becomes_the_three_tensors() -> None:
    messages = (
        Message(role="system", content="be kind"),
        Message(role="user", content="你好"),
        Message(role="assistant", content="hello"),
        Message(role="user", content="🙂"),
    )
    request = DIALECT.request(generation(prompt=Conversation(messages)), CHATGLM3, 9.5)
    assert request.model_name == "m"
    assert request.id == "req-1"
    assert not request.parameters, "entries have no priorities"
    inputs = tensors(request)
    assert list(inputs) == ["prompt", "history", "sampling"]
    assert inputs["prompt"].decode() == "🙂"
    assert decode_history(inputs["history"]) == [
        Turn("system", "be kind"),
        Turn("user", "你好"),
        Turn("assistant", "hello"),
    ]
    assert sampling_of(request).deadline_ms == 9500


def test_every_field_of_a_generation_reaches_the_model() -> None:
    fields: dict[str, Any] = {
        "n": 3,
        "length_penalty": 2.5,
        "early_stopping": True,
        "max_tokens": 11,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 40,
        "min_p": 0.0625,
        "repetition_penalty": 1.25,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
        "seed": -9,
        "stop_token_ids": [1, 2],
        "stop": ["a", "b"],
        "logit_bias": {5: -1.5},
        "allowed_token_ids": [5, 6],
        "bad_words": ["c"],
        "truncate_prompt_tokens": 9,
        "logprobs": 3,
        "prompt_logprobs": 4,
        **dict.fromkeys(("ignore_eos", "include_stop", "show_special", "echo", "prompt_ranks"), True),
        "return_token_ids": True,
        "max_total_tokens": 40,
        "priority": -4,
    }
    sent = sampling_of(DIALECT.request(generation(**fields), CHATGLM3, 1))
    for name, value in fields.items():
        assert getattr(sent, name) == value, name
    assert sent.request_id is not None
    assert traced_id(sent.request_id) == "req-1"
    assert sampling_of(DIALECT.request(generation(beam_width=5), CHATGLM3, 1)).beam_width == 5
    untouched = set(Generation.__struct_fields__) - set(fields) - {"beam_width"}
    # The last two are asked about by themselves (`test_chatglm_prompts`).
    about_itself = {"request_id", "model", "prompt", "prompt_field", "deadline"}
    # A channel says whether it streams and can be resumed, and adapters are refused before. Logits come alone
    # (`test_chatglm_logits`).
    by_channel = {"stream", "resumable", "generated"}
    others = {"adapter", "grammar", "logits", "max_tokens_yields", "public_name"}
    assert untouched == about_itself | by_channel | others


def test_a_generation_that_asks_for_nothing_sends_the_defaults() -> None:
    request = DIALECT.request(generation(), CHATGLM3, 0.0001)
    name = sampling_of(request).request_id
    assert sampling_of(request) == WireGeneration(request_id=name, deadline_ms=1)


def test_a_streamed_answer_becomes_events() -> None:
    assert decoded(
        response(meta=ACCEPTED),
        response(),
        response("Hel", {"tokens": 1}),
        response("", {"tokens": 1}),
        response("lo", {"tokens": 1, "finish_reason": "length", "usage": USAGE}),
    ) == [
        Accepted(prompt_tokens=7),
        Heartbeat(),
        Delta(pieces=("Hel",), tokens=1),
        Delta(tokens=1),
        Delta(
            pieces=("lo",),
            tokens=1,
            finish_reason="length",
            usage=Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2),
        ),
    ]


def test_an_answer_in_one_response_is_one_delta() -> None:
    events = decoded(
        response(meta=ACCEPTED),
        response("whole", END),
    )
    assert [event.text for event in events if isinstance(event, Delta)] == ["whole"]


def test_text_that_was_held_back_comes_with_the_end() -> None:
    events = decoded(
        response(meta=ACCEPTED),
        response("a [[训练", {"tokens": 2}),
        response("", END),
    )
    assert [event.text for event in events if isinstance(event, Delta)] == ["a ", "[[训练"]


def test_segments_are_text_of_their_own() -> None:
    (_, delta) = decoded(
        response(meta=ACCEPTED),
        response("onetwo", END | {"segments": [{"at": 3, "role": "assistant"}]}),
    )
    assert isinstance(delta, Delta)
    assert delta.text == "one\ntwo"


def test_outputs_are_found_by_name_not_by_place() -> None:
    assert decoded(
        response(meta=ACCEPTED, order=-1),
        response("x", END, order=-1),
    )


def without_meta() -> service_pb2.ModelInferResponse:
    built = response("x")
    del built.outputs[1]
    return built


def with_raw_text(raw: bytes) -> service_pb2.ModelInferResponse:
    built = response()
    built.raw_output_contents[0] = raw
    return built


FINAL = response("", END)
SEGMENT = {"at": 9, "role": "assistant"}
LOGPROB = {"id": 1, "token": "x", "bytes": [256], "logprob": 0.0, "top": []}

OUT_OF_ORDER = {
    "nothing at all": [],
    "no final": [response(meta=ACCEPTED)],
    "no accepted": [response("x", {"tokens": 1})],
    "heartbeats and no more": [response(), response()],
    "final without accepted": [FINAL],
    "text with accepted": [response("x", ACCEPTED)],
    "tokens with accepted": [response(meta=ACCEPTED | {"tokens": 1})],
    "accepted twice": [response(meta=ACCEPTED), response(meta=ACCEPTED)],
    "final twice": [response(meta=ACCEPTED), FINAL, FINAL],
    "text after the final": [response(meta=ACCEPTED), FINAL, response("x")],
}

NOT_UNDERSTOOD = {
    "a finish reason without usage": response("", {"finish_reason": "stop"}),
    "usage before the end": response("", {"usage": USAGE}),
    "another choice": response("x", {"index": 1}),
    "a cancel's answer": response("", {"cancelled": True}),
    "a probe's answer": response("", {"probe": PROBE}),
    "a tokenization's answer": response("", {"tokenized": {"ids": [1]}}),
    "an unknown key": response("", {"surprise": 1}),
    "another version": response("", {"v": 2}),
    "not JSON": response("", b"{"),
    "empty meta": response("", b""),
    "not UTF-8": response(b"\xe4\xbd"),
    "an output missing": without_meta(),
    "two strings": with_raw_text(pack_strings([b"x", b"y"])),
    "a cut tensor": with_raw_text(b"\x09\x00"),
    "a segment outside the text": response("x", {"segments": [SEGMENT]}),
    "a byte of 256": response("x", {"logprobs": [LOGPROB]}),
}


@pytest.mark.parametrize("responses", OUT_OF_ORDER.values(), ids=OUT_OF_ORDER)
def test_an_answer_out_of_order_is_an_error(responses: list[service_pb2.ModelInferResponse]) -> None:
    with pytest.raises(UpstreamProtocolError):
        decoded(*responses)


@pytest.mark.parametrize("broken", NOT_UNDERSTOOD.values(), ids=NOT_UNDERSTOOD)
def test_a_response_that_is_not_in_the_contract_is_an_error(broken: service_pb2.ModelInferResponse) -> None:
    answer = DIALECT.decoder(generation(logprobs=0), CHATGLM3)
    answer.decode(response(meta=ACCEPTED))
    with pytest.raises(UpstreamProtocolError):
        answer.decode(broken)


def test_a_probe_sends_all_three_inputs() -> None:
    request = DIALECT.probe.request("m")
    assert request.model_name == "m"
    assert not request.parameters
    inputs = tensors(request)
    assert list(inputs) == ["prompt", "history", "sampling"]
    assert isinstance(decode_request(inputs["sampling"]), Probe)


def test_a_probes_report_is_read() -> None:
    assert DIALECT.probe.read([response("", {"probe": PROBE})]) == ModelReport(
        heartbeat_age_s=0.5, open=3, waiting=2, kv_usage=0.25, chat_format="chatglm2", max_context=99
    )


@pytest.mark.parametrize(
    "responses",
    [
        pytest.param([], id="none"),
        pytest.param([response("", {"probe": PROBE})] * 2, id="two"),
        pytest.param([response()], id="no report"),
        pytest.param([response("", {"probe": PROBE | {"format": "glm9"}})], id="an unknown chat format"),
        pytest.param([response("", {"probe": PROBE | {"more": 1}})], id="an unknown key"),
    ],
)
def test_a_probes_answer_that_says_something_else_is_an_error(
    responses: list[service_pb2.ModelInferResponse],
) -> None:
    with pytest.raises(UpstreamProtocolError):
        DIALECT.probe.read(responses)
