import base64
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from tests.glm4_checkpoint import RANKS, byte_pairs, write_tokenizer
from triton_models.directory import TOKENIZER_FILE
from triton_models.errors import CheckpointError, LibraryPanicError, TextError
from triton_models.text import tokenizers as module
from triton_models.text.answer import Detokenizer
from triton_models.text.tokenizers import (
    LONGEST_BLANK,
    SPECIAL_TOKENS,
    Tokenizer,
    bad_word_ids,
    load_tokenizer,
    parts,
    shown_tokens,
)

GOLDEN = Path(__file__).parents[2] / "golden"
TOKENIZER = load_tokenizer(GOLDEN / "chatglm3", "chatglm3")
PIECES = TOKENIZER.size - len(SPECIAL_TOKENS["chatglm3"])


@pytest.mark.parametrize("name", ["chatglm2", "chatglm3"])
def test_text_and_ids_are_the_originals(
    name: str, golden: Callable[[str], dict[str, Any]], tokenizers: dict[str, Tokenizer]
) -> None:
    samples = golden(name)["tokenize"]
    assert [tokenizers[name].encode(each["text"]) for each in samples] == [each["ids"] for each in samples]
    assert [tokenizers[name].decode(each["ids"]) for each in samples] == [each["decoded"] for each in samples]
    assert {"", " ", "\n", "  lead"} <= {each["text"] for each in samples}


@pytest.mark.parametrize("name", ["chatglm2", "chatglm3"])
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


@pytest.mark.parametrize("name", ["chatglm3", "glm4"])
def test_a_lone_surrogate_is_refused(tokenizers: dict[str, Tokenizer], name: str) -> None:
    with pytest.raises(TextError, match="lone surrogate at character 2"):
        tokenizers[name].encode("ab\ud800")


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


@pytest.mark.parametrize("name", ["chatglm3", "glm4"])
def test_threads_share_one_tokenizer(tokenizers: dict[str, Tokenizer], name: str) -> None:
    shared = tokenizers[name]
    texts = [f"{number} streams 春天学生 {number}" for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: shared.decode(shared.encode(text)), texts)) == texts


