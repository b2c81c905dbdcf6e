import msgspec
import pytest

from wire.meta import (
    Accepted,
    Delivered,
    Logits,
    Meta,
    ProbeReport,
    PromptLogprob,
    Segment,
    Tokenized,
    TokenLogprob,
    TopLogprob,
    Usage,
    decode_meta,
    encode_meta,
)

FULL = Meta(
    accepted=Accepted(request_id="r", prompt_tokens=3, prompt_token_ids=[1, 2, 3]),
    index=2,
    tokens=1,
    token_ids=[7],
    logprobs=[TokenLogprob(7, "\\xe4", [0xE4], -0.5, [TopLogprob(8, "a", [97], -9999.0)])],
    prompt_logprobs=[
        PromptLogprob(5, "b", [98], None, []),
        PromptLogprob(6, "c", [99], -1.5, [TopLogprob(8, "a", [97], -0.5)], rank=3),
    ],
    logits=Logits(first=3, vocabulary=320),
    segments=[Segment(0, "assistant")],
    finish_reason="stop",
    stop_reason="END",
    usage=Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=2),
    queue_s=0.5,
    delivered=Delivered(deltas=2, frame=9),
    cancelled=False,
    probe=ProbeReport(
        heartbeat_age_s=0.1, running=1, waiting=0, kv_usage=0.5, format="chatglm3", max_context=512
    ),
    tokenized=Tokenized(ids=[1, 2], strings=["a", "b"]),
)


def test_every_field_comes_back() -> None:
    assert decode_meta(encode_meta(FULL)) == FULL
    said = msgspec.json.decode(encode_meta(FULL))
    assert set(said) == {field.name for field in msgspec.structs.fields(Meta)} - {"v"}


def test_a_rank_that_was_not_asked_for_is_left_out() -> None:
    """Clients of before there were any refuse it."""
    assert b"rank" not in encode_meta(Meta(prompt_logprobs=[PromptLogprob(5, "b", [98], -1.0, [])]))


def test_a_heartbeat_says_nothing() -> None:
    assert encode_meta(Meta()) == b"{}"
    assert decode_meta(b"{}") == Meta()


@pytest.mark.parametrize("reason", [5, "END", None])
def test_a_stop_reason_is_an_id_or_a_string(reason: int | str | None) -> None:
    assert decode_meta(encode_meta(Meta(stop_reason=reason))).stop_reason == reason


@pytest.mark.parametrize(
    ("document", "where"),
    [
        (b'{"v":2}', r"\$\.v"),
        (b'{"text":""}', "text"),
        (b'{"finish_reason":"length!"}', "finish_reason"),
        (b'{"segments":[{"at":0}]}', "role"),
        (b'{"segments":[{"at":0,"role":"assistant","id":1}]}', "id"),
        (b'{"usage":{"prompt_tokens":1}}', "completion_tokens"),
        (b'{"accepted":{"request_id":"r","prompt_tokens":"1"}}', "prompt_tokens"),
        (b'{"probe":{"running":1}}', "heartbeat_age_s"),
    ],
)
def test_another_document_is_refused_by_path(document: bytes, where: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=where):
        decode_meta(document)


def test_what_is_not_json_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_meta(b"{")


def test_what_is_not_utf_8_is_no_document() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_meta(b'{"to\xf8kens":1}')
