import json
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.calls import (
    MAX_DEPTH,
    MAX_LENGTH,
    NOTATIONS,
    OPENING,
    read_fenced,
    read_json,
    write_fenced,
    write_json,
)

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), JSON_VALUES)


def test_a_call_as_the_model_was_trained_to_write_it() -> None:
    assert write_fenced({"city": "北京", "days": 3}) == "```python\ntool_call(city='北京', days=3)\n```"
    assert write_fenced({"a": None, "b": [True], "x-y": 1}) == (
        "```python\ntool_call(a=None, b=[True], **{'x-y': 1})\n```"
    )
    assert write_fenced({}) == "```python\ntool_call()\n```"
    assert write_fenced({}).startswith(OPENING)


@given(ARGUMENTS)
def test_what_is_written_is_read(arguments: dict[str, Any]) -> None:
    assert read_fenced(write_fenced(arguments)) == arguments


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("tool_call()", {}),
        (" tool_call( a = -1.5e-3 , ) ", {"a": -0.0015}),
        ("tool_call(range=(0, 100))", {"range": (0, 100)}),
        (
            "tool_call(from='a', to=\"b\", class=[{'in': None}])",
            {"from": "a", "to": "b", "class": [{"in": None}]},
        ),
        ("tool_call(城市='北京', a_1=0x1f)", {"城市": "北京", "a_1": 31}),
        ("tool_call(a='x, b=1)', b='''y\n'z''')", {"a": "x, b=1)", "b": "y\n'z"}),
        (r"tool_call(a='\400\777\0001')", {"a": "\u0100\u01ff\x001"}),
        (r"tool_call(a='\d\n\'\N{BULLET}\101', b='C:\\x')", {"a": "\\d\n'•A", "b": "C:\\x"}),
        ("tool_call(**{'a-b': 1}, c=2)", {"a-b": 1, "c": 2}),
        ("tool_call(a='x' 'y')", {"a": "xy"}),
        ("```\ntool_call(a=1)\n```", {"a": 1}),
        ("```python\ntool_call(a='```\\n```')\n```", {"a": "```\n```"}),
    ],
)
def test_literals_are_read(source: str, arguments: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_fenced(source) == arguments


@pytest.mark.parametrize(
    "source",
    [
        "",
        "tool_call",
        "tool_call(",
        "tool_call(a=1",
        "tool_call(a='x)",
        "tool_call(1)",
        "tool_call(a=1, a=2)",
        "tool_call(a=1, **{'a': 2})",
        "tool_call(**{1: 2})",
        "tool_call(**[1])",
        "tool_call(*[1])",
        "tool_call(a=1)(b=2)",
        "tool_call(a=1); x",
        "tool_call(a=1)\ntool_call(b=1)",
        "get_weather(a=1)",
        "x.tool_call(a=1)",
        "a=1",
        "tool_call(a=open('/etc/passwd'))",
        "tool_call(a=__import__('os'))",
        "tool_call(a=x)",
        "tool_call(a=x.y)",
        "tool_call(a=[x for x in y])",
        "tool_call(a=(b:=1))",
        "tool_call(a=lambda: 1)",
        "tool_call(a=1 if True else 2)",
        "tool_call(a=1-2)",
        "tool_call(a=1j)",
        "tool_call(a={1, 2})",
        "tool_call(a=b'x')",
        "tool_call(a=f'{x}')",
        "tool_call(a=...)",
        "tool_call(a=1e999)",
        r"tool_call(a='\ud800')",
        "tool_call(a=" + "9" * 5000 + ")",
        "tool_call(a=0x" + "f" * 9000 + ")",
        "```python\ntool_call(a=1)",
        "```python\ntool_call(a=1)\n``` and more",
        "import os",
    ],
)
def test_anything_else_is_no_call(source: str) -> None:
    assert read_fenced(source) is None


@pytest.mark.parametrize(
    "filling",
    [
        "-",
        "1-",
        "[",
        "1,",
        "a=1,",
        "'",
        "''",
        "[],",
        "\\",
        "a=",
        '"""',
        "''' ",
        " ",
        "a ",
        "é",
        "a",
        "(",
        "{1:",
    ],
)
@pytest.mark.parametrize("beginning", ["", "a=", "a=[", "a='", 'a="""'])
def test_hostile_ones_end_soon(beginning: str, filling: str) -> None:
    """No stack, no search without end: the test's own time limit would tell."""
    length = MAX_LENGTH - 100
    source = "tool_call(" + beginning + filling * (length // len(filling))
    read_fenced(source)
    read_fenced(source + ")")
    read_fenced(source + "1])")


def test_size_and_depth_are_bounded() -> None:
    def nested(depth: int) -> str:
        return "tool_call(a=" + "[" * depth + "]" * depth + ")"

    assert read_fenced(nested(MAX_DEPTH - 1)) is not None
    assert read_fenced(nested(MAX_DEPTH)) is None
    room = MAX_LENGTH - len("tool_call(a='')")
    assert read_fenced(f"tool_call(a='{'x' * room}')") == {"a": "x" * room}
    assert read_fenced(f"tool_call(a='{'x' * (room + 1)}')") is None


@given(st.text("tool_cal(=,)'\"\\[]{}:*0-9e.\n `", max_size=40))
def test_what_is_read_can_be_written_as_json(inside: str) -> None:
    arguments = read_fenced(f"tool_call(a={inside})")
    if arguments is not None:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.text("abc", max_size=3), JSON, max_size=4))
def test_what_is_written_is_read_in_json(arguments: dict[str, Any]) -> None:
    assert read_json(write_json(arguments)) == arguments
    assert read_json("\n " + write_json(arguments) + " \n") == arguments


def test_characters_are_written_as_they_are() -> None:
    assert write_json({"city": "北京", "days": 3}) == '{"city": "北京", "days": 3}'


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
    assert read_json(content) is None


def test_each_format_with_tools_has_a_notation() -> None:
    for notation in NOTATIONS.values():
        assert notation.read(notation.write({"city": "北京"})) == {"city": "北京"}
