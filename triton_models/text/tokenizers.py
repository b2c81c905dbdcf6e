"""Tokenizers, which convert between text and ids: one for each kind of vocabulary of the model family.

ChatGLM2 and ChatGLM3 use SentencePiece, GLM-4 byte pairs. Special ids, to which no text is encoded, follow
the pieces; their names and order are those of `SPTokenizer` and `ChatGLM4Tokenizer` in the published
`tokenization_chatglm.py`.
"""

import base64
import binascii
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import tiktoken
from sentencepiece import SentencePieceProcessor

from triton_models.directory import TOKENIZER_FILE
from triton_models.errors import CheckpointError, TextError, panics_are_errors
from wire.text import utf8_decoder

SPECIAL_TOKENS: Final[Mapping[str, Sequence[str]]] = {
    "chatglm2": ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    "chatglm3": (
        *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
        *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "glm4": (
        *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
        *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
    ),
}
"""The special tokens of each chat format, in the order of their ids."""

SLICE: Final = 2**14
"""Ids that one call of C converts: such a call holds the interpreter lock, at most a few milliseconds."""

PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Splits text into words, as the published GLM-4 tokenizer; bytes are only merged within a word."""

LONGEST_BLANK: Final = 2**16
"""Longest run of white space that is not split. A run about ten times as long exceeds the lookahead of
`PATTERN`'s matching, and even when merged into tokens it exceeds any context."""

_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space in SentencePiece's pieces."""

_BREAK: Final = "\n"
"""No tokenizer joins it to the word behind it, so it shows how a word is written within a text."""

_BLANK = re.compile(r"\s+")
_BYTES: Final = 256


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
            LibraryPanicError: a library in Rust panicked.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, decoded all at once.

        Special and control ids, the unknown token (ChatGLM's padding) and ids beyond the vocabulary have no
        text, and separate their neighbours: bytes before and after such an id never form a character
        together. Each byte that is not valid UTF-8 becomes U+FFFD.
        """
        utf8, text, at_start = utf8_decoder(), [], True
        for token_id in ids:
            piece = self.piece(token_id)
            if isinstance(piece, bytes):
                text.append(utf8.decode(piece))
            else:
                text.append(utf8.decode(b"", final=True))
                text.append(piece.removeprefix(" ") if at_start else piece)
            at_start = at_start and not piece
        return "".join(text) + utf8.decode(b"", final=True)

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


class SentencePieceTokenizer(Tokenizer):
    """A piece is one byte or a string. A leading space in the first piece of a text is dropped."""

    def __init__(self, directory: Path, special_tokens: Sequence[str]) -> None:
        """Read `tokenizer.model`; the ids of `special_tokens` follow its pieces, in that order.

        Raises:
            CheckpointError: the file is missing or broken, or is not a ChatGLM tokenizer.
        """
        file = directory / TOKENIZER_FILE
        document = _read(file)
        try:
            self._processor = SentencePieceProcessor(model_proto=document)
        except RuntimeError as error:
            raise CheckpointError(f"{file}: not a SentencePiece model, or a damaged one") from error
        self._written: list[str] = self._processor.id_to_piece(list(range(self._processor.get_piece_size())))
        # Incremental detokenizing relies on it that exactly one leading space is dropped.
        if _SPACE not in self._written or self._processor.decode([_SPACE, _SPACE]) != " ":
            raise CheckpointError(f"{file}: not a ChatGLM tokenizer: it treats leading spaces differently")
        super().__init__(
            [self._content(token_id) for token_id in range(len(self._written))],
            special_tokens,
            self._processor.eos_id(),
            dict(enumerate(self._written)),
        )

    def encode(self, text: str) -> list[int]:  # noqa: D102 - inherited
        found = self._processor.encode(_utf8(text), return_type="numpy")
        ids: list[int] = []
        for at in range(0, len(found), SLICE):
            ids += found[at : at + SLICE].tolist()
        return ids

    def _content(self, token_id: int) -> str | bytes:
        if self._processor.is_byte(token_id):
            return bytes([int(self._written[token_id][1:-1], 16)])  # named <0x0A>
        if self._processor.is_control(token_id) or self._processor.is_unknown(token_id):
            return ""
        return self._written[token_id].replace(_SPACE, " ")


class BytePairTokenizer(Tokenizer):
    """Every piece is bytes; a text's first token keeps its leading space.

    `tokenizer.model` is a text file with one line per token: its bytes in base64, a space, and its rank,
    which is its id. tiktoken does the merging, as in the published tokenizer.
    """

    def __init__(self, directory: Path) -> None:
        """Read `tokenizer.model`.

        Raises:
            CheckpointError: the file is missing or broken.
        """
        ranks = _ranks(directory / TOKENIZER_FILE)
        super().__init__(list(ranks), SPECIAL_TOKENS["glm4"], eos_id=len(ranks))
        self._encoding = tiktoken.Encoding(
            directory.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=dict(self.special_ids)
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; runs of white space over `LONGEST_BLANK` characters are encoded in parts.

        Raises:
            TextError: `text` contains lone surrogates.
            LibraryPanicError: tiktoken panicked.
        """
        _utf8(text)
        with panics_are_errors("tiktoken"):
            return [token_id for part in parts(text) for token_id in self._encoding.encode_ordinary(part)]


def load_tokenizer(directory: Path, chat_format: str) -> Tokenizer:
    """Read `tokenizer.model` of a checkpoint whose special tokens are those of `chat_format`.

    Raises:
        CheckpointError: the file is missing or broken, or is not a tokenizer of this model family.
    """
    if chat_format == "glm4":
        return BytePairTokenizer(directory)
    return SentencePieceTokenizer(directory, SPECIAL_TOKENS[chat_format])


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


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[tuple[int, ...]]:
    """Return the ids that `tokenizer` makes of each word: at the start, behind a space, and within a text.

    As in vLLM, white space before a word does not count, and other ways to split the word stay possible. vLLM
    does not look at words within a text, where SentencePiece has other ids for them than at the start.

    Raises:
        TextError: a word contains lone surrogates.
    """
    found: dict[tuple[int, ...], None] = {}
    for each in words:
        word = each.lstrip() or each
        ways = [tokenizer.encode(word), tokenizer.encode(" " + word), ids_within(tokenizer, word)]
        found |= dict.fromkeys(tuple(ids) for ids in ways if ids)
    return list(found)


def ids_within(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids that `tokenizer` makes of `text` within a longer one; none if they cannot be told.

    Raises:
        TextError: `text` contains lone surrogates.
    """
    before, ids = tokenizer.encode(_BREAK), tokenizer.encode(_BREAK + text)
    return ids[len(before) :] if ids[: len(before)] == before else []


def _utf8(text: str) -> bytes:
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


def _read(file: Path) -> bytes:
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


def parts(text: str) -> Iterator[str]:
    """Yield the parts of `text`, split after every `LONGEST_BLANK` characters of a longer run of white space.

    Each run is matched once and then split. A pattern for so many characters would instead be retried at each
    character of a shorter run.
    """
    start = 0
    for blank in _BLANK.finditer(text):
        for end in range(blank.start() + LONGEST_BLANK, blank.end(), LONGEST_BLANK):
            yield text[start:end]
            start = end
    yield text[start:]


def _ranks(file: Path) -> dict[bytes, int]:
    """Return the rank of each token, lowest first.

    Raises:
        CheckpointError: the file cannot be read, a line is not a token with its rank, or a rank is missing.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(file).splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(f"{file}: line {number} is no token in base64 with its rank") from error
        if len(ranks) != number:
            raise CheckpointError(f"{file}: line {number} has a token that stood before")
    ranks = dict(sorted(ranks.items(), key=lambda each: each[1]))
    if list(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{file}: the ranks are not 0 to {len(ranks) - 1}, each once")
    if b"" in ranks or any(bytes([byte]) not in ranks for byte in range(_BYTES)):
        raise CheckpointError(f"{file}: not every byte is a token, or an empty one is")
    return ranks
