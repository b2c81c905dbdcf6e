"""What every tokenizer offers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

from triton_models.errors import CheckpointError, TextError

TOKENIZER_FILE: Final = "tokenizer.model"
"""Of every checkpoint of the family, whatever is in it."""


class Tokenizer(Protocol):
    """Text <-> ids. Immutable once made, so any number of threads may share one.

    A special id exists only as a number. `<|user|>` typed by somebody stays ordinary pieces, and that is what
    keeps a user's text from passing for another role's.
    """

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Id of each special token by its name; they follow the ordinary ones."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that ends an answer."""
        ...

    @property
    def size(self) -> int:
        """Number of ids that mean something; a checkpoint's padded vocabulary is larger."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, never a special one and without any prefix.

        Raises:
            TextError: `text` holds lone surrogates.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, decoded at one go.

        Special and control ids, the unknown token (ChatGLM's padding) and ids beyond the vocabulary have no
        text, and separate what stands on either side of them: bytes across one never join to a character.
        Bytes that are not UTF-8 become U+FFFD each.
        """
        ...

    def piece(self, token_id: int) -> str | bytes:
        """Return what a token adds to the text, empty for none.

        Bytes join with those beside them to characters. A string is whole, and where a text begins with one
        its leading space does not count.
        """
        ...

    def display(self, token_id: int) -> tuple[str, bytes]:
        r"""Return how a log-probability report shows `token_id` (any number), and its UTF-8 bytes.

        Tokens that are no text go by their name and have no bytes. The bytes of others may be a part of a
        character; an escape such as ``\xe4`` then shows each, as in OpenAI's own reports.
        """
        ...


def to_utf8(text: str) -> bytes:
    """Return the bytes of `text`.

    Raises:
        TextError: it holds lone surrogates.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise TextError(
            f"the text holds a lone surrogate at character {error.start}, which is not valid Unicode"
        ) from None


def read_tokenizer(file: Path) -> bytes:
    """Return what is in `file`.

    Raises:
        CheckpointError: it cannot be read, or is empty.
    """
    try:
        document = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    if not document:
        raise CheckpointError(f"{file}: is empty")
    return document


def display_piece(piece: str | bytes) -> tuple[str, bytes]:
    """Return what `Tokenizer.display` does of a token that is text."""
    if isinstance(piece, bytes):
        return piece.decode("utf-8", "backslashreplace"), piece
    return piece, piece.encode()
