import pytest

from triton_models.errors import TextError
from triton_models.serving import tokenizing
from triton_models.serving.chat_text import ChatText
from triton_models.serving.tokenizing import tokenize
from wire.grammar import Grammar
from wire.history import Turn
from wire.sampling import Generation
from wire.tokenizing import Tokenizing


def test_a_conversation_has_the_ids_that_a_generation_has(text: ChatText) -> None:
    turns = [Turn("system", "s", tools=[{"name": "f"}]), Turn("user", "你好")]
    rendered = tokenize(text, Tokenizing(messages=turns), text.tokenizer.size)
    assert rendered.ids == text.prompt_ids(Generation(), turns[-1].content, turns[:-1])
    assert rendered.strings is None
    open_end = tokenize(text, Tokenizing(messages=turns, add_generation_prompt=False), text.tokenizer.size)
    assert open_end.ids == rendered.ids[:-1]


@pytest.mark.parametrize("first_line", ["", "now"])
def test_an_answer_that_has_begun_is_in_its_ids(text: ChatText, first_line: str) -> None:
    asked = Tokenizing(messages=[Turn("user", "a")], answer_metadata=first_line)
    ids = tokenize(text, asked, text.tokenizer.size).ids
    assert ids == text.prompt_ids(Generation(answer_metadata=first_line), "a", [])
    if not first_line:
        assert ids == text.prompt_ids(Generation(grammar=Grammar("json_object")), "a", [])
    assert len(ids) > len(tokenize(text, Tokenizing(messages=[Turn("user", "a")]), text.tokenizer.size).ids)


def test_text_has_the_ids_of_a_raw_prompt_with_its_prefix(text: ChatText) -> None:
    with_prefix, bare = (
        tokenize(text, Tokenizing(text=" a👋", prefix=prefix), text.tokenizer.size)
        for prefix in (True, False)
    )
    assert with_prefix.ids == text.prompt_ids(Generation(raw=True), " a👋", [])
    assert with_prefix.ids[2:] == bare.ids == text.tokenizer.encode(" a👋")
    assert with_prefix.text == bare.text == " a👋"


def test_each_id_is_shown_where_that_is_asked_for(text: ChatText) -> None:
    shown = tokenize(text, Tokenizing(text="a👋", prefix=True, strings=True), text.tokenizer.size).strings
    assert shown is not None
    assert shown[:2] == ["[gMASK]", "sop"]
    assert "".join(shown[2:]).strip() == "a\\xf0\\x9f\\x91\\x8b"


def test_ids_that_the_model_does_not_have_are_refused(text: ChatText) -> None:
    size = text.tokenizer.size
    assert tokenize(text, Tokenizing(ids=[size - 1]), size).ids == [size - 1]
    with pytest.raises(TextError, match="at place 1: the model has"):
        tokenize(text, Tokenizing(ids=[0, size]), size)


def test_more_ids_than_any_context_has_are_not_told(text: ChatText, monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(tokenize(text, Tokenizing(text="a👋"), text.tokenizer.size).ids)
    monkeypatch.setattr(tokenizing, "IDS_LIMIT", count)
    tokenize(text, Tokenizing(text="a👋"), text.tokenizer.size)
    with pytest.raises(TextError, match=f"{count + 2} tokens, and at most {count} are told"):
        tokenize(text, Tokenizing(text="a👋", prefix=True), text.tokenizer.size)
