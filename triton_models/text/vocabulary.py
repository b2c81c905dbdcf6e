"""The bytes that each token id adds to a text: all that a grammar needs to know of a tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass

from triton_models.text.tokenizers import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The ids of one tokenizer.

    `pieces` has the bytes that each id adds to a text, None for those that are not text (special and control
    ids, the unknown one). If `hides_space` is set, a separate text, such as an answer in a conversation,
    begins with a space that is not shown: SentencePiece's dummy prefix, which every text had in training.
    """

    pieces: Sequence[bytes | None]
    hides_space: bool


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return the vocabulary of `tokenizer`.

    Pieces that are strings may lose a leading space at the beginning of a text, bytes never do. So in a
    vocabulary with both, the byte of a space is left out: it would be visible where the piece is not.
    """
    pieces = [tokenizer.piece(token_id) for token_id in range(tokenizer.size)]
    hides_space = " " in pieces
    return Vocabulary(
        pieces=[None if hides_space and piece == b" " else _in_bytes(piece) for piece in pieces],
        hides_space=hides_space,
    )


def _in_bytes(piece: str | bytes) -> bytes | None:
    return (piece.encode() if isinstance(piece, str) else piece) or None
