from pathlib import Path

import pytest

from gateway.chat.conversation import chat_form
from gateway.errors import UpstreamProtocolError
from tests.glm4_checkpoint import write_tokenizer
from triton_models.directory import _NAMES
from triton_models.text.tokenizers import load_tokenizer

GOLDEN = Path(__file__).parents[2] / "golden"


def test_every_format_of_the_models_side_is_known() -> None:
    assert [chat_form(name).name for name in _NAMES] == list(_NAMES)


def test_another_is_the_models_fault() -> None:
    with pytest.raises(UpstreamProtocolError, match="'glm5' is not known to this gateway"):
        chat_form("glm5")


@pytest.mark.parametrize("name", _NAMES)
def test_special_tokens_are_named_as_the_tokenizer_names_them(name: str, tmp_path: Path) -> None:
    if name == "glm4":
        write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path if name == "glm4" else GOLDEN / name, name)
    form = chat_form(name).tokenizer
    assert tokenizer.display(tokenizer.eos_id)[0] == form.eos_token
    names = {tokenizer.display(token_id)[0] for token_id in range(tokenizer.size)}
    assert form.pad_token in names
