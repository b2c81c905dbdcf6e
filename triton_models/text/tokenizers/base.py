"""What all tokenizers have in common."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from triton_models.errors import CheckpointError, TextError

TOKENIZER_FILE: Final = "tokenizer.model"
"""The name of the tokenizer's file in every checkpoint of the model family, whatever its contents."""

SLICE: Final = 2**14
"""Ids that one call of C converts: such a call holds the interpreter lock, at most a few milliseconds."""


class Tokenizer(ABC):
    """Converts text to ids and back. Immutable after creation, so any number of threads may share one.

    No text is ever encoded to a special id. `<|user|>` in a text becomes ordinary pieces, so a user's text
    cannot pass for the turn of another role.

    Args:
        pieces: what each ordinary id adds to a text; see `piece`.
        special_tokens: the names of the ids that follow.
        eos_id: the id that ends an answer.
        names: the names of ordinary ids that are not text.

    Attributes:
        special_ids: the id of each special token by name.
        eos_id: the id that ends an answer.
        size: number of ids that are in use; a checkpoint's padded vocabulary is larger.
    """

    def __init__(
        self,
        pieces: Sequence[str | bytes],
        special_tokens: Sequence[str],
        eos_id: int,
        names: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._pieces = pieces
        special_names = dict(enumerate(special_tokens, start=len(pieces)))
        self._names = {**names, **special_names}
        self.special_ids: Mapping[str, int] = MappingProxyType(
            {name: token_id for token_id, name in special_names.items()}
        )
        self.eos_id = eos_id
        self.size = len(pieces) + len(special_tokens)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without any special id or prefix.

        Raises:
            TextError: `text` contains lone surrogates.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, decoded all at once.

        Special and control ids, the unknown token (ChatGLM's padding) and ids beyond the vocabulary have no
        text, and separate their neighbours: bytes before and after such an id never form a character
        together. Each byte that is not valid UTF-8 becomes U+FFFD.
        """

    def piece(self, token_id: int) -> str | bytes:
        """Return what a token adds to the text; empty if it adds nothing.

        A piece of type bytes may form characters together with its neighbours. A string is complete, and
        loses its leading space at the beginning of a text.
        """
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else ""

    def display(self, token_id: int) -> tuple[str, bytes]:
        r"""Return how a log-probability report shows `token_id` (any integer), and its UTF-8 bytes.

        Tokens that are not text are shown by name and have no bytes. Other tokens may hold part of a
        character; each such byte is shown as an escape such as ``\xe4``, as in OpenAI's own reports.
        """
        piece = self.piece(token_id)
        if not piece:
            return self._names.get(token_id, f"<unused {token_id}>"), b""
        if isinstance(piece, bytes):
            return piece.decode("utf-8", "backslashreplace"), piece
        return piece, piece.encode()


def shown_tokens(
    tokenizer: Tokenizer, ids: Iterable[int], *, special: bool = False
) -> Iterator[tuple[str, bytes]]:
    """Yield how each of a prompt's ids is shown, and the UTF-8 bytes that it adds to the prompt's text.

    The joined bytes are the text that a `Detokenizer` makes of the ids. The joined strings are that text,
    too, except for the names of special tokens and for characters that several tokens share. The only
    difference from `Tokenizer.display` is that the leading space of the text is dropped.

    Args:
        tokenizer: of the model.
        ids: all of the prompt's.
        special: include ids that are not text, by name.
    """
    at_start = True
    for token_id in ids:
        token, utf8 = tokenizer.display(token_id)
        piece = tokenizer.piece(token_id)
        if special and not piece:
            piece, utf8 = token, token.encode()
        if at_start and piece:
            at_start = False
            if isinstance(piece, str):
                token, utf8 = token.removeprefix(" "), utf8.removeprefix(b" ")
        yield token, utf8


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
