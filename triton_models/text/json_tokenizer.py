"""Tokenizers in `tokenizer.json`, the form of Hugging Face's tokenizers: those of families beside ChatGLM's.

A vocabulary is either of bytes, each written as a printable character (GPT-2's way), or of SentencePiece's
strings, with bytes for what they do not hold.
"""

import json
import re
from collections.abc import Callable, Iterable
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import tokenizers

from triton_models.directory import TOKENIZER_JSON, read_optional_json, tokenizer_config
from triton_models.errors import CheckpointError, TextError, panics_are_errors
from triton_models.text.tokenizers import Tokenizer, parts
from wire.tokenizer_files import with_added_tokens

_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that GPT-2's vocabulary writes as the character of the same number; the others follow 0xFF."""


class JsonTokenizer(Tokenizer):
    """A tokenizer read from `tokenizer.json`.

    Attributes:
        end_ids: every id that the checkpoint says ends an answer, if the model has it; the vocabulary need
            not.
        begin_ids: the ids with which every text begins.
    """

    def __init__(self, directory: Path) -> None:
        """Read the tokenizer, and from the configurations beside it what ends an answer.

        Raises:
            CheckpointError: a file is missing or broken, the vocabulary is of another kind, or nothing is
                said to end an answer.
        """
        file, config = directory / TOKENIZER_JSON, tokenizer_config(directory)
        try:
            document = file.read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(document)
            known = self._tokenizer.get_added_tokens_decoder()
            completed = with_added_tokens(document, config, known)
            if completed is not document:
                self._tokenizer = tokenizers.Tokenizer.from_str(completed)
        except Exception as error:  # the library raises nothing more exact
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        # Who trains on often adds a token for padding, and no row of weights: the model cannot have it.
        beyond = _beyond_the_model(directory, added, self._tokenizer.get_vocab_size(with_added_tokens=False))
        special = {at: token.content for at, token in added.items() if token.special and at not in beyond}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        vocabulary = {token: token_id for token, token_id in vocabulary.items() if token_id not in beyond}
        size = 1 + max(vocabulary.values(), default=0)
        self.end_ids = _end_ids(directory, self._tokenizer, size)
        if not self.end_ids:
            raise CheckpointError(f"{directory}: neither generation_config.json nor others name an eos token")
        pieces: list[str | bytes] = [""] * max(size, *(1 + each for each in self.end_ids))
        read = _reader(file, json.loads(document), self._tokenizer)
        for token, token_id in vocabulary.items():
            if token_id not in special and token_id not in self.end_ids:
                pieces[token_id] = read(token)
        names = {token_id: token for token, token_id in vocabulary.items() if not pieces[token_id]}
        super().__init__(pieces, (), self.end_ids[0], names)
        self.special_ids = MappingProxyType({name: token_id for token_id, name in special.items()})
        text = self._tokenizer.encode("a", add_special_tokens=True)
        before = sum(takewhile(bool, text.special_tokens_mask))
        self.begin_ids = text.ids[:before]
        # No text of a user's is ever a special token.
        self._tokenizer.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:  # noqa: D102 - inherited
        try:
            with panics_are_errors("tokenizers"):
                # A batch: `encode` of one text holds the interpreter's lock all the while.
                encode = self._tokenizer.encode_batch_fast
                encoded = (encode([part], add_special_tokens=False)[0] for part in parts(text))
                return [token_id for part in encoded for token_id in part.ids]
        except (TypeError, UnicodeError):
            raise TextError("the text holds a lone surrogate, which is not valid Unicode") from None


def _reader(
    file: Path, document: dict[str, Any], tokenizer: tokenizers.Tokenizer
) -> Callable[[str], str | bytes]:
    """Return what reads one of the vocabulary's tokens: its bytes or text.

    Raises:
        CheckpointError: the vocabulary is of another kind.
    """
    decoder = document.get("decoder") or {}
    kinds = {each.get("type") for each in (decoder, *decoder.get("decoders", ()))}
    if "ByteLevel" in kinds:
        others = (byte for byte in range(256) if byte not in _PRINTABLE)
        bytes_of = {chr(byte): byte for byte in _PRINTABLE}
        bytes_of |= {chr(256 + number): byte for number, byte in enumerate(others)}
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}

        def read_bytes(token: str) -> bytes:
            if token not in added and all(character in bytes_of for character in token):
                return bytes(bytes_of[character] for character in token)
            return token.encode()

        return read_bytes
    if kinds & {"Metaspace", "ByteFallback"}:
        # Gemma's, for one, puts no space before a text, and so drops none there.
        drops_space = not tokenizer.decoder.decode([_SPACE])

        def read_piece(token: str) -> str | bytes:
            if byte := _BYTE.fullmatch(token):
                return bytes([int(byte[1], 16)])
            text = token.replace(_SPACE, " ")
            return text if drops_space else text.encode()

        return read_piece
    raise CheckpointError(f"{file}: a vocabulary neither of bytes nor of SentencePiece's strings")


def _beyond_the_model(directory: Path, added: Iterable[int], others: int) -> frozenset[int]:
    """Return which ids of added tokens the model has not, by its configuration.

    None, if it has not even the ids of the `others`: it belongs to another tokenizer.
    """
    models = read_optional_json(directory / "config.json").get("vocab_size")
    if not isinstance(models, int) or models < others:
        return frozenset()
    return frozenset(each for each in added if each >= models)


def _end_ids(directory: Path, tokenizer: tokenizers.Tokenizer, size: int) -> list[int]:
    """Return the ids that end an answer, each once: first the tokenizer's own.

    Published files name some that neither the vocabulary of `size` ids nor the model has: none of those.
    """
    named = tokenizer_config(directory).get("eos_token")
    name = named.get("content") if isinstance(named, dict) else named
    found = [tokenizer.token_to_id(name)] if isinstance(name, str) else []
    config = read_optional_json(directory / "config.json")
    ids = read_optional_json(directory / "generation_config.json").get("eos_token_id")
    if ids is None:
        ids = config.get("eos_token_id")
    found += ids if isinstance(ids, list) else [ids]
    models = config.get("vocab_size")
    has = range(max(size, models) if isinstance(models, int) else size)
    return list(dict.fromkeys(each for each in found if isinstance(each, int) and each in has))
