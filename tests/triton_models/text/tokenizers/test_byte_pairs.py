import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.glm4_checkpoint import RANKS, byte_pairs, write_tokenizer
from triton_models.errors import CheckpointError, LibraryPanicError, TextError
from triton_models.text.answer import Detokenizer
from triton_models.text.tokenizers import TOKENIZER_FILE, Tokenizer, load_tokenizer
from triton_models.text.tokenizers import byte_pairs as module
from triton_models.text.tokenizers.byte_pairs import LONGEST_BLANK, SPECIAL_TOKENS, parts

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
    assert glm4.size == RANKS + len(SPECIAL_TOKENS)


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


@given(text=st.lists(st.sampled_from([*SPECIAL_TOKENS, "</s>", "\n", "x"])).map("".join))
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


@given(text=st.text(st.characters(exclude_categories=["Cs"])), cut=st.integers(0, 8))
def test_ids_are_decoded_in_slices(glm4: Tokenizer, text: str, cut: int) -> None:
    """One call for a million would hold the interpreter lock for 40 ms."""
    ids = glm4.encode(text)
    ids = [*ids[:cut], RANKS, *ids[cut + 1 :]]
    expected = glm4.decode(ids)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "SLICE", 2)
        assert glm4.decode(ids) == expected


@pytest.mark.parametrize("blank", [" ", "\u3000", "\n", " \n"])
def test_endless_white_space_is_merged_in_parts(glm4: Tokenizer, blank: str) -> None:
    """The matching of words looks ahead over all of it, and gives up where it is a million characters."""
    text = "a" + blank * 1_100_000 + "b"
    assert glm4.decode(glm4.encode(text)) == text


def test_parts_of_white_space_change_nothing_below_their_length(glm4: Tokenizer) -> None:
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


def test_a_lone_surrogate_is_refused(glm4: Tokenizer) -> None:
    with pytest.raises(TextError, match="lone surrogate at character 2"):
        glm4.encode("ab\ud800")


def test_display_names_what_is_no_text_and_spells_bytes(glm4: Tokenizer) -> None:
    assert glm4.display(glm4.encode("你好")[0]) == ("你好", "你好".encode())
    assert glm4.display(0xE4) == ("\\xe4", b"\xe4")
    assert glm4.display(10) == ("\n", b"\n")
    assert glm4.display(glm4.special_ids["<|user|>"]) == ("<|user|>", b"")
    assert glm4.display(glm4.size) == (f"<unused {glm4.size}>", b"")
    text = "emoji 👋 and 春天"
    assert b"".join(glm4.display(token_id)[1] for token_id in glm4.encode(text)).decode() == text


def test_threads_share_one_tokenizer(glm4: Tokenizer) -> None:
    texts = [f"{number} streams 春天学生 {number}" for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: glm4.decode(glm4.encode(text)), texts)) == texts


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


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: cannot be read: No such file"):
        load_tokenizer(tmp_path, "glm4")
