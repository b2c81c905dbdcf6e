import msgspec
import pytest

from wire.history import decode_history
from wire.sampling import decode_sampling
from wire.tokenizing import decode_tokenizing

DEEP = b"[" * 10_000 + b"]" * 10_000


@pytest.mark.parametrize(
    ("decode", "document"),
    [
        (decode_history, b'[{"role":"system","content":"","tools":[{"x":' + DEEP + b"}]}]"),
        (decode_sampling, b'{"stop":' + DEEP + b"}"),
        (decode_sampling, b'{"cancel":' + DEEP + b"}"),
        (
            decode_tokenizing,
            b'{"messages":[{"role":"system","content":"","tools":[{"x":' + DEEP + b"}]}]}",
        ),
    ],
)
def test_nesting_without_end_is_the_documents_fault(decode: object, document: bytes) -> None:
    with pytest.raises(msgspec.ValidationError, match="nested too deeply"):
        decode(document)


@pytest.mark.parametrize(
    ("decode", "document"),
    [
        (decode_history, b'[{"role":"user","content":"\xff"}]'),
        (decode_sampling, b'{"request_id":"\xff"}'),
        (decode_tokenizing, b'{"text":"\xff"}'),
    ],
)
def test_bytes_that_are_no_text_are_the_documents_fault(decode: object, document: bytes) -> None:
    with pytest.raises(msgspec.DecodeError, match="utf-8"):
        decode(document)


@pytest.mark.parametrize(
    ("decode", "document"),
    [
        (decode_sampling, b'{"deadline_ms":' + b"9" * 400 + b"}"),
        (decode_sampling, b'{"prompt_token_ids":[9223372036854775808]}'),
        (decode_tokenizing, b'{"ids":[9223372036854775808]}'),
    ],
)
def test_numbers_that_fit_no_tensor_are_the_documents_fault(decode: object, document: bytes) -> None:
    with pytest.raises(msgspec.ValidationError, match="<="):
        decode(document)
