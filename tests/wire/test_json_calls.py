from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.calls import NOTATIONS
from wire.json_calls import read_call, write_call

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.text("abc", max_size=3), JSON, max_size=4))
def test_what_is_written_is_read(arguments: dict[str, Any]) -> None:
    assert read_call(write_call(arguments)) == arguments
    assert read_call("\n " + write_call(arguments) + " \n") == arguments


def test_characters_are_written_as_they_are() -> None:
    assert write_call({"city": "北京", "days": 3}) == '{"city": "北京", "days": 3}'


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        '"x"',
        "{",
        '{"a": 1} b',
        "{'a': 1}",
        '{"a": NaN}',
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"\ud800": 1}',
    ],
)
def test_what_is_no_object_is_no_call(content: str) -> None:
    assert read_call(content) is None


def test_each_format_with_tools_has_a_notation() -> None:
    for notation in NOTATIONS.values():
        assert notation.read(notation.write({"city": "北京"})) == {"city": "北京"}
