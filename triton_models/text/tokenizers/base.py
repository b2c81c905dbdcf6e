"""The interface of all tokenizers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

from triton_models.errors import CheckpointError, TextError

TOKENIZER_FILE: Final = "tokenizer.model"
"""The name of the tokenizer's file in every checkpoint of the model family, whatever its contents."""


class Tokenizer(Protocol):
    """Converts text to ids and back. Immutable after creation, so any number of threads may share one.

    No text is ever encoded to a special id. `<|user|>` in a text becomes ordinary pieces, so a user's text
    cannot pass for the turn of another role.
    """

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The id of each special token by name; these ids follow the ordinary ones."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that ends an answer."""
        ...

    @property
    def size(self) -> int:
        """Number of ids that are in use; a checkpoint's padded vocabulary is larger."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without any special id or prefix.

        Raises:
            TextError: `text` contains lone surrogates.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, decoded all at once.

        Special and control ids, the unknown token (ChatGLM's padding) and ids beyond the vocabulary have no
        text, and separate their neighbours: bytes before and after such an id never form a character
        together. Each byte that is not valid UTF-8 becomes U+FFFD.
        """
        ...

    def piece(self, token_id: int) -> str | bytes:
        """Return what a token adds to the text; empty if it adds nothing.

        A piece of type bytes may form characters together with its neighbours. A string is complete, and
        loses its leading space at the beginning of a text.
        """
        ...

    def display(self, token_id: int) -> tuple[str, bytes]:
        r"""Return how a log-probability report shows `token_id` (any integer), and its UTF-8 bytes.

        Tokens that are not text are shown by name and have no bytes. Other tokens may hold part of a
        character; each such byte is shown as an escape such as ``\xe4``, as in OpenAI's own reports.
        """
        ...


def to_utf8(text: str) -> bytes:
    """Return the bytes of `text`.

    Raises:
        TextError: it contains lone surrogates.
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
        CheckpointError: the file cannot be read, or is empty.
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
