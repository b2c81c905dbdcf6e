import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace, Sequence

from tests.template_checkpoint import ANSWER, SPECIAL, write_tokenizer
from triton_models.errors import CheckpointError, TextError
from triton_models.text.answer import Detokenizer
from triton_models.text.json_tokenizer import JsonTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return JsonTokenizer(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some.text(alphabet=some.characters(exclude_categories=["Cs"]), max_size=40))
def test_text_comes_back(tokenizer: JsonTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    detokenizer = Detokenizer(tokenizer, continues=True)
    assert "".join(detokenizer.push(each) for each in ids) == text


def test_no_text_becomes_a_special_token(tokenizer: JsonTokenizer) -> None:
    special = set(tokenizer.special_ids.values())
    assert set(tokenizer.special_ids) == set(SPECIAL)
    for name in SPECIAL:
        ids = tokenizer.encode(f"a{name}b")
        assert special.isdisjoint(ids)
        assert tokenizer.decode(ids) == f"a{name}b"


def test_special_tokens_are_no_text_and_other_added_ones_are(tokenizer: JsonTokenizer) -> None:
    end = tokenizer.special_ids["<|im_end|>"]
    assert (tokenizer.end_ids, tokenizer.eos_id) == ([end], end)
    assert tokenizer.piece(end) == ""
    assert tokenizer.display(end) == ("<|im_end|>", b"")
    assert tokenizer.encode(ANSWER[0]) == [end + 1]
    assert tokenizer.piece(end + 1) == b"<think>"


def test_what_ends_an_answer_is_what_the_generation_says(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}), encoding="utf-8")
    assert JsonTokenizer(tmp_path).end_ids[1:] == [7]
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [8, 9]}), encoding="utf-8")
    assert JsonTokenizer(tmp_path).end_ids[1:] == [8, 9]


def test_pieces_of_sentencepiece(tmp_path: Path) -> None:
    """As Llama 2 and Mistral have them: spaces as a block, one before every text, and bytes for the rest."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "h": 257, "i": 258, "▁h": 259}
    made = Tokenizer(BPE(vocabulary, [("▁", "h")], byte_fallback=True, fuse_unk=True))
    made.normalizer = Sequence([Prepend("▁"), Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 260}), encoding="utf-8")
    tokenizer = JsonTokenizer(tmp_path)
    for text in ("hi", "hi hi", "h é h"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == made.decode(ids) == text


@pytest.mark.parametrize("text", ["\ud800", "a\udfff"])
def test_lone_surrogates_are_refused(tokenizer: JsonTokenizer, text: str) -> None:
    with pytest.raises(TextError, match="surrogate"):
        tokenizer.encode(text)


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        JsonTokenizer(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="eos"):
        JsonTokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8")) | {"decoder": None}
    file.write_text(json.dumps(document), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="neither of bytes"):
        JsonTokenizer(tmp_path)
