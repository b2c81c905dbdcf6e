import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.marked import MarkedText
from gateway.chat.styles import STYLES, possible_beginning, style_of
from gateway.core.events import CallPart, joined_pieces
from tests.gateway.chat.test_marked import BERLIN, CALLS, TOOLS, read


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call><arg_key>", "glm45"),
        ("<tool_call>\n<function=f>\n<parameter=p>", "qwen3coder"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3"),
        ("role == 'ipython'", "llama3"),
        ("<|observation|>", "glm4"),
        ("{% if tools %}<｜tool▁sep｜>", "deepseek"),
    ],
)
def test_templates_give_their_style_away(template: str, style: str) -> None:
    found = style_of(lambda mark: mark in template)
    assert found is not None
    assert found.name == style
    assert style_of(lambda _: False) is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ '<seed:tool_call>\\n<function=f>\\n<parameter=p>v</parameter>' }}",
        "{{ ']<]minimax[>[' + '<tool_call>' + ']<]minimax[>[' + '<invoke name=\"' }}",
        "<｜tool▁sep｜><steptml:invoke name='f'>{% if tools %}",
        "within <tool_call></tool_call> tags: <tool_calls>[{}]</tool_calls>",
        "<function=f>{}</function>{% if message.role == 'ipython' %}",
    ],
)
def test_calls_that_look_like_a_relatives_are_not_taken_for_them(template: str) -> None:
    assert style_of(lambda mark: mark in template) is None


def test_deepseeks_own_templates_offer_no_tools() -> None:
    """They write the calls of the past alone: a tool that is offered to them would be offered to nobody."""
    assert (
        style_of(lambda mark: mark in "{{ call['type'] + '<｜tool▁sep｜>' + call['function']['name'] }}")
        is None
    )


V3_1 = '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Berlin"}<｜tool▁call▁end｜>'
V3 = V3_1.replace("weather<｜tool▁sep｜>", "function<｜tool▁sep｜>weather\n```json\n").replace(
    "}<", "}\n```<"
)
BLOCK, BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


@pytest.mark.parametrize("cuts", [[], list(range(400))])
@pytest.mark.parametrize("call", [V3_1, V3, V3.replace("json", ""), V3.replace("\n```<", "```<")])
def test_deepseek_writes_its_calls_in_a_block(call: str, cuts: list[int]) -> None:
    for text in (f"{BLOCK}{call}\n{call}{BLOCK_END}", f"{BLOCK}\n{call}{call}\n{BLOCK_END}\n", call + call):
        assert read(text, "deepseek", cuts) == ("", "", [BERLIN] * 2)
        assert read(f"Let me look.\n{text} Done.", "deepseek", cuts) == (
            "",
            "Let me look. Done." if text[-1] != "\n" else "Let me look.\n Done.",
            [BERLIN] * 2,
        )
    unknown = BLOCK + call.replace("weather", "steal") + BLOCK_END
    assert read(unknown, "deepseek", cuts) == ("", unknown, [])
    broken = BLOCK + V3_1.replace('"}', '"') + BLOCK_END + "No."
    assert read(broken, "deepseek", cuts) == ("", "No.", [CallPart("weather", '{"city": "Berlin"')])


def test_a_tool_of_deepseek_may_be_called_function() -> None:
    reader = MarkedText(STYLES["deepseek"], ["function"])
    pieces = [*reader.push(BLOCK + V3_1.replace("weather", "function") + BLOCK_END), *reader.end()]
    assert joined_pieces(pieces) == (CallPart("function", BERLIN.arguments),)


def test_talk_of_deepseeks_marks_is_not_held_back() -> None:
    reader = MarkedText(STYLES["deepseek"], TOOLS)
    text = f"Between {BLOCK} and {BLOCK_END} are calls, each behind <｜tool▁call▁begin｜> or so."
    assert "".join(str(piece) for each in text for piece in reader.push(each)) == text


