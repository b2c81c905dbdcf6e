from pathlib import Path

import pytest

from tests.template_checkpoint import write_tokenizer
from triton_models.errors import TextError
from triton_models.text.formats import chat_format
from triton_models.text.json_tokenizer import JsonTokenizer
from wire.history import Turn


def test_it_takes_text_and_no_conversation(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = JsonTokenizer(tmp_path)
    made = chat_format("template", tokenizer)
    assert made.render_text("hello") == tokenizer.encode("hello")
    assert made.stop_ids == {tokenizer.eos_id}
    assert not made.call_syntax
    with pytest.raises(TextError, match="send them to the gateway"):
        made.render_turns([Turn("user", "hello")])
