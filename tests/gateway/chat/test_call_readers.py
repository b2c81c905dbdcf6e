import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.calls import (
    CallReader,
    FencedCallReader,
    JsonCallReader,
    Verdict,
)
from gateway.core.events import CallPart, joined_calls
from wire.calls import write_fenced as write_call

PENDING, CALL, NO_CALL = Verdict.PENDING, Verdict.CALL, Verdict.NO_CALL
VALUES = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


def read(kind: type[CallReader], *texts: str) -> tuple[list[Verdict], list[CallPart], str]:
    parts: list[CallPart] = []
    reader = kind("now", parts.append)
    verdicts, rest = [], ""
    for text in texts:
        verdicts.append(reader.push(text))
        rest += reader.take_rest()
    return [*verdicts, reader.end()], parts, rest


def test_a_fenced_call_is_told_of_at_its_end() -> None:
    whole = write_call({"zone": "+8"})
    assert read(FencedCallReader, " ", whole[:5], whole[5:]) == (
        [PENDING, PENDING, PENDING, CALL],
        [CallPart("now", '{"zone": "+8"}')],
        "",
    )
    assert read(FencedCallReader, whole[:-6]) == ([PENDING, NO_CALL], [], "")
    assert read(FencedCallReader, "``", "x") == ([PENDING, NO_CALL, NO_CALL], [], "")


def test_json_is_told_of_as_it_comes() -> None:
    assert read(JsonCallReader, "\n ", ' {"a', '": [1, {', "}", "]", "} \n", "and") == (
        [PENDING, CALL, CALL, CALL, CALL, CALL, CALL, CALL],
        [
            CallPart("now", '{"a'),
            CallPart(None, '": [1, {'),
            CallPart(None, "}"),
            CallPart(None, "]"),
            CallPart(None, "}"),
        ],
        " \nand",
    )


def test_control_characters_in_strings_are_escaped() -> None:
    """A model that writes them so writes no JSON, and neither could a client read it."""
    texts = ["{\n", '"a": "x', "\n", "\t", '\\"y\x1f"', "\n} \n"]
    parts, rest = read(JsonCallReader, *texts)[1:]
    (call,) = joined_calls(parts)
    assert call.arguments == '{\n"a": "x\\n\\t\\"y\\u001f"\n}'
    assert json.loads(call.arguments) == {"a": 'x\n\t"y\x1f'}
    assert rest == " \n"


@pytest.mark.parametrize("text", ["[1]", "noon", '"x"', "```json\n{}"])
def test_what_does_not_begin_with_an_object_is_no_call(text: str) -> None:
    assert read(JsonCallReader, text)[0][0] is NO_CALL


def test_nothing_is_no_call() -> None:
    assert read(JsonCallReader, "", " ") == ([PENDING, PENDING, NO_CALL], [], "")
    assert read(FencedCallReader)[0] == [NO_CALL]


def test_an_object_that_is_cut_short_is_what_there_is_of_it() -> None:
    assert read(JsonCallReader, '{"zone": "}') == ([CALL, CALL], [CallPart("now", '{"zone": "}')], "")


@given(
    arguments=st.dictionaries(st.text(), VALUES, max_size=3),
    cuts=st.lists(st.integers(0, 200)),
    ascii_only=st.booleans(),
)
def test_an_object_ends_where_json_says(arguments: Any, cuts: list[int], *, ascii_only: bool) -> None:
    """Whatever brackets and quotes its strings hold, and wherever it was cut."""
    whole = json.dumps(arguments, ensure_ascii=ascii_only)
    text = whole + "}] rest"
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(bounds)]
    _, parts, rest = read(JsonCallReader, *pieces)
    (call,) = joined_calls(parts)
    assert (call.name, call.arguments, rest) == ("now", whole, "}] rest")
