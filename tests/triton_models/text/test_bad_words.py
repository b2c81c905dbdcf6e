import pytest

from triton_models.text.bad_words import bad_word_ids
from triton_models.text.tokenizers import Tokenizer

NAMES = ("chatglm2", "chatglm3", "glm4")


def contains(ids: list[int], sequence: tuple[int, ...]) -> bool:
    return any(tuple(ids[at : at + len(sequence)]) == sequence for at in range(len(ids)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("word", ["hello", "你好", "the", "3.14"])
@pytest.mark.parametrize("text", ["{}", "so {}", "(\n{}", "\n{} and more"])
def test_a_word_is_found_at_the_start_behind_a_space_and_within_a_text(
    tokenizers: dict[str, Tokenizer], name: str, word: str, text: str
) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text.format(word))
    assert any(contains(ids, each) for each in bad_word_ids(tokenizer, [word]))


@pytest.mark.parametrize("name", NAMES)
def test_space_before_a_word_does_not_count(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    found = bad_word_ids(tokenizer, ["hello"])
    assert bad_word_ids(tokenizer, ["  hello", "hello"]) == found
    assert len(set(found)) == len(found)
    assert all(found)


@pytest.mark.parametrize("name", NAMES)
def test_words_of_nothing_but_space_are_words(tokenizers: dict[str, Tokenizer], name: str) -> None:
    assert all(bad_word_ids(tokenizers[name], [" ", "\n"]))
