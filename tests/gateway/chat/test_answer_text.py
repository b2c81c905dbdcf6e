from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.chat.answers import AnswerText, RawText
from wire.meta import Segment

PLACEHOLDER = "[[训练时间]]"

texts = st.lists(
    st.sampled_from(
        [
            " ",
            "\n",
            "\u3000",
            "a",
            "\n\n",
            "[",
            "[[",
            "[[训练",
            "时间]]",
            "]",
            PLACEHOLDER,
            "你好",
            "get_time\n",
        ]
    ),
    max_size=8,
).map("".join)


def directly(segments: list[str]) -> str:
    """Return the text of a whole answer, cleaned at one go."""
    cleaned = [segment.strip().replace(PLACEHOLDER, "2023年") for segment in segments]
    return "\n".join(segment for segment in cleaned if segment)


def streamed(segments: list[str], cuts: list[int]) -> str:
    """Return the text of the same answer, arriving in deltas that end at `cuts`."""
    whole = "".join(segments)
    starts = [len("".join(segments[:number])) for number in range(1, len(segments))]
    edges = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
    answer = AnswerText()
    shown = ""
    reported = 0
    for start, end in list(pairwise(edges)) or [(0, 0)]:
        here = [at for at in starts[reported:] if at < end or end == len(whole)]
        reported += len(here)
        shown += answer.push(whole[start:end], [Segment(at - start, "assistant") for at in here])
    assert reported == len(starts)
    return shown + answer.finish()


@given(st.lists(texts, min_size=1, max_size=4), st.lists(st.integers(0, 200), max_size=12))
@example(["a", "b"], [1])
@example(["a[[训练时间]]"], [1])
@example(["[[训", "练时间]]"], [1, 2, 3])
@example(["\n 你好", " \n b "], list(range(20)))
def test_any_cut_equals_the_whole(segments: list[str], cuts: list[int]) -> None:
    assert streamed(segments, cuts) == streamed(segments, []) == directly(segments)


@pytest.mark.parametrize("text", ["好", "👋", "a", "]", "2"])
def test_the_shortest_answer_comes_at_once(text: str) -> None:
    answer = AnswerText()
    assert answer.push("\n " + text) == text
    assert answer.finish() == ""


def test_only_what_may_change_is_held() -> None:
    answer = AnswerText()
    assert answer.push("\n a b \n") == "a b"
    assert answer.push("c [") == " \nc "
    assert answer.push("[训练时间]") == ""
    assert answer.push("]。[") == "2023年。"
    assert answer.finish() == "["


def test_trailing_white_space_is_dropped() -> None:
    answer = AnswerText()
    assert answer.push("a\n") == "a"
    assert answer.push(" \n") == ""
    assert answer.finish() == ""


def test_a_tool_name_that_was_not_asked_for_stays_text() -> None:
    answer = AnswerText()
    raw = "get_weather\n ```python\ntool_call(city='北京')\n```"
    assert answer.push(raw) + answer.finish() == raw


def test_segments_are_a_line_apart_and_blank_ones_add_none() -> None:
    answer = AnswerText()
    shown = [
        answer.push(" \n", [Segment(2, "assistant")]),
        answer.push("\n a \n b", [Segment(4, "assistant"), Segment(4, "assistant")]),
        answer.push("c"),
        answer.finish(),
    ]
    assert shown == ["", "a\nb", "c", ""]


def test_an_empty_answer_is_empty() -> None:
    answer = AnswerText()
    assert answer.push("") + answer.push(" \n ") + answer.finish() == ""


@pytest.mark.parametrize("offsets", [[3], [-1], [2, 1]])
def test_a_segment_outside_its_text_is_an_error(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="segment"):
        AnswerText().push("ab", [Segment(at, "assistant") for at in offsets])


def test_a_raw_answer_is_shown_as_it_stands() -> None:
    answer = RawText()
    deltas = [" \n", PLACEHOLDER, "a ", "\n"]
    assert [answer.push(delta) for delta in deltas] == deltas
    assert answer.finish() == ""
    with pytest.raises(ValueError, match="segment"):
        answer.push("a", [Segment(0, "assistant")])
