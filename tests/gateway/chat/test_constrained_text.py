import pytest

from gateway.chat.answers import ToolText
from gateway.chat.calls import LiteralCallReader
from wire.meta import Segment


def answer() -> ToolText:
    """Whose text follows a grammar."""
    return ToolText(["get_weather"], LiteralCallReader, constrained=True)


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ('\n{"a": "[[训练时间]]"} ', '{"a": "[[训练时间]]"} '),
        (' \n\n{"a":\n1}', '\n{"a":\n1}'),
        ("get_wea", ""),
        ("get_weather\n```py", ""),
        ("", ""),
    ],
)
def test_text_is_shown_as_it_stands_and_nothing_else(raw: str, shown: str, size: int) -> None:
    text = answer()
    parts = [part for at in range(0, len(raw), size) for part in text.push(raw[at : at + size])]
    assert "".join(map(str, [*parts, *text.finish()])) == shown


def test_each_segment_has_a_first_line() -> None:
    text = answer()
    assert text.push("\na\nbget\ncut", [Segment(4, "assistant")]) == ("a\nb",)
    assert text.push("", [Segment(0, "assistant")]) + text.push("\n x") == (" x",)
    with pytest.raises(ValueError, match="outside"):
        text.push("a", [Segment(2, "assistant")])
