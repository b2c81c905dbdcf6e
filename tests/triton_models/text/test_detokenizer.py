import codecs
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triton_models.text.answer import Detokenizer
from triton_models.text.tokenizers import Tokenizer, load_tokenizer

TOKENIZER = load_tokenizer(Path(__file__).parents[2] / "golden" / "chatglm3", "chatglm3")
BYTES = {value: 3 + value for value in range(256)}
SPACE = TOKENIZER.encode(" ")[0]

byte_ids = st.sampled_from(sorted(BYTES.values()))
# Valid characters cut apart, invalid bytes, pieces, spaces, control, special and meaningless ids.
ids = st.lists(
    st.one_of(
        st.integers(0, TOKENIZER.size + 60).map(lambda token_id: [token_id]),
        st.just([SPACE]),
        st.text(max_size=3).map(
            lambda text: [BYTES[value] for value in text.encode("utf-8", "surrogatepass")][:5]
        ),
        st.lists(byte_ids, max_size=4),
    ),
    max_size=12,
).map(lambda groups: [token_id for group in groups for token_id in group])


def incomplete(token_ids: list[int]) -> int:
    """Return how many ids at the end are the beginning of a character that could still become whole."""
    for length in range(min(3, len(token_ids)), 0, -1):
        pieces = [TOKENIZER.piece(token_id) for token_id in token_ids[-length:]]
        utf8 = b"".join(piece for piece in pieces if isinstance(piece, bytes))
        if len(utf8) == length and could_begin_a_character(utf8):
            return length
    return 0


def could_begin_a_character(utf8: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        return decoder.decode(utf8) == "" and decoder.getstate()[0] == utf8
    except UnicodeDecodeError:
        return False


@given(ids)
@example([SPACE, SPACE])
@example([SPACE, 1, SPACE])
@example([1, SPACE])
@example([BYTES[0x20], SPACE])
@example([BYTES[0xE4], SPACE])
@example([BYTES[0xE4], BYTES[0xBD], BYTES[0xE4], BYTES[0xBD], BYTES[0xA0]])
@example([BYTES[0xED], BYTES[0xA0], BYTES[0x80]])
@example([BYTES[0xE4], TOKENIZER.size + 1, BYTES[0xBD], BYTES[0xA0]])
def test_joined_pieces_equal_decoding_at_one_go(token_ids: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    joined = "".join(detokenizer.push(token_id) for token_id in token_ids)
    whole = TOKENIZER.decode(token_ids)
    dropped = incomplete(token_ids)
    assert whole.endswith("\ufffd" * dropped)
    assert joined == whole[: len(whole) - dropped]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd\u2581"), max_size=30))
def test_a_character_in_flight_never_shows(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    joined = ""
    for token_id in TOKENIZER.encode(text):
        joined += detokenizer.push(token_id)
        assert text.startswith(joined)
    assert joined == text


def test_text_comes_as_soon_as_it_is_whole() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push(token_id) for token_id in TOKENIZER.encode("👋a")] == ["", "", "", "", "👋", "a"]


@pytest.mark.parametrize("name", ["chatglm2", "chatglm3"])
def test_every_piece_alone(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    for token_id in range(tokenizer.size):
        if not isinstance(tokenizer.piece(token_id), bytes):
            assert Detokenizer(tokenizer).push(token_id) == tokenizer.decode([token_id])
