import msgspec
import pytest

from wire.history import decode_history
from wire.tokenizing import decode_tokenizing

DEEP = b"[" * 10_000 + b"]" * 10_000


@pytest.mark.parametrize(
    ("decode", "document"),
    [
        (decode_history, b'[{"role":"system","content":"","tools":[{"x":' + DEEP + b"}]}]"),
        (
            decode_tokenizing,
            b'{"messages":[{"role":"system","content":"","tools":[{"x":' + DEEP + b"}]}]}",
        ),
    ],
)
def test_nesting_without_end_is_the_documents_fault(decode: object, document: bytes) -> None:
    with pytest.raises(msgspec.ValidationError, match="nested too deeply"):
        decode(document)
