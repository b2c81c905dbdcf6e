import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.strings import pack_strings, unpack_strings


def test_the_layout_is_length_then_bytes() -> None:
    assert pack_strings([b"ab", b""]) == b"\x02\0\0\0ab\0\0\0\0"
    assert pack_strings([]) == b""


@given(st.lists(st.binary(max_size=300)))
def test_strings_come_back(values: list[bytes]) -> None:
    assert unpack_strings(pack_strings(values)) == values


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        (b"\x02", "inside a length"),
        (b"\x02\0\0\0a", "inside an element"),
        (b"\xff\xff\xff\xff", "an element"),
    ],
)
def test_a_truncated_tensor_is_refused(raw: bytes, where: str) -> None:
    with pytest.raises(ValueError, match=where):
        unpack_strings(pack_strings([b"whole"]) + raw)
