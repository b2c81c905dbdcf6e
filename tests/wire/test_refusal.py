import pytest

from wire.refusal import RefusalCode, parse_refusal, refusal_text


@pytest.mark.parametrize("code", RefusalCode)
def test_every_refusal_comes_back_out_of_what_triton_makes_of_it(code: RefusalCode) -> None:
    text = refusal_text(code, "512 requests\nare waiting: try later")
    assert text.startswith(f"tritongate:{code.value}: ")
    assert parse_refusal(text) == (code, "512 requests\nare waiting: try later")
    assert parse_refusal("in ensemble 'm', " + text) == (code, "512 requests\nare waiting: try later")


def test_a_message_that_quotes_a_client_at_length_still_fits_a_grpc_status() -> None:
    text = refusal_text(RefusalCode.INVALID_REQUEST, "unknown field `" + "键" * 100_000)
    assert len(text.encode()) * len("%XX") < 16 * 1024
    parsed = parse_refusal(text)
    assert parsed is not None
    assert parsed[1].startswith("unknown field `键")


@pytest.mark.parametrize(
    "text", ["", "Exceeds maximum queue size", "tritongate:unheard_of: x", "tritongate: queue_full: x"]
)
def test_other_texts_are_no_refusals(text: str) -> None:
    assert parse_refusal(text) is None
