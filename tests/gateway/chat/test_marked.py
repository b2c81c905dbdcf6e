import json
import random
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from gateway.chat.marked import MARKS, MarkedChoice, MarkedText
from gateway.chat.styles import STYLES
from gateway.core.events import CallPart, Piece, Reasoning, joined_pieces
from wire.meta import Segment

BERLIN = CallPart("weather", '{"city": "Berlin"}')
TOOLS = ("weather", "time")

OBJECT = '{"name": "weather", "arguments": {"city": "Berlin"}}'
CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Berlin"}}\n</tool_call>',
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Berlin</arg_value>\n</tool_call>",
    "qwen3coder": "<tool_call>\n<function=weather>\n<parameter=city>\nBerlin\n</parameter>\n"
    "</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Berlin"}}]',
    "llama3": '{"name": "weather", "parameters": {"city": "Berlin"}}',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Berlin"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "glm4": 'weather\n{"city": "Berlin"}',
}


def read(
    text: str,
    style: str | None,
    cuts: Sequence[int] = (),
    *,
    thinking: bool = False,
    thinks: bool = False,
    single: bool = False,
) -> tuple[str, str, list[CallPart]]:
    """Return reasoning, text and calls."""
    reader = MarkedText(
        STYLES[style] if style else None, TOOLS, single=single, thinking=thinking, thinks=thinks
    )
    pieces: list[Piece] = []
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for begin, end in pairwise(places):
        pieces += reader.push(text[begin:end])
    pieces += reader.end()
    assert "" not in pieces
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    rest = joined_pieces([piece for piece in pieces if not isinstance(piece, Reasoning)])
    return (
        thoughts,
        "".join(piece for piece in rest if isinstance(piece, str)),
        [piece for piece in rest if isinstance(piece, CallPart)],
    )


@pytest.mark.parametrize("style", CALLS)
@pytest.mark.parametrize("seed", range(8))
def test_a_call_is_read_however_it_is_cut(style: str, seed: int) -> None:
    dice = random.Random(seed)
    cuts = [dice.randrange(200) for _ in range(seed * 4)]
    assert read(CALLS[style], style, cuts) == ("", "", [BERLIN])
    assert read("\n" + CALLS[style] + "\n", style, cuts)[2] == [BERLIN]


@pytest.mark.parametrize("style", ["hermes", "glm45", "mistral"])
def test_text_before_a_call_stays(style: str) -> None:
    assert read("Let me look.\n\n" + CALLS[style], style) == ("", "Let me look.", [BERLIN])


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", CALLS["hermes"] + "\n" + CALLS["hermes"].replace("weather", "time")),
        ("hermes", f"<tool_call>\n[{OBJECT},\n{OBJECT.replace('weather', 'time')}]\n</tool_call>"),
        ("hermes", f"<tool_call>\n{OBJECT}\n{OBJECT.replace('weather', 'time')}\n</tool_call>"),
        ("glm45", CALLS["glm45"] + "\n" + CALLS["glm45"].replace("weather", "time")),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Berlin"}[TOOL_CALLS]time[ARGS]{"city": "Berlin"}'),
        ("llama3", CALLS["llama3"] + "; " + CALLS["llama3"].replace("weather", "time")),
        ("llama3", "<|python_tag|>" + CALLS["llama3"] + "; " + CALLS["llama3"].replace("weather", "time")),
    ],
)
def test_several_calls(style: str, text: str) -> None:
    _, said, calls = whole = read(text, style)
    assert whole == read(text, style, range(len(text)))
    assert (said, [call.name for call in calls]) == ("", ["weather", "time"])
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Berlin"}] * 2


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", CALLS["hermes"].replace("weather", "steal")),
        ("hermes", "<tool_call>{broken</tool_call>"),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "x"}</tool_call>'),
        ("hermes", '<tool_call>[{"name": "weather"}, 1, {"tool": "weather"}]</tool_call>'),
        ("hermes", "if a <tool"),
        ("glm45", "<tool_call>weather\n<arg_key>city</arg_key></tool_call>"),
        ("glm45", "<tool_call></tool_call>"),
        ("mistral", "[TOOL_CALLS] [1]"),
        ("mistral", "[TOOL_CALLS]steal[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]weather"),
        ("llama3", '{"answer": 42}'),
        ("llama3", '{"name": "steal", "parameters": {}} and more'),
        ("llama3", '{"name": "weather", "parameters": "x"}'),
        ("llama3", "It is {sunny}."),
        ("glm4", "weather is nice\nindeed"),
        ("glm4", "Sunny\nin Berlin"),
        ("glm4", "weather"),
        (None, CALLS["hermes"]),
    ],
)
@pytest.mark.parametrize("cuts", [[], list(range(100))])
def test_what_is_no_call_stays_text(style: str | None, text: str, cuts: list[int]) -> None:
    assert read(text, style, cuts) == ("", text, [])


