from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from triton_models.errors import TextError
from triton_models.text.formats import ChatGLM2Format
from triton_models.text.tokenizers import Tokenizer, load_tokenizer
from wire.history import Turn

DIRECTORY = Path(__file__).parents[3] / "golden" / "chatglm2"
TOKENIZER = load_tokenizer(DIRECTORY, "chatglm2")
FORMAT = ChatGLM2Format(TOKENIZER)

COLON = "\N{FULLWIDTH COLON}"

U, A, S = "user", "assistant", "system"


def turns(*said: tuple[Any, str]) -> list[Turn]:
    return [Turn(role, content) for role, content in said]


def text_of(ids: list[int]) -> str:
    assert ids[:2] == [TOKENIZER.special_ids["[gMASK]"], TOKENIZER.special_ids["sop"]]
    return TOKENIZER.decode(ids[2:]).replace(COLON, ":")


def test_prompts_are_the_originals(golden_cases: list[dict[str, Any]]) -> None:
    for case in golden_cases:
        pairs = [turns((U, question), (A, answer)) for question, answer in case["history"]]
        history = [turn for pair in pairs for turn in pair]
        assert FORMAT.render_turns([*history, Turn("user", case["query"])]) == case["input_ids"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([(U, "q")], "[Round 1]\n\n问:q\n\n答:"),
        ([(S, "s"), (U, "q")], "[Round 1]\n\n问:s\n\nq\n\n答:"),
        ([(S, "s")], "[Round 1]\n\n问:s\n\n答:"),
        ([(S, ""), (U, "q")], "[Round 1]\n\n问:q\n\n答:"),
        ([(U, "q"), (U, "r")], "[Round 1]\n\n问:q\n\nr\n\n答:"),
        (
            [(U, "q"), (A, "a"), (A, "b"), (U, "r")],
            "[Round 1]\n\n问:q\n\n答:a\n\nb\n\n[Round 2]\n\n问:r\n\n答:",
        ),
        ([(A, "hi"), (U, "q")], "[Round 1]\n\n问:\n\n答:hi\n\n[Round 2]\n\n问:q\n\n答:"),
        (
            [(S, "s"), (A, "hi"), (U, "q")],
            "[Round 1]\n\n问:s\n\n答:hi\n\n[Round 2]\n\n问:q\n\n答:",
        ),
        ([(U, "q"), (A, ""), (U, "r")], "[Round 1]\n\n问:q\n\n答:\n\n[Round 2]\n\n问:r\n\n答:"),
        ([(U, "")], "[Round 1]\n\n问:\n\n答:"),
    ],
)
def test_every_sequence_of_turns_has_its_rounds(said: list[tuple[str, str]], expected: str) -> None:
    *history, newest = turns(*said)
    ids = FORMAT.render_turns([*history, newest])
    assert text_of(ids) == expected
    assert ids[2:] == TOKENIZER.encode(expected.replace(":", COLON))


def test_without_a_generation_prompt_no_answer_begins() -> None:
    said = turns((U, "q"), (A, "a"))
    assert text_of(FORMAT.render_turns(said, add_generation_prompt=False)) == "[Round 1]\n\n问:q\n\n答:a\n\n"
    question = FORMAT.render_turns(said[:1], add_generation_prompt=False)
    assert text_of(question) == "[Round 1]\n\n问:q\n\n"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([Turn(U, "q"), Turn("observation", "21"), Turn(U, "r")], r"turn 1 \(observation\).*no tools"),
        ([Turn(S, "s", tools=[{"name": "f"}]), Turn(U, "q")], r"turn 0 \(system\).*no tools"),
        ([Turn(U, "q"), Turn(A, "x", metadata="f"), Turn(U, "r")], r"turn 1 \(assistant\).*no tools"),
        ([Turn(U, "q"), Turn(S, "s"), Turn(U, "r")], r"turn 1 \(system\).*only the first"),
        ([Turn(U, "q"), Turn(S, "s")], r"turn 1 \(system\).*only the first"),
        ([Turn(U, "q"), Turn(A, "a")], r"turn 1 \(assistant\).*ends with a question"),
        ([Turn(A, "a")], r"turn 0 \(assistant\).*ends with a question"),
    ],
)
def test_what_the_format_cannot_say_is_refused_by_name(said: list[Turn], why: str) -> None:
    *history, newest = said
    with pytest.raises(TextError, match=why):
        FORMAT.render_turns([*history, newest])


def test_only_the_end_of_text_stops_and_nothing_opens_segments() -> None:
    assert FORMAT.stop_ids == {2}
    assert FORMAT.segment_roles == {}
    assert not FORMAT.call_syntax


@pytest.fixture
def golden_cases(golden: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    cases = [case for case in golden("chatglm2")["cases"] if case["kind"] == "chat"]
    assert cases
    return cases


def test_an_answer_has_no_metadata(chatglm2: Tokenizer) -> None:
    with pytest.raises(TextError, match="no metadata"):
        ChatGLM2Format(chatglm2).render_turns([Turn("user", "q")], answer_metadata="")
