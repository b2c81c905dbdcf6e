import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_models.text.answer import Detokenizer
from triton_models.text.tokenizers import Tokenizer, shown_tokens


@pytest.mark.parametrize("name", ["chatglm2", "chatglm3", "glm4"])
@given(texts=st.lists(st.text(), max_size=3), special=st.booleans())
def test_the_bytes_are_those_of_the_text(
    tokenizers: dict[str, Tokenizer], name: str, texts: list[str], special: bool
) -> None:
    tokenizer = tokenizers[name]
    opens = tokenizer.special_ids["<|user|>" if name != "chatglm2" else "sop"]
    ids = [token_id for text in texts for token_id in (opens, *tokenizer.encode(text))]
    detokenizer = Detokenizer(tokenizer, special=special)
    text = "".join(detokenizer.push(token_id) for token_id in ids)
    shown = list(shown_tokens(tokenizer, ids, special=special))
    assert len(shown) == len(ids)
    assert b"".join(utf8 for _, utf8 in shown).decode() == text


def test_a_texts_first_space_is_in_no_token(chatglm3: Tokenizer) -> None:
    prefix = [chatglm3.special_ids[name] for name in ("[gMASK]", "sop")]
    shown = [token for token, _ in shown_tokens(chatglm3, [*prefix, *chatglm3.encode("The question")])]
    assert shown[:2] == ["[gMASK]", "sop"]
    assert "".join(shown[2:]) == "The question"