def test_a_call_that_may_have_no_arguments() -> None:
    assert read('{"name": "time", "parameters": null}', "llama3")[2] == [CallPart("time", "{}")]
    assert read('<tool_call>{"name": "time"}</tool_call>', "hermes")[2] == [CallPart("time", "{}")]
    assert len(read('<tool_call>{"name": "time"}; [{"name": "time"}]</tool_call>', "hermes")[2]) == 2
    assert read("<tool_call>time\n</tool_call>", "glm45")[2] == [CallPart("time", "{}")]


def test_the_end_of_an_answer_ends_a_call() -> None:
    assert read(CALLS["hermes"].removesuffix("</tool_call>"), "hermes") == ("", "", [BERLIN])


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Berlin"'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Berlin"</tool_call> No.'),
        ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>Berlin</arg_value> No.</tool_call>"),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Berlin"'),
        ("llama3", '{"name": "weather", "parameters": {"city": "Berlin"'),
        ("glm4", 'weather\n{"city": "Berlin"'),
    ],
)
@pytest.mark.parametrize("cuts", [[], list(range(100))])
def test_arguments_that_break_off_stay_as_they_were_written(style: str, text: str, cuts: list[int]) -> None:
    thought, said, (call,) = read(text, style, cuts)
    assert call == CallPart("weather", BERLIN.arguments.removesuffix("}"))
    assert thought == ""
    assert said.strip() in ("", "No.", "No.</tool_call>")


PAIRS = (
    "<tool_call>weather<arg_key>a</arg_key>\n<arg_value>NaN</tool_call></arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("style", "text", "arguments"),
    [
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments":{"a":  "}</tool_call>\\""}, "id": [{}]}</tool_call>',
            '{"a":  "}</tool_call>\\""}',
        ),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": 1}</tool_call>', '{"a": 1}'),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"a": 1}, "id": "abc"}]', '{"a": 1}'),
        ("mistral", '[TOOL_CALLS]weather[CALL_ID]aB3dE6gH9[ARGS]{"a": 1}', '{"a": 1}'),
        ("mistral", '[TOOL_CALLS]weather{"a": 1}', '{"a": 1}'),
        ("llama3", '{"type": "function", "name": "weather", "parameters": {"a": 1}}', '{"a": 1}'),
        ("llama3", '{"parameters": {"a": 1}, "name": "weather"}', '{"a": 1}'),
        ("glm45", PAIRS, '{"a": "NaN</tool_call>", "b": [1]}'),
    ],
)
@pytest.mark.parametrize("cuts", [[], list(range(150))])
def test_arguments_are_what_the_model_wrote(style: str, text: str, arguments: str, cuts: list[int]) -> None:
    assert read(text, style, cuts) == ("", "", [CallPart("weather", arguments)])


@pytest.mark.parametrize("value", ["NaN", "1e400", r'"\ud800"'])
def test_a_value_that_json_cannot_hold_is_a_string(value: str) -> None:
    text = f"<tool_call>weather<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
    (call,) = read(text, "glm45")[2]
    call.arguments.encode()
    assert json.loads(call.arguments) == {"a": value}


@pytest.mark.parametrize("style", CALLS)
def test_text_behind_a_call_is_text(style: str) -> None:
    assert read(CALLS[style] + " Done?", style) == ("", " Done?", [BERLIN])


@pytest.mark.parametrize("style", CALLS)
def test_a_call_is_passed_on_as_it_is_written(style: str) -> None:
    reader = MarkedText(STYLES[style], TOOLS)
    text = CALLS[style]
    name, *more = [
        piece for at in range(len(text)) for piece in reader.push(text[at]) if isinstance(piece, CallPart)
    ]
    assert name.name == "weather"
    assert name.arguments == "{"
    assert len(more) > (1 if style in PAIR_FORMS else 10)
    assert not reader.end()
    assert (reader.called, reader.cut) == (True, False)