@pytest.mark.parametrize("cuts", [[], list(range(200))])
@pytest.mark.parametrize("before", ["", "Let me look.\n\n"])
@pytest.mark.parametrize("left_out", ["<tool_call>\n", "</function>\n", "<tool_call>\n|\n</tool_call>"])
def test_qwen3_coder_may_leave_out_marks_around_its_calls(
    left_out: str, before: str, cuts: list[int]
) -> None:
    call = CALLS["qwen3coder"]
    for mark in left_out.split("|"):
        assert mark in call
        call = call.replace(mark, "")
    said = before.strip()
    assert read(before + call, "qwen3coder", cuts) == ("", said, [BERLIN])
    assert read(before + call + "\n" + call, "qwen3coder", cuts) == ("", said, [BERLIN] * 2)


def test_talk_of_a_function_is_not_held_back() -> None:
    reader = MarkedText(STYLES["qwen3coder"], TOOLS)
    text = "Write `<function=name>` around the code, then `<tool_call>` and `<function=x y>`."
    assert "".join(str(piece) for each in text for piece in reader.push(each)) == text


def test_arguments_may_be_written_as_text() -> None:
    text = '{"name": "weather", "parameters": "{\\"city\\": \\"Berlin\\"}"}'
    assert read(text, "llama3") == read(f"<tool_call>{text}</tool_call>", "hermes") == ("", "", [BERLIN])


@given(text=st.text("ab<", max_size=12), mark=st.text("ab<", max_size=6))
def test_the_longest_possible_beginning_is_found(text: str, mark: str) -> None:
    lengths = range(1, min(len(text) + 1, len(mark)))
    longest = max((length for length in lengths if text[-length:] == mark[:length]), default=0)
    assert possible_beginning(text, mark) == longest


@pytest.mark.parametrize(
    ("text", "looks"), [("b" * 1000, 0), ("b" * 500 + "<" + "b" * 499, 1)], ids=["nowhere", "once"]
)
def test_a_mark_is_looked_for_only_where_it_may_begin(text: str, looks: int) -> None:
    """A client's stop string may have a thousand characters, and is looked for with each token."""
    looked = 0

    class Mark(str):
        __slots__ = ()

        def startswith(self, *args: Any) -> bool:
            nonlocal looked
            looked += 1
            return super().startswith(*args)

    possible_beginning(text, Mark("<" + "a" * 1023))
    assert looked == looks


OBJECT = '~{~"name"~:~"weather"~,~"arguments"~:~{"city": "Berlin"}}'
SPACED = [
    ("hermes", f"<tool_call>{OBJECT}~</tool_call>"),
    ("glm45", "<tool_call>~weather~<arg_key>city</arg_key>~<arg_value>Berlin</arg_value>~</tool_call>"),
    (
        "qwen3coder",
        "<tool_call>~<function=weather>~<parameter=city>Berlin</parameter>~</function>~</tool_call>",
    ),
    ("mistral", f"[TOOL_CALLS]~[{OBJECT}~]"),
    ("mistral", '[TOOL_CALLS]~weather~[CALL_ID]~a1~[ARGS]~{"city": "Berlin"}'),
    ("llama3", f"<|python_tag|>{OBJECT}"),
    ("deepseek", V3.replace("begin｜>", "begin｜>~").replace("\n", "~\n~")),
    ("deepseek", V3_1.replace("begin｜>", "begin｜>~").replace("{", "~{")),
    ("glm4", 'weather\n~{"city": "Berlin"}'),
]
"""Calls; each ~ may be white space."""


@pytest.mark.parametrize(("style", "call"), SPACED)
def test_much_white_space_where_a_call_breaks_off_takes_no_time(style: str, call: str) -> None:
    """Searched in every way that it may be split, this much would take minutes."""
    assert read(call.replace("~", "\n" * 200), style)[2] == [BERLIN]
    begun, blanks = call.partition('"city"')[0].partition("city")[0].split("~"), "\n" * 200_000
    for count in range(1, len(begun)):
        text = "".join(begun[:count]) + blanks
        no_arguments = ("", "", [CallPart("weather", "{}")])  # as GLM-4.5 writes it
        assert read(text, style) in (("", text, []), no_arguments)
        assert read(text + "x", style) == ("", text + "x", [])


