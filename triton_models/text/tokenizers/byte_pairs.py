"""The tokenizer of GLM-4: byte-pair encoding, plus special ids to which no text is encoded.

`tokenizer.model` is a text file with one line per token: its bytes in base64, a space, and its rank, which is
its id. The special ids follow the ranks. The pattern and the names and order of the special tokens are those
of `ChatGLM4Tokenizer` in the published `tokenization_chatglm.py`; tiktoken does the merging, as there.
"""

import base64
import binascii
import codecs
import re
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Final

import tiktoken

from triton_models.errors import CheckpointError, panics_are_errors
from triton_models.text.tokenizers.base import SLICE, TOKENIZER_FILE, Tokenizer, read_tokenizer, to_utf8

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
_BYTES: Final = 256

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class BytePairTokenizer(Tokenizer):
    """Every piece is bytes; a text's first token keeps its leading space."""

    def __init__(self, directory: Path) -> None:
        """Read `tokenizer.model`.

        Raises:
            CheckpointError: the file is missing or broken.
        """
        ranks = _ranks(directory / TOKENIZER_FILE)
        self._tokens = list(ranks)
        super().__init__(
            self._tokens, SPECIAL_TOKENS, eos_id=len(ranks) + SPECIAL_TOKENS.index("<|endoftext|>")
        )
        self._encoding = tiktoken.Encoding(
            directory.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=dict(self.special_ids)
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; runs of white space over `LONGEST_BLANK` characters are encoded in parts.

        Raises:
            TextError: `text` contains lone surrogates.
            LibraryPanicError: tiktoken panicked.
        """
        to_utf8(text)
        with panics_are_errors("tiktoken"):
            return [token_id for part in parts(text) for token_id in self._encoding.encode_ordinary(part)]

    def decode(self, ids: Iterable[int]) -> str:  # noqa: D102 - inherited
        utf8 = _new_utf8_decoder("surrogateescape")
        is_text = range(len(self._tokens)).__contains__
        ids, text = iter(ids), []
        while some := list(islice(ids, SLICE)):
            for texts, run in groupby(some, key=is_text):
                utf8_run = b"".join(map(self._tokens.__getitem__, run)) if texts else b""
                text.append(_shown(utf8.decode(utf8_run, final=not texts)))
        return "".join(text) + _shown(utf8.decode(b"", final=True))


def _shown(text: str) -> str:
    return _ESCAPED_BYTE.sub("\N{REPLACEMENT CHARACTER}", text)


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
