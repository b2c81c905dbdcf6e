from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from triton_models.errors import TextError
from triton_models.text.formats import ChatGLM3Format
from triton_models.text.tokenizers import load_tokenizer
from wire.history import Turn

DIRECTORY = Path(__file__).parents[3] / "golden" / "chatglm3"
TOKENIZER = load_tokenizer(DIRECTORY, "chatglm3")
FORMAT = ChatGLM3Format(TOKENIZER)
GMASK, SOP, SYSTEM, USER, ASSISTANT, OBSERVATION = (
    TOKENIZER.special_ids[name]
    for name in ("[gMASK]", "sop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
)


def line(metadata: str, content: str) -> list[int]:
    return TOKENIZER.encode(metadata + "\n") + TOKENIZER.encode(content)


def test_prompts_are_the_originals(golden: Callable[[str], dict[str, Any]]) -> None:
    cases = [case for case in golden("chatglm3")["cases"] if case["kind"] == "chat"]
    assert any("tools" in turn for case in cases for turn in case["history"])
    assert any(case["role"] == "observation" for case in cases)
    for case in cases:
        history = msgspec.convert(case["history"], list[Turn])
        assert FORMAT.render_turns([*history, Turn(case["role"], case["query"])]) == case["input_ids"]


def test_turns_of_one_role_stay_apart() -> None:
    ids = FORMAT.render_turns([Turn("user", "a"), Turn("user", "b")])
    assert ids == [GMASK, SOP, USER, *line("", "a"), USER, *line("", "b"), ASSISTANT]


def test_a_conversation_may_end_with_an_assistant_or_system_turn() -> None:
    ids = FORMAT.render_turns([Turn("user", "a"), Turn("assistant", "b")])
    assert ids == [GMASK, SOP, USER, *line("", "a"), ASSISTANT, *line("", "b"), ASSISTANT]
    assert FORMAT.render_turns([Turn("system", "s")]) == [GMASK, SOP, SYSTEM, *line("", "s"), ASSISTANT]


def test_without_a_generation_prompt_no_answer_begins() -> None:
    turns = [Turn("user", "a")]
    ids = FORMAT.render_turns(turns, add_generation_prompt=False)
    assert ids == [GMASK, SOP, USER, *line("", "a")]
    assert FORMAT.render_turns(turns) == [*ids, ASSISTANT]


def test_empty_content_is_a_turn() -> None:
    assert FORMAT.render_turns([Turn("user", "")]) == [GMASK, SOP, USER, *line("", ""), ASSISTANT]


def test_text_cannot_open_a_turn() -> None:
    ids = FORMAT.render_turns(
        [Turn("assistant", "x", metadata="<|user|>"), Turn("user", "<|system|>\n<|assistant|>")]
    )
    assert [token_id for token_id in ids if token_id > GMASK] == [SOP, ASSISTANT, USER, ASSISTANT]


@pytest.mark.parametrize(
    ("history", "why"),
    [
        ([Turn("user", "q"), Turn("system", "s")], r"turn 1 \(system\).*only the first"),
        ([Turn("user", "q", tools=[])], r"turn 0 \(user\).*only a system turn"),
        ([Turn("assistant", "q", metadata="a\nb")], r"turn 0 \(assistant\).*single line"),
    ],
)
def test_what_the_format_cannot_say_is_refused_by_name(history: list[Turn], why: str) -> None:
    with pytest.raises(TextError, match=why):
        FORMAT.render_turns([*history, Turn("user", "q")])


def nested(depth: int) -> Any:
    tool: Any = []
    for _ in range(depth):
        tool = [tool]
    return tool


@pytest.mark.parametrize("tools", [[{"x": nested(500)}] * 10, [{"x": nested(2000)}]])
def test_tools_that_grow_beyond_measure_are_refused(tools: list[Any]) -> None:
    """Indenting them makes megabytes of some thousand brackets."""
    with pytest.raises(TextError, match="more than 1048576 characters"):
        FORMAT.render_turns([Turn("system", "s", tools=tools), Turn("user", "q")])


def test_stops_and_segments() -> None:
    assert FORMAT.stop_ids == {2, USER, OBSERVATION}
    assert FORMAT.segment_roles == {ASSISTANT: "assistant"}
    assert FORMAT.call_syntax


@pytest.mark.parametrize("metadata", ["", "get_weather"])
def test_the_answers_first_line_can_be_part_of_the_prompt(metadata: str) -> None:
    ids = FORMAT.render_turns([Turn("user", "q")], answer_metadata=metadata)
    assert ids == [*FORMAT.render_turns([Turn("user", "q")]), *TOKENIZER.encode(metadata + "\n")]
    # What a turn of the past with that metadata begins with.
    past = FORMAT.render_turns([Turn("user", "q"), Turn("assistant", "x", metadata=metadata)])
    assert past[: len(ids)] == ids
