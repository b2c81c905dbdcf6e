from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from triton_models.errors import CheckpointError, TextError
from triton_models.text.tokenizers import TOKENIZER_FILE, Tokenizer, load_tokenizer
from triton_models.text.tokenizers import sentence_pieces as module
from triton_models.text.tokenizers.sentence_pieces import SPECIAL_TOKENS

GOLDEN = Path(__file__).parents[3] / "golden"
TOKENIZER = load_tokenizer(GOLDEN / "chatglm3", "chatglm3")
PIECES = TOKENIZER.size - len(SPECIAL_TOKENS["chatglm3"])


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_text_and_ids_are_the_originals(
    name: str, golden: Callable[[str], dict[str, Any]], tokenizers: dict[str, Tokenizer]
) -> None:
    samples = golden(name)["tokenize"]
    assert [tokenizers[name].encode(each["text"]) for each in samples] == [each["ids"] for each in samples]
    assert [tokenizers[name].decode(each["ids"]) for each in samples] == [each["decoded"] for each in samples]
    assert {"", " ", "\n", "  lead"} <= {each["text"] for each in samples}


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_special_ids_follow_the_pieces(
    name: str, golden: Callable[[str], dict[str, Any]], tokenizers: dict[str, Tokenizer]
) -> None:
    assert tokenizers[name].special_ids == golden(name)["special_tokens"]
    assert tokenizers[name].size == golden(name)["n_words"]
    assert tokenizers[name].eos_id == 2


@given(
    st.lists(st.sampled_from(["<|user|>", "<|assistant|>", "[gMASK]", "sop", "</s>", "<0x0A>", "\n", "x"]))
)
def test_no_text_encodes_to_a_special_or_control_id(parts: list[str]) -> None:
    ids = TOKENIZER.encode("".join(parts))
    assert all(2 < token_id < PIECES for token_id in ids)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_text_comes_back_whole(text: str) -> None:
    # U+2581 is how SentencePiece writes a space, so the two cannot be told apart.
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(TextError, match="lone surrogate at character 2"):
        TOKENIZER.encode("ab\ud800")


@pytest.mark.parametrize("token_id", [-1, 0, 1, 2, PIECES, TOKENIZER.size - 1, TOKENIZER.size, 10**9])
def test_ids_without_text_decode_to_nothing_and_separate(token_id: int) -> None:
    first, last = TOKENIZER.encode("The")[0], TOKENIZER.encode("question")
    assert TOKENIZER.decode([token_id]) == ""
    assert TOKENIZER.decode([token_id, first, token_id, *last]) == "The question"
    wide = TOKENIZER.encode("☃")[1:]
    assert TOKENIZER.decode(wide) == "☃"
    assert TOKENIZER.decode([wide[0], token_id, *wide[1:]]) == "\ufffd" * 3


def test_decoding_is_sentencepieces_own() -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(GOLDEN / "chatglm3" / TOKENIZER_FILE))
    for token_id in range(3, PIECES):
        assert TOKENIZER.decode([token_id, token_id]) == processor.decode([token_id, token_id])


def test_display_names_what_is_no_text_and_spells_bytes() -> None:
    byte = {TOKENIZER.piece(token_id): token_id for token_id in range(3, 259)}
    shown = TOKENIZER.display
    assert shown(TOKENIZER.encode("The")[0]) == (" The", b" The")
    assert shown(byte[b"\n"]) == ("\n", b"\n")
    assert shown(byte[b"\xe4"]) == ("\\xe4", b"\xe4")
    assert shown(2) == ("</s>", b"")
    assert shown(TOKENIZER.special_ids["<|user|>"]) == ("<|user|>", b"")
    assert shown(TOKENIZER.size) == (f"<unused {TOKENIZER.size}>", b"")


def test_displayed_bytes_join_to_the_text() -> None:
    text = "emoji 👋 and 春天"
    shown = b"".join(TOKENIZER.display(token_id)[1] for token_id in TOKENIZER.encode(text))
    assert shown.decode() == " " + text


def test_threads_share_one_tokenizer() -> None:
    texts = [f"{number} streams 春天学生 {number}" for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: TOKENIZER.decode(TOKENIZER.encode(text)), texts)) == texts


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: cannot be read: No such file"):
        load_tokenizer(tmp_path, "chatglm3")


@pytest.mark.parametrize("kept", [0, 100, 9000])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    whole = (GOLDEN / "chatglm3" / TOKENIZER_FILE).read_bytes()
    (tmp_path / TOKENIZER_FILE).write_bytes(whole[:kept])
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: "):
        load_tokenizer(tmp_path, "chatglm3")


def _train(file: Path, **options: Any) -> None:
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(["one two three", "two three one two"]),
        model_prefix=str(file.with_suffix("")),
        vocab_size=20,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"remove_extra_whitespaces": True},
        {"remove_extra_whitespaces": False, "add_dummy_prefix": False},
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    _train(tmp_path / TOKENIZER_FILE, **options)
    with pytest.raises(CheckpointError, match="treats leading spaces differently"):
        load_tokenizer(tmp_path, "chatglm3")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(TextError, match="unknown chat format 'glm5'; there are chatglm2, chatglm3, glm4"):
        load_tokenizer(GOLDEN / "chatglm3", "glm5")


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_ids_become_a_list_in_slices(text: str) -> None:
    """One call for a million would hold the interpreter lock for 15 ms."""
    ids = TOKENIZER.encode(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "SLICE", 2)
        assert TOKENIZER.encode(text) == ids
