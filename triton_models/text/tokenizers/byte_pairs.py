"""The tokenizer of GLM-4: byte-pair encoding, plus special ids to which no text is encoded.

`tokenizer.model` is a text file with one line per token: its bytes in base64, a space, and its rank, which is
its id. The special ids follow the ranks. The pattern and the names and order of the special tokens are those
of `ChatGLM4Tokenizer` in the published `tokenization_chatglm.py`; tiktoken does the merging, as there.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Final

import tiktoken

from triton_models.errors import CheckpointError
from triton_models.foreign import panics_are_errors
from triton_models.text.tokenizers.base import TOKENIZER_FILE, display_piece, read_tokenizer, to_utf8

SPECIAL_TOKENS: Final = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
)

PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Splits text into words; bytes are only merged within a word."""

LONGEST_BLANK: Final = 2**16
"""Longest run of white space that is not split. A run about ten times as long exceeds the lookahead of
`PATTERN`'s matching, and even when merged into tokens it exceeds any context."""

_BLANK = re.compile(r"\s+")
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of each invalid byte
_NO_TEXT: Final = ""
_BYTES: Final = 256


class BytePairTokenizer:
    """See the module, and `Tokenizer`. Every piece is bytes; a text's first token keeps its leading space."""

    def __init__(self, directory: Path) -> None:
        """Read `tokenizer.model`.

        Raises:
            CheckpointError: the file is missing or broken.
        """
        file = directory / TOKENIZER_FILE
        ranks = _ranks(file)
        self._pieces = list(ranks)
        self._special_names = dict(enumerate(SPECIAL_TOKENS, start=len(ranks)))
        self.special_ids: Mapping[str, int] = MappingProxyType(
            {name: token_id for token_id, name in self._special_names.items()}
        )
        self.eos_id = self.special_ids["<|endoftext|>"]
        self.size = len(ranks) + len(SPECIAL_TOKENS)
        self._encoding = tiktoken.Encoding(
            file.parent.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=dict(self.special_ids)
        )

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`. Runs of white space over `LONGEST_BLANK` characters are encoded in parts.

        Raises:
            TextError: see `Tokenizer.encode`.
            LibraryPanicError: tiktoken panicked.
        """
        to_utf8(text)
        with panics_are_errors("tiktoken"):
            return [token_id for part in parts(text) for token_id in self._encoding.encode_ordinary(part)]

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        runs = groupby(ids, key=range(len(self._pieces)).__contains__)
        return "".join(
            _text(b"".join(self._pieces[token_id] for token_id in run)) for is_text, run in runs if is_text
        )

    def piece(self, token_id: int) -> str | bytes:
        """See `Tokenizer.piece`."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else _NO_TEXT

    def display(self, token_id: int) -> tuple[str, bytes]:
        """See `Tokenizer.display`."""
        if piece := self.piece(token_id):
            return display_piece(piece)
        return self._special_names.get(token_id, f"<unused {token_id}>"), b""


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
    for number, line in enumerate(read_tokenizer(file).splitlines(), start=1):
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


def _text(utf8: bytes) -> str:
    return _ESCAPED_BYTE.sub("\N{REPLACEMENT CHARACTER}", utf8.decode("utf-8", "surrogateescape"))
