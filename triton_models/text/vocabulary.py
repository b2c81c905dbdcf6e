"""The bytes that each token id adds to a text: all that a grammar needs to know about a tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass

from triton_models.text.tokenizers import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The ids of one tokenizer.

    `pieces` holds, at the index of each id, the bytes that the id adds to a text; None if it is not text
    (special and control ids, the unknown token). If `hides_space` is true, a separate text, such as an answer
    in a conversation, begins with a space that is not shown: SentencePiece's dummy prefix, which every text
    had in training.
    """

    pieces: Sequence[bytes | None]
    hides_space: bool


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return the vocabulary of `tokenizer`.

    A piece that is a string loses its leading space at the beginning of a text; bytes never do. So in a
    vocabulary with both, the byte piece for a space is left out: the space would be visible there.
    """
    pieces = [tokenizer.piece(token_id) for token_id in range(tokenizer.size)]
    hides_space = " " in pieces
    return Vocabulary(
        pieces=[None if hides_space and piece == b" " else _in_bytes(piece) for piece in pieces],
        hides_space=hides_space,
    )


def _in_bytes(piece: str | bytes) -> bytes | None:
    return (piece.encode() if isinstance(piece, str) else piece) or None
