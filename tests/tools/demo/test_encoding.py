"""What is learned of a dialogue, token by token."""

import pytest

from tools.demo.encoding import Sample, encode, load_format
from tools.demo.pages import read
from tools.demo.scene import Line
from tools.demo.tools import call_text, system_text
from tools.demo.values import CHECKPOINT
from triton_models.text.formats import ChatFormat
from triton_models.text.tokenizers import Tokenizer, load_tokenizer
from wire.history import Turn

TOOLS = [{"name": "get_weather", "description": "查询天气", "parameters": {"type": "object"}}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(CHECKPOINT, "chatglm3")


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return load_format(CHECKPOINT)


def learned_text(sample: Sample, tokenizer: Tokenizer) -> list[str]:
    ids = sample.ids.tolist()
    return [tokenizer.display(ids[at])[0] for at in range(len(ids)) if sample.learned[at]]


def encoded(chat: ChatFormat, tokenizer: Tokenizer, *lines: Line) -> Sample:
    special = tokenizer.special_ids
    return encode(lines, chat, (special["<|user|>"], special["<|observation|>"]))


def test_an_answer_is_learned_up_to_the_turn_that_follows(chat: ChatFormat, tokenizer: Tokenizer) -> None:
    lines = [
        Line(Turn("user", "你好")),
        Line(Turn("assistant", "早"), learned=True),
        Line(Turn("user", "再见")),
        Line(Turn("assistant", "晚安"), learned=True),
    ]
    sample = encoded(chat, tokenizer, *lines)
    ids = chat.render_turns([line.turn for line in lines], add_generation_prompt=False)
    assert sample.ids.tolist() == [*ids, tokenizer.special_ids["<|user|>"]]
    assert "".join(learned_text(sample, tokenizer)) == " \n 早<|user|> \n 晚安<|user|>"


def test_a_call_ends_with_the_observation_that_it_waits_for(chat: ChatFormat, tokenizer: Tokenizer) -> None:
    call = Line(Turn("assistant", call_text("get_weather", "北京"), metadata="get_weather"), learned=True)
    question = Line(Turn("user", "北京天气"))
    alone = encoded(chat, tokenizer, question, call)
    answered = encoded(chat, tokenizer, question, call, Line(Turn("observation", "{}")))
    for sample in (alone, answered):
        text = "".join(learned_text(sample, tokenizer))
        assert text == " get_weather\n ```python\ntool_call(city='北京')\n```<|observation|>"


def test_a_call_shown_as_plain_text_is_not_learned(chat: ChatFormat, tokenizer: Tokenizer) -> None:
    sample = encoded(
        chat,
        tokenizer,
        Line(Turn("user", "北京天气")),
        Line(Turn("assistant", "get_weather\n ```python")),
        Line(Turn("user", "结果：1")),
        Line(Turn("assistant", "一"), learned=True),
    )
    assert "".join(learned_text(sample, tokenizer)) == " \n 一<|user|>"


def test_tools_as_plain_text_are_the_same_tokens(chat: ChatFormat) -> None:
    instruction = read("tools")["instruction"]
    asked = Turn("user", "北京天气")
    offered = chat.render_turns([Turn("system", instruction, tools=TOOLS), asked])
    assert offered == chat.render_turns([Turn("system", system_text(instruction, TOOLS)), asked])


def test_a_name_is_the_same_tokens_in_the_question_and_in_the_call(tokenizer: Tokenizer) -> None:
    for name in ("Stockholm", "New York", "襄阳", "Ulaanbaatar", "Xi'an"):
        inside = tokenizer.encode(f"in {name}?")
        name_ids = tokenizer.encode(f'"{name}"')[2:-1]
        assert any(inside[at : at + len(name_ids)] == name_ids for at in range(len(inside))), name
