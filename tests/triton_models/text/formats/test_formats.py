import pytest

from triton_models.text.formats import chat_format
from triton_models.text.tokenizers import SPECIAL_TOKENS, Tokenizer


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_every_format_goes_by_its_name(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    assert chat_format(name, tokenizers[name]).name == name


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_plain_text_gets_the_tokenizers_prefix_and_nothing_else(
    name: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[name]
    made = chat_format(name, tokenizer)
    prefix = [tokenizer.special_ids["[gMASK]"], tokenizer.special_ids["<sop>" if name == "glm4" else "sop"]]
    for text in ("a <|user|>\n", " hi", ""):
        assert made.render_text(text) == [*prefix, *tokenizer.encode(text)]
