"""What may stand behind a call's arguments in the object that holds them."""

import pytest

from gateway.chat.marked import MarkedText
from gateway.chat.styles import STYLES
from gateway.core.events import Piece, joined_pieces
from tests.gateway.chat.test_marked import BERLIN

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Berlin"}'
MARK = "</tool_call>"


def read(text: str) -> tuple[list[Piece], list[Piece]]:
    """Return what comes of a whole answer at once, and then of its end."""
    reader = MarkedText(STYLES["hermes"], ["weather"])
    told = reader.push(text)
    return list(joined_pieces(told)), list(joined_pieces(reader.end()))


@pytest.mark.parametrize(
    "rest",
    ["}", " \n}\n", ', "id": {"a": "}"}}', f', "id": "{"x" * 900}"}}', ',"a":[1],"b":null }'],
    ids=range(5),
)
def test_other_fields_of_the_object_are_part_of_the_call(rest: str) -> None:
    assert read(f"{CALL}{rest}{MARK} ok") == ([BERLIN, " ok"], [])


@pytest.mark.parametrize(
    "rest",
    [
        "hello",
        "hello}",
        ", oops} ok",
        f", oops}}{MARK} ok",
        f', "id": "x{MARK} ok',
        f', "id": "x{MARK}"}} ok',
        f', "id": "{"x" * 2000}',
        f', "id": "{"x" * 2000}"}}{MARK} ok',
    ],
    ids=lambda rest: rest[:30],
)
def test_what_is_no_field_is_text_that_waits_for_nothing(rest: str) -> None:
    assert read(CALL + rest) == ([BERLIN, rest], [])


def test_a_field_that_breaks_off_is_text_at_the_answers_end() -> None:
    assert read(CALL + ', "id": "x') == ([BERLIN], [', "id": "x'])
    assert read(CALL) == ([BERLIN], [])