@pytest.mark.parametrize("name", ["chatglm3", "glm4"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: cannot be read: No such file"):
        load_tokenizer(tmp_path, name)


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


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_ids_become_a_list_in_slices(text: str) -> None:
    """One call for a million would hold the interpreter lock for 15 ms."""
    ids = TOKENIZER.encode(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "SLICE", 2)
        assert TOKENIZER.encode(text) == ids


PUBLISHED_RANKS = 151_329


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("glm4")
    write_tokenizer(directory)
    return directory


def test_special_ids_follow_the_ranks_as_published(glm4: Tokenizer) -> None:
    published = {
        "<|endoftext|>": 151329,
        "[gMASK]": 151331,
        "<sop>": 151333,
        "<|system|>": 151335,
        "<|user|>": 151336,
        "<|assistant|>": 151337,
        "<|observation|>": 151338,
    }
    for name, token_id in published.items():
        assert glm4.special_ids[name] - RANKS == token_id - PUBLISHED_RANKS
    assert glm4.eos_id == RANKS
    assert glm4.size == RANKS + len(SPECIAL_TOKENS["glm4"])


def test_bytes_are_merged_by_rank_within_words(glm4: Tokenizer) -> None:
    tokens = byte_pairs()
    assert [tokens[token_id] for token_id in glm4.encode("你好\n你好")] == [
        "你好".encode(),
        b"\n",
        "你好".encode(),
    ]
    assert [tokens[token_id] for token_id in glm4.encode("Zz")] == [b"Z", b"z"]
    # Numbers are cut in threes, and a word has the one space before it.
    assert [len(tokens[token_id]) for token_id in glm4.encode("1234")] == [1, 1, 1, 1]
    assert b" the" in tokens
    assert tokens.index(b" the") in glm4.encode("over the dog")


@given(text=st.lists(st.sampled_from([*SPECIAL_TOKENS["glm4"], "</s>", "\n", "x"])).map("".join))
def test_no_text_encodes_to_a_special_id(glm4: Tokenizer, text: str) -> None:
    assert all(0 <= token_id < RANKS for token_id in glm4.encode(text))


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_comes_back_whole_at_one_go_and_token_by_token(glm4: Tokenizer, text: str) -> None:
    ids = glm4.encode(text)
    assert glm4.decode(ids) == text
    detokenizer = Detokenizer(glm4)
    assert "".join(detokenizer.push(token_id) for token_id in ids) == text


@given(ids=st.lists(st.integers(-1, RANKS + 20)))
def test_any_ids_token_by_token_are_those_at_one_go(glm4: Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(glm4)
    pushed = "".join(detokenizer.push(token_id) for token_id in ids)
    whole = glm4.decode(ids)
    # The bytes of a character cut off at the very end are never pushed.
    assert whole.startswith(pushed)
    assert set(whole[len(pushed) :]) <= {"\ufffd"}


def test_a_character_waits_until_it_is_whole(glm4: Tokenizer) -> None:
    wide = glm4.encode("☃")
    assert len(wide) == 3
    detokenizer = Detokenizer(glm4)
    assert [detokenizer.push(token_id) for token_id in wide] == ["", "", "☃"]
    assert glm4.decode([wide[0], RANKS, *wide[1:]]) == "\ufffd" * 3


@pytest.mark.parametrize("blank", [" ", "\u3000", "\n", " \n"])
def test_endless_white_space_is_merged_in_parts(glm4: Tokenizer, blank: str) -> None:
    """The matching of words looks ahead over all of it, and gives up where it is a million characters."""
    text = "a" + blank * 1_100_000 + "b"
    assert glm4.decode(glm4.encode(text)) == text


def test_parts_of_white_space_change_nothing_below_their_length(glm4: Any) -> None:
    text = "a" + " " * LONGEST_BLANK + "b"
    assert glm4.encode(text) == glm4._encoding.encode_ordinary(text)


def test_white_space_is_cut_behind_every_so_many_characters_that_have_more() -> None:
    whole = " " * LONGEST_BLANK
    assert list(parts("")) == [""]
    assert list(parts("a" + whole + "b")) == ["a" + whole + "b"]
    assert list(parts("a" + whole + whole + "\n b")) == ["a" + whole, whole, "\n b"]


def test_runs_just_short_of_the_cut_are_looked_over_once() -> None:
    """Once from each of their characters would take hours, and nobody else would have the interpreter."""
    text = (" " * (LONGEST_BLANK - 1) + "a") * 512
    assert list(parts(text)) == [text]


def test_a_panic_is_an_error(glm4: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own: white space that was not cut."""
    monkeypatch.setattr(module, "LONGEST_BLANK", 2**30)
    with pytest.raises(LibraryPanicError, match="tiktoken"):
        glm4.encode(" " * 1_100_000 + "a")


def test_display_names_what_is_no_text_and_spells_bytes_of_byte_pairs(glm4: Tokenizer) -> None:
    assert glm4.display(glm4.encode("你好")[0]) == ("你好", "你好".encode())
    assert glm4.display(0xE4) == ("\\xe4", b"\xe4")
    assert glm4.display(10) == ("\n", b"\n")
    assert glm4.display(glm4.special_ids["<|user|>"]) == ("<|user|>", b"")
    assert glm4.display(glm4.size) == (f"<unused {glm4.size}>", b"")
    text = "emoji 👋 and 春天"
    assert b"".join(glm4.display(token_id)[1] for token_id in glm4.encode(text)).decode() == text


def test_the_order_of_the_lines_does_not_matter(tmp_path: Path, directory: Path, glm4: Tokenizer) -> None:
    lines = (directory / TOKENIZER_FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / TOKENIZER_FILE).write_bytes(b"".join(reversed(lines)))
    assert load_tokenizer(tmp_path, "glm4").encode("你好 weather") == glm4.encode("你好 weather")


def _line(token: bytes, rank: int) -> bytes:
    return base64.b64encode(token) + b" %d\n" % rank


ALL = [_line(bytes([byte]), byte) for byte in range(256)]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "is empty"),
        ([*ALL, b"YQ\n"], "line 257 is no token in base64 with its rank"),
        ([*ALL, b"YWI= x\n"], "line 257 is no token in base64 with its rank"),
        ([*ALL, b"YW I= 256\n"], "line 257 is no token in base64 with its rank"),
        ([*ALL, b"Y* 256\n"], "line 257 is no token in base64 with its rank"),
        ([*ALL, _line(b"a", 256)], "line 257 has a token that stood before"),
        ([*ALL, _line(b"ab", 257)], "the ranks are not 0 to 256, each once"),
        ([*ALL, _line(b"ab", 255)], "the ranks are not 0 to 256, each once"),
        ([*ALL[:255], _line(b"ab", 255)], "not every byte is a token"),
        ([*ALL, b"= 256\n"], "line 257 is no token|an empty one is"),
        ([b"\x0a\x12sentencepiece\xff"], "line 1 is no token"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, lines: list[bytes], why: str) -> None:
    (tmp_path / TOKENIZER_FILE).write_bytes(b"".join(lines))
    with pytest.raises(CheckpointError, match=rf"tokenizer\.model: .*({why})"):
        load_tokenizer(tmp_path, "glm4")


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