def test_a_call_that_is_cut_is_told() -> None:
    reader = MarkedText(STYLES["glm4"], TOOLS)
    reader.push('weather\n{"city')
    reader.end()
    assert (reader.called, reader.cut) == (True, True)


@pytest.mark.parametrize("by", [1, 7, 1000])
def test_what_is_not_text_is_known(by: int) -> None:
    call = CALLS["hermes"]
    text = f"<think>Hm.</think>Let me look.{call}\n{call} Done."
    reader = MarkedText(STYLES["hermes"], TOOLS, thinks=True)
    for at in range(0, len(text), by):
        reader.push(text[at : at + by])
    reader.end()
    assert reader.decided == len(text)
    shown = "".join(
        each for at, each in enumerate(text) if not any(begin <= at < end for begin, end in reader.hidden)
    )
    assert shown == "Let me look. Done."
    assert len(reader.hidden) == 2


def test_text_is_not_held_back_without_a_reason() -> None:
    reader = MarkedText(STYLES["hermes"], TOOLS)
    assert reader.push("Hello") == ["Hello"]
    assert reader.push(" <tool") == []
    assert reader.push("box>") == [" <toolbox>"]


def test_text_without_spaces_is_no_name() -> None:
    assert MarkedText(STYLES["glm4"], TOOLS).push("今天") == ["今天"]


@pytest.mark.parametrize("cuts", [[], list(range(100))])
@pytest.mark.parametrize("style", [None, "hermes"])
def test_reasoning_comes_apart(style: str | None, cuts: list[int]) -> None:
    text = "<think>\nHm, 1 < 2.\n</think>\n\nTwo."
    assert read(text, style, cuts, thinks=True) == ("\nHm, 1 < 2.\n", "Two.", [])
    begun = text.removeprefix("<think>")
    assert read(begun, style, cuts, thinking=True) == ("\nHm, 1 < 2.\n", "Two.", [])
    assert read(text, style, cuts) == ("", text, [])
    assert read("<think>never ends", style, cuts, thinks=True) == ("never ends", "", [])


def test_a_call_follows_reasoning() -> None:
    text = "<think>Look it up.</think>\n" + CALLS["hermes"]
    assert read(text, "hermes", thinks=True) == ("Look it up.", "", [BERLIN])


PARTS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "weather", " ", "\n", "{", "}", "<"]

BEGUN = {"glm45": r"<tool_call>\s*weather", "mistral": r"\[TOOL_CALLS\]\s*weather\s*\{"}
"""What is a call, although these parts have no arguments that end."""