@pytest.mark.parametrize(("style", "call"), SPACED)
def test_white_space_that_comes_in_pieces_is_not_searched_with_each_of_them(style: str, call: str) -> None:
    searched = []
    form = STYLES[style]

    def begins(text: str) -> bool:
        searched.append(len(text))
        return form.begins(text)

    reader = MarkedText(replace(form, begins=begins), TOOLS)
    pieces = [piece for each in call.replace("~", "\n" * 500) for piece in reader.push(each)]
    assert [each for each in joined_pieces([*pieces, *reader.end()]) if isinstance(each, CallPart)] == [
        BERLIN
    ]
    assert len(searched) < 200


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", "The <tool_call> tag, `<tool_call>`, <tool_call>[1] or <tool_call>\n[[{}]] marks calls."),
        ("glm45", "The <tool_call> tag, `<tool_call>`, <tool_call>weather<b>, or <tool_call>weather\nnow."),
        ("glm45", "A <tool_call>weather <arg_key>city</arg_key> has no value."),
        ("mistral", "The [TOOL_CALLS] mark, [TOOL_CALLS][1], [TOOL_CALLS]weather is nice."),
        ("mistral", "A [TOOL_CALLS]weather[CALL_ID]a b or [TOOL_CALLS]weather[ARGS]x is none."),
        ("mistral", "Nor is [TOOL_CALLS]weather[ARG]{ or [TOOL_CALLS]今天{."),
        ("llama3", '{"type": "FeatureCollection", "name": "weather"}'),
    ],
)
def test_talk_of_calls_is_not_held_back(style: str, text: str) -> None:
    reader = MarkedText(STYLES[style], TOOLS)
    assert "".join(str(piece) for each in text for piece in reader.push(each)) == text
    assert read(text, style) == ("", text, [])


@pytest.mark.parametrize(
    "written",
    [
        pytest.param('{"arguments": ' + "[" * 5000, id="deep"),
        '{"arguments": {"a": NaN}, "name": "weather"}',
        '{"arguments": {"a": -1e999}, "name": "weather"}',
        '{"arguments": {"a": "\\ud83d"}, "name": "weather"}',
        '{"arguments": "{\\"a\\": \\"\\ud83d\\"}", "name": "weather"}',
    ],
)
@pytest.mark.parametrize("cuts", [[], list(range(100))])
@pytest.mark.parametrize(("style", "mark"), [("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]")])
def test_what_cannot_be_sent_as_json_is_no_call(style: str, mark: str, written: str, cuts: list[int]) -> None:
    assert read(mark + written, style, cuts) == ("", mark + written, [])


@pytest.mark.parametrize("cuts", [[], list(range(100))])
def test_lists_within_lists_are_no_calls(cuts: list[int]) -> None:
    text = f"<tool_call>{'[' * 5000}</tool_call>"
    assert read(text, "hermes", cuts) == ("", text, [])


LINES = "\t{'k':\n1}\x01\n"
"""Text in a string of JSON, where models leave it as it is."""


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "weather",\n"arguments": {"a":\n"%s"}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": {"a": "%s"}, "name": "weather"}\n</tool_call>'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"a": "%s"}'),
        ("llama3", '{"name": "weather", "parameters": {"a": "%s"}}'),
        ("glm4", 'weather\n{"a": "%s"}'),
    ],
)
@pytest.mark.parametrize("cuts", [[], list(range(150))])
def test_line_ends_in_strings_are_json_in_the_arguments(style: str, text: str, cuts: list[int]) -> None:
    _, said, (call,) = read(text % LINES, style, cuts)
    assert (said, json.loads(call.arguments)) == ("", {"a": LINES})


def test_line_ends_between_values_stay() -> None:
    assert read('weather\n{\n\t"a":\r\n1\n}', "glm4")[2] == [CallPart("weather", '{\n\t"a":\r\n1\n}')]
