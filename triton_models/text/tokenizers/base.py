"""The interface of all tokenizers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

from triton_models.errors import CheckpointError, TextError

TOKENIZER_FILE: Final = "tokenizer.model"
"""The file's name in every checkpoint of the family, whatever its format."""


class Tokenizer(Protocol):
    """Text <-> ids. Immutable once made, so any number of threads may share one.

    A special id exists only as a number. `<|user|>` in a text becomes ordinary pieces, which keeps a user's
    text from passing for another role's.
    """

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The id of each special token by name; they follow the ordinary ones."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that ends an answer."""
        ...

    @property
    def size(self) -> int:
        """Number of ids with a meaning; a checkpoint's padded vocabulary is larger."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, never a special one and without any prefix.

        Raises:
            TextError: `text` holds lone surrogates.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, decoded all at once.

        Special and control ids, the unknown token (ChatGLM's padding) and ids beyond the vocabulary have no
        text, and separate their neighbours: bytes on both sides of one never form a character. Bytes that are
        not UTF-8 become U+FFFD each.
        """
        ...

    def piece(self, token_id: int) -> str | bytes:
        """Return what a token adds to the text; empty if nothing.

        Bytes join with their neighbours to form characters. A string is complete, and loses its leading space
        at the beginning of a text.
        """
        ...

    def display(self, token_id: int) -> tuple[str, bytes]:
        r"""Return how a log-probability report shows `token_id` (any number), and its UTF-8 bytes.

        Tokens that are not text are shown by name and have no bytes. The bytes of others may be part of a
        character; each is then shown as an escape such as ``\xe4``, as in OpenAI's own reports.
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
    """Return the contents of `file`.

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
    """Return the result of `Tokenizer.display` for a token that is text."""
    if isinstance(piece, bytes):
        return piece.decode("utf-8", "backslashreplace"), piece
    return piece, piece.encode()
