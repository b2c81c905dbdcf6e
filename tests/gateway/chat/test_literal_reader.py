import json
import random
from typing import Any

import pytest

from gateway.chat.calls import LiteralCallReader, Verdict
from gateway.core.events import CallPart
from wire.calls import OPENING
from wire.calls import read_fenced as read_call
from wire.calls import write_fenced as write_call


def pieces(text: str, dice: random.Random) -> list[str]:
    cuts = sorted(dice.sample(range(len(text) + 1), dice.randint(0, 8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read(*parts: str) -> tuple[Verdict, list[CallPart]]:
    told: list[CallPart] = []
    reader = LiteralCallReader("f", told.append)
    for part in parts:
        reader.push(part)
    verdict = reader.end()
    assert reader.take_rest() == ""
    return verdict, told


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"city": "北京", "days": 3},
        {"a": "it's", "b": 'say "no"', "c": "both ' and \"", "d": "back\\slash\n\ttab", "e": ""},
        {"t": True, "f": False, "n": None, "x": -1.5e-07, "y": [1, [], [None, {"k": [True]}]], "z": {}},
        {"from": 1, "a b": {"c": "True, None) }"}, "城": [{"x y": 2}]},
        {"it's": "="},
        {"None": "a", "True": True, "False": None, "Nones": ["None"], "class": {"None": False}},
        {"None": None},
    ],
)
def test_what_is_written_comes_as_json_however_it_is_cut(arguments: dict[str, Any]) -> None:
    text = " " + write_call(arguments)
    for seed in range(30):
        verdict, told = read(*pieces(text, random.Random(seed)))
        assert verdict is Verdict.CALL
        assert told[0].name == "f"
        assert all(part.name is None for part in told[1:])
        joined = "".join(part.arguments for part in told)
        assert json.loads(joined) == arguments == read_call(text.strip())
        assert joined == json.dumps(arguments, ensure_ascii=False)


def test_arguments_come_while_they_are_written() -> None:
    told: list[CallPart] = []
    reader = LiteralCallReader("f", told.append)
    so_far = []
    for part in (" ```python\ntool_", "call(ci", "ty='Be", "rlin', n=1", "2, x=Tr", "ue)\n``", "`"):
        reader.push(part)
        so_far.append("".join(each.arguments for each in told))
    assert so_far == [
        "",
        "{",
        '{"city": "Be',
        '{"city": "Berlin", "n": ',
        '{"city": "Berlin", "n": 12, "x": ',
        '{"city": "Berlin", "n": 12, "x": true}',
        '{"city": "Berlin", "n": 12, "x": true}',
    ]


def test_what_is_cut_short_is_what_there_was_and_what_is_no_call_is_none() -> None:
    verdict, told = read(OPENING + "a='x")
    assert (verdict, "".join(part.arguments for part in told)) == (Verdict.CALL, '{"a": "x')
    assert read("Hello") == (Verdict.NO_CALL, [])
    assert read("```python\ntool") == (Verdict.NO_CALL, [])
