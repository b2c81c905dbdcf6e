from collections.abc import Callable

import msgspec
import pytest

from wire.history import decode_history
from wire.request import decode_request

Decode = Callable[[bytes], object]
DEEP = b"[" * 10_000 + b"]" * 10_000


@pytest.mark.parametrize(
    ("decode", "document"),
    [
        (decode_history, b'[{"role":"system","content":"","tools":[{"x":' + DEEP + b"}]}]"),
        (decode_request, b'{"stop":' + DEEP + b"}"),
        (decode_request, b'{"cancel":' + DEEP + b"}"),
        (decode_request, b'{"detokenize":' + DEEP + b"}"),
    ],
)
def test_nesting_without_end_is_the_documents_fault(decode: Decode, document: bytes) -> None:
    with pytest.raises(msgspec.ValidationError, match="nested too deeply"):
        decode(document)


@pytest.mark.parametrize(
    ("decode", "document"),
    [
        (decode_history, b'[{"role":"user","content":"\xff"}]'),
        (decode_request, b'{"request_id":"\xff"}'),
        (decode_request, b'{"tokenize":"\xff"}'),
    ],
)
def test_bytes_that_are_no_text_are_the_documents_fault(decode: Decode, document: bytes) -> None:
    with pytest.raises(msgspec.DecodeError, match="utf-8"):
        decode(document)


@pytest.mark.parametrize(
    ("decode", "document"),
    [
        (decode_request, b'{"deadline_ms":' + b"9" * 400 + b"}"),
        (decode_request, b'{"prompt_token_ids":[9223372036854775808]}'),
        (decode_request, b'{"detokenize":[9223372036854775808]}'),
    ],
)
def test_numbers_that_fit_no_tensor_are_the_documents_fault(decode: Decode, document: bytes) -> None:
    with pytest.raises(msgspec.ValidationError, match="<="):
        decode(document)
