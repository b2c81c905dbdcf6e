import ast
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InvalidRequestError
from gateway.kserve.history import (
    MAX_BYTES,
    MAX_LITERAL_BYTES,
    ClientHistory,
    Shape,
    encode_history,
    parse_flat,
    parse_history,
)
from wire.history import Turn

ROUND = (Turn("user", "问'\"\n"), Turn("assistant", "答\\ {}[]"))
OBJECTS = [{"role": turn.role, "metadata": "", "content": turn.content} for turn in ROUND]
PAIRS = [[ROUND[0].content, ROUND[1].content]]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def parse(document: str, empty: Shape = Shape.OBJECTS) -> ClientHistory:
    return parse_history(document.encode(), empty)


@pytest.mark.parametrize("nothing", ["", " \n", "[]", "()"])
@pytest.mark.parametrize("empty", [Shape.OBJECTS, Shape.PAIRS])
def test_nothing_is_an_empty_history_of_the_expected_shape(nothing: str, empty: Shape) -> None:
    assert parse(nothing, empty) == ClientHistory(empty)


@pytest.mark.parametrize("write", [json.dumps, str, repr])
def test_objects_and_pairs_are_read_as_json_and_as_literals(write: type[str]) -> None:
    objects, pairs = parse(write(OBJECTS)), parse(write(PAIRS))
    assert (objects.shape, pairs.shape) == (Shape.OBJECTS, Shape.PAIRS)
    assert objects.turns == pairs.turns == ROUND
    assert parse(str([tuple(pair) for pair in PAIRS])) == pairs
    assert parse(str(tuple(OBJECTS))) == objects


def test_metadata_may_be_none_or_missing() -> None:
    assert parse("[{'role': 'user', 'metadata': None, 'content': 'x'}]").turns == (Turn("user", "x"),)
    assert parse('[{"role": "user", "content": "x"}]').turns == (Turn("user", "x"),)


def test_tools_go_back_as_a_string_and_come_again() -> None:
    tools = [{"name": "f", "parameters": {"required": True, "n": None}}]
    history = parse(json.dumps([{"role": "system", "content": "", "tools": tools}]))
    (document,) = encode_history(history)
    assert ast.literal_eval(document.decode()) == json.loads(document)
    assert isinstance(json.loads(document)[0]["tools"], str)
    assert parse_history(document, Shape.OBJECTS) == history
    assert history.turns[0].tools == tools


@given(st.lists(st.tuples(texts, texts), max_size=4))
def test_what_goes_back_reads_the_same_as_json_and_as_a_literal(rounds: list[tuple[str, str]]) -> None:
    flat = [text.encode() for pair in rounds for text in pair]
    conversation = parse_flat(flat)
    if flat != [b""]:
        assert encode_history(conversation) == flat
    for shape in (Shape.PAIRS, Shape.OBJECTS):
        history = ClientHistory(shape)
        for question, answer in rounds:
            history = history.extended(Turn("user", question), [Turn("assistant", answer)])
        (document,) = encode_history(history)
        assert ast.literal_eval(document.decode()) == json.loads(document)
        assert parse_history(document, shape) == history
        assert parse_history(str(json.loads(document)).encode(), shape) == history
        assert history.turns == conversation.turns


def test_lengths_count_items_and_rounds() -> None:
    objects, pairs = parse(str(OBJECTS * 3)), parse(str(PAIRS * 3))
    assert len(objects.last_rounds(2).items) == 4
    assert len(pairs.last_rounds(2).items) == 2
    for history in (objects, pairs):
        assert history.last_rounds(0).items == history.last_items(0).items == ()
        assert history.last_items(100) == history


@pytest.mark.parametrize("values", [[], [b""]])
def test_a_flat_history_of_nothing(values: list[bytes]) -> None:
    assert parse_flat(values) == ClientHistory(Shape.FLAT)


@pytest.mark.parametrize("values", [[b"q"], [b"q", b"a", b"q"], [b"\xff", b""], [b"x" * MAX_BYTES, b"x"]])
def test_flat_histories_that_cannot_be(values: list[bytes]) -> None:
    with pytest.raises(InvalidRequestError, match="history"):
        parse_flat(values)


@pytest.mark.parametrize(
    "document",
    [
        "[" * (MAX_BYTES - 1),
        "[" * 5_000_000,
        "(" * (MAX_LITERAL_BYTES - 1),
        "[(" * 50_000,
        "[{'a':" * 20_000,
        '[{"role":"user","content":"","tools":' + '[{"a":' * 100_000,
        '[{"role":"user","content":"","tools":' + '[{"a":' * 20 + "1" + "}]" * 20 + "}]",
        "[# '\n" + "(" * 100_000,
        "-" * 100_000 + "1",
        "'\\" * 60_000,
        "'\"" * 60_000,
        "[('x', 'y')]" + " " * MAX_LITERAL_BYTES,
        "[" + "''," * 40_000 + "]",
        "9" * 100_000,
        "[(9" + "9" * 5000 + ", 1)]",
    ],
    ids=lambda document: f"{document[:12]!r} {len(document)}",
)
def test_hostile_histories_are_refused_at_once(document: str) -> None:
    started = time.thread_time()  # of this thread alone, whatever else the machine does
    with pytest.raises(InvalidRequestError, match="history cannot be read"):
        parse(document)
    assert time.thread_time() - started < 5  # generous: each takes milliseconds


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("hello", "neither JSON nor a Python literal"),
        ("__import__('os').system('true')", "neither"),
        ("[('a', 'b'] ", "neither"),
        ("[b'x']", "neither"),
        ("[f'{1}']", "neither"),
        ("{'role': 'user', 'content': 'x'}", "array"),
        ('{"role": "user"}', "array"),
        ('["q", "a"]', "str"),
        ("[['q']]", "length"),
        ("[['q', None]]", "null"),
        ('[{"role": "root", "content": ""}]', "role"),
        ('[{"role": "user"}]', "content"),
        ('[{"role": "user", "content": 1}]', "content"),
        ('[{"role": "user", "content": "", "name": "n"}]', "name"),
        ('[["q", "a"], {"role": "user", "content": ""}]', "mixed"),
        ('[{"role": "system", "content": "", "tools": "{"}]', "tools"),
        ("[{'role': 'system', 'content': '', 'tools': [{'name': '\\ud800'}]}]", "tools"),
        ("[{'role': 'system', 'content': '', 'tools': [{'name': 'f', 'enum': {1, 2}}]}]", "tools"),
        ("[{'role': 'system', 'content': '', 'tools': [{'name': 'f', 'enum': {(1,): 2}}]}]", "tools"),
        ("[('\\ud800', '')]", "Unicode"),
        ("[('\0', '')]", "neither JSON nor a Python literal.*at character 2"),
        ("[('\\\0', '')]", "at character 2"),
    ],
)
def test_what_is_no_history_is_refused(document: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        parse(document)
    with pytest.raises(InvalidRequestError, match="neither"):
        parse_history(b"\xff", Shape.OBJECTS)
