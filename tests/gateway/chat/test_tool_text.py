import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.answers import AnswerText, ToolText, in_runs
from gateway.chat.calls import FencedCallReader
from gateway.core.events import CallPart, Piece, joined_pieces
from wire.calls import OPENING
from wire.calls import write_fenced as write_call
from wire.meta import Segment

OFFERED = ("get_weather", "get", "calculate")
BERLIN = "get_weather\n " + write_call({"city": "Berlin", "days": [0, 3]})
SUM = "calculate\n " + write_call({"expression": "1 + 1"})
HELLO = "\n Hello [[训练时间]]! \n"

Shown = tuple[str, list[tuple[str, str]]]


def read(segments: list[str], cuts: list[int] | None = None, metadata: str | None = None) -> Shown:
    """Show an answer of `segments`, cut at `cuts` of its text; with what is called."""
    pieces = told(segments, cuts, metadata)
    calls = [(call.name or "", call.arguments) for call in pieces if isinstance(call, CallPart)]
    return "".join(piece for piece in pieces if isinstance(piece, str)), calls


def told(
    segments: list[str], cuts: list[int] | None = None, metadata: str | None = None
) -> tuple[Piece, ...]:
    """Return all of it in order."""
    whole = "".join(segments)
    starts = [sum(map(len, segments[:number])) for number in range(1, len(segments))]
    answer = ToolText(OFFERED, FencedCallReader, metadata=metadata)
    told: list[Piece] = []
    bounds = [0, *sorted(cut % (len(whole) + 1) for cut in cuts or ()), len(whole)]
    for number, (begin, end) in enumerate(pairwise(bounds)):
        # A segment that begins where two deltas meet may be told with either; with the later one here.
        last = number == len(bounds) - 2
        here = [at for at in starts if begin <= at < end or (last and at == end)]
        segments_here = [Segment(at - begin, "assistant") for at in here]
        told += answer.push(whole[begin:end], segments_here)
        starts = [at for at in starts if at not in here]
    return joined_pieces([*told, *answer.finish()])


def plain(*segments: str) -> str:
    """Show them as where no tools are offered."""
    answer = AnswerText()
    starts = [sum(map(len, segments[:number])) for number in range(1, len(segments))]
    return answer.push("".join(segments), [Segment(at, "assistant") for at in starts]) + answer.finish()


def test_a_call_is_a_call_and_text_is_text() -> None:
    assert read([BERLIN]) == ("", [("get_weather", '{"city": "Berlin", "days": [0, 3]}')])
    assert read([HELLO]) == ("Hello 2023年!", [])
    assert read([HELLO, BERLIN, SUM, "\n Done"]) == (
        "Hello 2023年!\nDone",
        [
            ("get_weather", '{"city": "Berlin", "days": [0, 3]}'),
            ("calculate", '{"expression": "1 + 1"}'),
        ],
    )


def test_text_and_calls_come_in_their_order() -> None:
    pieces = told([SUM, HELLO, "get_weather\n", SUM, SUM])
    assert [piece if isinstance(piece, str) else piece.name for piece in pieces] == [
        "calculate",
        "Hello 2023年!\nget_weather",
        "calculate",
        "calculate",
    ]


def test_a_name_given_by_the_prompt_begins_a_call() -> None:
    body = BERLIN.partition("\n")[2]
    assert read([body, SUM], metadata="get_weather")[1][0][0] == "get_weather"
    assert len(read([body, SUM], metadata="get_weather")[1]) == 2
    assert read([" It is warm."], metadata="get_weather") == ("It is warm.", [])
    assert read([BERLIN], metadata="") == (BERLIN, [])


@pytest.mark.parametrize(
    "segment",
    [
        "search\n " + write_call({"city": "x"}),
        "get_weather",
        "get_weather\n",
        "get_weather\nIt is warm.",
        "get_weather\n ```python\nimport os\n```",
        "get_weather\n " + OPENING + "city=open('x'))\n```",
        "get_weather\n " + OPENING + "city='x')\n",
        "get_weather\n " + OPENING + "city='x')\n``` there",
        "get_weather\n " + OPENING + "city='x",
        "\n get_weather\n " + write_call({"city": "x"}),
        "Well: get_weather\n " + write_call({"city": "x"}),
        "get_weathers\n " + write_call({"city": "x"}),
        "GET\n " + write_call({"city": "x"}),
        "",
    ],
)
def test_whatever_is_no_call_reads_as_it_does_without_tools(segment: str) -> None:
    assert read([segment]) == (plain(segment), [])
    assert read([HELLO, segment, SUM, HELLO]) == (
        plain(HELLO, segment, "", HELLO),
        [("calculate", '{"expression": "1 + 1"}')],
    )


def test_text_is_not_held_back() -> None:
    answer = ToolText(OFFERED, FencedCallReader)
    assert answer.push("\n Hel") == ("Hel",)
    assert answer.push("lo") == ("lo",)
    answer = ToolText(OFFERED, FencedCallReader)
    assert answer.push("get") == ()
    assert answer.push("ting") == ("getting",)
    answer = ToolText(OFFERED, FencedCallReader)
    assert answer.push("get\n ```python\nprint") == ("get\n ```python\nprint",)


def test_a_call_is_told_when_its_segment_ends() -> None:
    answer = ToolText(OFFERED, FencedCallReader)
    assert answer.push(BERLIN) == ()
    told = answer.push("", [Segment(0, "assistant")])
    assert told == (CallPart("get_weather", '{"city": "Berlin", "days": [0, 3]}'),)


def test_a_segment_outside_the_text_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        ToolText(OFFERED, FencedCallReader).push("x", [Segment(2, "assistant")])


PIECES = st.sampled_from(
    [
        BERLIN,
        SUM,
        HELLO,
        "get",
        "get\n",
        "get_weather\n",
        OPENING,
        "```",
        " ",
        "\n",
        "x",
        "[[训练",
        "a='",
        "')",
    ]
)


@given(
    st.lists(st.lists(PIECES, max_size=3).map("".join), min_size=1, max_size=4),
    st.lists(st.integers(0, 2000), max_size=8),
    st.sampled_from([None, "", "get_weather"]),
)
def test_cuts_change_nothing(segments: list[str], cuts: list[int], metadata: str | None) -> None:
    """Neither what is told nor its order."""
    assert told(segments, cuts, metadata) == told(segments, None, metadata)


@given(st.lists(st.lists(PIECES, max_size=3).map("".join), min_size=1, max_size=4))
def test_nothing_is_lost(segments: list[str]) -> None:
    """Every segment is a call or the text that it is without tools."""
    shown, calls = read(segments)
    alone = [read([segment]) for segment in segments]
    assert calls == [call for _, called in alone for call in called]
    assert shown == plain(
        *("" if called else segment for segment, (_, called) in zip(segments, alone, strict=True))
    )
    assert all(json.loads(arguments) is not None for _, arguments in calls)


def test_in_a_run_the_calls_come_last() -> None:
    call = CallPart("now", "{}")
    assert list(in_runs([call, call, "b", "c", call])) == [(call, call), ("bc", call)]
    assert list(in_runs([])) == [()]