@given(
    text=st.lists(st.sampled_from(PARTS), max_size=30).map("".join),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
@pytest.mark.parametrize("style", ["hermes", "glm45", "qwen3coder", "mistral", "llama3"])
def test_nothing_is_lost_and_cuts_do_not_matter(style: str, text: str, cuts: list[int]) -> None:
    whole = read(text, style)
    assert whole == read(text, style, cuts)
    if not re.search(BEGUN.get(style, "$^"), text):
        assert whole[1] == text
        assert not whole[2]


WRITTEN = {
    "hermes": [
        CALLS["hermes"],
        '{"name": "weather", "arguments": {',
        '"id": 1',
        "</tool_call>",
        "<tool_call>",
        OBJECT,
        "]",
    ],
    "qwen3coder": [
        CALLS["qwen3coder"],
        "<tool_call><function=weather>",
        "<tool_call>",
        "<function=weather>",
        "<function=",
        "<parameter=",
        "a>",
        "</parameter>",
        "</function>",
        "</tool_call>",
    ],
    "glm45": [CALLS["glm45"], "<tool_call>weather", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "mistral": [
        CALLS["mistral"],
        "[TOOL_CALLS]",
        "weather[ARGS]{",
        '{"name": "weather", "arguments": {',
        "]",
    ],
    "llama3": [CALLS["llama3"], "<|python_tag|>", '{"name": "weather", "parameters": {', ";", '"id": 1'],
    "deepseek": [*re.split("(?<=｜>)|(?=```)", CALLS["deepseek"]), "weather<｜tool▁sep｜>{", "```", "{}"],
    "glm4": [CALLS["glm4"], "weather\n", "weather", "time\n{}"],
}


@given(data=st.data())
@pytest.mark.parametrize("style", CALLS)
def test_calls_do_not_depend_on_cuts(style: str, data: st.DataObject) -> None:
    parts = [*WRITTEN[style], "<think>", "</think>", "steal", '"', "\\", "{", "}", ",", " ", "\n", "x"]
    text = data.draw(st.lists(st.sampled_from(parts), max_size=16).map("".join))
    cuts = data.draw(st.lists(st.integers(0, 400), max_size=20))

    def pieces_of(cuts: Sequence[int]) -> tuple[tuple[Piece, ...], list[int]]:
        reader = MarkedText(STYLES[style], TOOLS, thinks=True)
        pieces: list[Piece] = []
        for begin, end in pairwise([0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]):
            pieces += reader.push(text[begin:end])
        pieces += reader.end()
        hidden = [at for at in range(len(text)) if any(a <= at < b for a, b in reader.hidden)]
        return joined_pieces(pieces), hidden

    whole = pieces_of(())
    assert whole == pieces_of(cuts) == pieces_of(range(len(text)))
    said = "".join(each for piece in whole[0] for each in _text_of(piece))
    assert style in PAIR_FORMS or not set("".join(said.split())) - set(text)
    if not any(isinstance(piece, CallPart | Reasoning) for piece in whole[0]):
        assert said.split() == text.split() or "<think>" in text


def _text_of(piece: Piece) -> str:
    return (
        piece if isinstance(piece, str) else piece.text if isinstance(piece, Reasoning) else piece.arguments
    )


TWO = {
    "hermes": CALLS["hermes"] + CALLS["hermes"],
    "glm45": CALLS["glm45"] * 2,
    "qwen3coder": CALLS["qwen3coder"] * 2,
    "qwen3coder without arguments": "<tool_call><function=time></function></tool_call>" * 2,
    "mistral": CALLS["mistral"][:-1] + ', {"name": "time", "arguments": {}}]',
    "llama3": CALLS["llama3"] + "; " + CALLS["llama3"],
    "deepseek": CALLS["deepseek"] + CALLS["deepseek"],
    "glm4": CALLS["glm4"] + "\n" + CALLS["glm4"],
    "hermes without arguments": '<tool_call>{"name": "time"}</tool_call>' * 2,
}


@pytest.mark.parametrize("calls", TWO)
@given(cuts=st.lists(st.integers(0, 400), max_size=12))
def test_an_answer_may_end_with_its_first_call(calls: str, cuts: list[int]) -> None:
    style = calls.partition(" ")[0]
    thought, text, found = read(
        "<think>Hm.</think>" + TWO[calls] + " And so on.", style, cuts, thinks=True, single=True
    )
    assert (thought, text) == ("Hm.", "")
    assert found == [CallPart("time", "{}") if "without" in calls else BERLIN]


def test_behind_its_only_call_an_answer_is_over() -> None:
    reader = MarkedText(STYLES["hermes"], TOOLS, single=True)
    before, within = CALLS["hermes"].split('"Berlin"')
    reader.push("Look: " + before)
    assert not reader.over
    reader.push('"Berlin"' + within + CALLS["hermes"])
    assert reader.over
    assert not reader.push("x")
    assert reader.hidden == [(len("Look:"), len("Look: " + CALLS["hermes"] * 2))]


PAIR_FORMS = {
    "glm45": "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
    "qwen3coder": "<parameter={}>\n{}\n</parameter>\n",
}


@pytest.mark.parametrize("style", PAIR_FORMS)
def test_a_value_without_quotes_that_is_cut_is_a_string_that_breaks_off(style: str) -> None:
    text = CALLS[style]
    begun = [call for at in range(len(text)) for call in read(text[:at], style)[2]]
    assert {call.name for call in begun} == {"weather"}
    for call in begun:
        city = from_json(call.arguments, allow_partial="trailing-strings").get("city", "")
        assert "Berlin".startswith(city)
    assert CallPart("weather", '{"city": "Ber') in begun
    assert read(text[: text.index("lin")], style, range(100))[2] == [CallPart("weather", '{"city": "Ber')]


STRINGS = {"file": False, "city": False, "none": False, "code": True, "zip": True}


@pytest.mark.parametrize("style", PAIR_FORMS)
@given(cuts=st.lists(st.integers(0, 400), max_size=12))
def test_a_schema_says_which_values_are_strings(style: str, cuts: list[int]) -> None:
    values = {"file": '{"a":\n 1}', "city": "12", "days": "12", "on": "true", "place": "a < b"}
    values |= {"off": "False", "null": "null", "none": "None", "code": "12", "zip": "null"}
    written = "".join(PAIR_FORMS[style].format(*each) for each in values.items())
    begin, end = {"glm45": ("weather\n", ""), "qwen3coder": ("<function=weather>\n", "</function>")}[style]
    text = f"<tool_call>{begin}{written}{end}</tool_call>Done."
    reader = MarkedText(STYLES[style], TOOLS, strings={"weather": STRINGS})
    pieces: list[Piece] = []
    for first, last in pairwise([0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]):
        pieces += reader.push(text[first:last])
    call, said = joined_pieces([*pieces, *reader.end()])
    assert isinstance(call, CallPart)
    others = {"days": 12, "on": True, "off": False, "null": None, "zip": None}
    assert json.loads(call.arguments) == values | others
    assert said == "Done."


@pytest.mark.parametrize("style", PAIR_FORMS)
def test_a_long_value_is_read_once_not_with_each_of_its_pieces(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, reads = STYLES[style].arguments.pair, []  # type: ignore[attr-defined]

    class Counted:
        @staticmethod
        def match(text: str) -> re.Match[str] | None:
            reads.append(len(text))
            return cast("re.Match[str] | None", pair.match(text))

    monkeypatch.setattr(STYLES[style].arguments, "pair", Counted)
    begin, end = CALLS[style].split("Berlin")
    reader = MarkedText(STYLES[style], TOOLS)
    pieces = [each for text in (begin, *["abc "] * 1000, end) for each in reader.push(text)]
    (call,) = joined_pieces([*pieces, *reader.end()])
    assert isinstance(call, CallPart)
    assert json.loads(call.arguments) == {"city": "abc " * 1000}
    assert len(reads) == 1


@pytest.mark.parametrize(
    "text", ["<tool_call><function=weather>", "<tool_call><function=other><parameter=a>"]
)
def test_of_a_call_that_is_none_nothing_is_lost(text: str) -> None:
    assert read(text + " x</tool_call>.", "qwen3coder") == ("", text + " x</tool_call>.", [])


def test_mistral_marks_reasoning_its_own_way() -> None:
    marks = MARKS[1]
    for thinking in (False, True):
        reader = MarkedText(None, thinks=True, thinking=thinking, marks=marks)
        text = ("" if thinking else "[THINK]") + "<think>Hm.[/THINK]\n\nTwo.</think>"
        pieces = [*(piece for letter in text for piece in reader.push(letter)), *reader.end()]
        thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        assert thoughts == "<think>Hm."
        assert "".join(piece for piece in pieces if isinstance(piece, str)) == "Two.</think>"


TOKENS = (
    *("<think>", "Hm", "m.", "</think>", "\n\n", "It is", " fine.", "\n"),
    *("<tool_call>", '{"name": "now", ', '"arguments": ', "{}}", "</tool_call>"),
)
WHOLE = (Reasoning("Hmm."), "It is fine.", CallPart("now", "{}"))


def choice(*tools: str, thinks: bool = True) -> MarkedChoice:
    return MarkedChoice(MarkedText(STYLES["hermes"], tools, thinks=thinks))


def test_an_answer_is_the_same_however_it_is_cut() -> None:
    text = "".join(TOKENS)
    for size in (1, 3, 7, len(text)):
        reader = choice("now")
        parts = [part for at in range(0, len(text), size) for part in reader.push(text[at : at + size])]
        assert joined_pieces([*parts, *reader.finish()]) == WHOLE
        assert reader.reason("stop") == "tool_calls"
        assert reader.reason("length") == "length"


def test_white_space_before_the_text_is_dropped() -> None:
    reader = choice(thinks=False)
    parts = [
        *reader.push("\n"),
        *reader.push(" \nYes"),
        *reader.push("\n no"),
        *reader.finish(),
    ]
    assert joined_pieces(parts) == ("Yes\n no",)
    assert reader.reason("stop") == "stop"


def test_it_has_no_segments() -> None:
    with pytest.raises(ValueError, match="segment"):
        choice().push("x", [Segment(0, "assistant")])


@pytest.mark.parametrize("cut", range(len("\n</tool_call>")))
def test_a_closing_mark_that_breaks_off_is_no_text(cut: int) -> None:
    call = CALLS["hermes"]
    assert read(call[: len(call) - cut], "hermes") == ("", "", [BERLIN])
