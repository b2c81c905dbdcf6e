"""Tokenizers, which convert between text and ids: one for each kind of vocabulary of the model family."""

from pathlib import Path

from triton_models.errors import TextError
from triton_models.text.tokenizers import byte_pairs, sentence_pieces
from triton_models.text.tokenizers.base import TOKENIZER_FILE, Tokenizer, shown_tokens
from triton_models.text.tokenizers.byte_pairs import BytePairTokenizer
from triton_models.text.tokenizers.sentence_pieces import SentencePieceTokenizer

__all__ = ["SPECIAL_TOKENS", "TOKENIZER_FILE", "Tokenizer", "load_tokenizer", "shown_tokens"]

SPECIAL_TOKENS = sentence_pieces.SPECIAL_TOKENS | {"glm4": byte_pairs.SPECIAL_TOKENS}
"""The special tokens of each chat format, in the order of their ids."""


def load_tokenizer(directory: Path, chat_format: str) -> Tokenizer:
    """Read `tokenizer.model` of a checkpoint whose special tokens are those of `chat_format`.

    Raises:
        CheckpointError: the file is missing or broken, or is not a tokenizer of this model family.
        TextError: no chat format has that name.
    """
    if chat_format not in SPECIAL_TOKENS:
        raise TextError(f"unknown chat format {chat_format!r}; there are {', '.join(SPECIAL_TOKENS)}")
    if chat_format in sentence_pieces.SPECIAL_TOKENS:
        return SentencePieceTokenizer(directory, sentence_pieces.SPECIAL_TOKENS[chat_format])
    return BytePairTokenizer(directory)
