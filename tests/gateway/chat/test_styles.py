import pytest

from gateway.chat.marked import MarkedText
from gateway.chat.styles import STYLES, style_of
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
    ],
)
def test_templates_give_their_style_away(template: str, style: str) -> None:
    found = style_of(lambda mark: mark in template)
    assert found is not None
    assert found.name == style
    assert style_of(lambda _: False) is None


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
