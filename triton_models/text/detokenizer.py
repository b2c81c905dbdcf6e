"""Incremental detokenizing: token ids to text, one at a time.

A character may span several byte pieces, so its bytes are held back until it is complete: U+FFFD never stands
for an incomplete character. Each byte that cannot be part of a character does become U+FFFD, exactly as when
all ids are decoded at once. Nothing is decoded twice. A character that is incomplete at the end of the answer
is dropped (divergence 4).
"""

import codecs
import re

from triton_models.text.tokenizers import Tokenizer

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of each invalid byte


class Detokenizer:
    """The text of one sequence of ids. Not thread-safe.

    The joined results of `push` equal `Tokenizer.decode` of all ids, except for an incomplete character at
    the very end: its bytes are never returned, while decoding all at once shows a U+FFFD for each.

    With `continues`, the ids continue other text, so a leading space is part of the text and is kept. With
    `special`, ids that are not text appear by name.
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = False, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = _new_utf8_decoder("surrogateescape")
        self._bytes_waiting = False
        self._at_start = not continues

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that it completes, possibly none."""
        piece = self._tokenizer.piece(token_id)
        if self._special and not piece:
            piece, _ = self._tokenizer.display(token_id)
        if isinstance(piece, bytes):
            self._bytes_waiting = True
            return self._decode(piece, final=False)
        text = ""
        if self._bytes_waiting:  # a piece that is not a byte ends the character, complete or not
            self._bytes_waiting = False
            text = self._decode(b"", final=True)
        if self._at_start and piece:
            self._at_start = False
            piece = piece.removeprefix(" ")
        return text + piece

    def _decode(self, utf8: bytes, *, final: bool) -> str:
        text = self._utf8.decode(utf8, final)
        if text:
            self._at_start = False
        return _ESCAPED_BYTE.sub("\N{REPLACEMENT CHARACTER}", text)
