import pytest

from gateway.chat.marked import MarkedText
from gateway.chat.styles import STYLES, style_of
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
