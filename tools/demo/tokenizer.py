"""Trains `tokenizer.model` with the settings of ChatGLM's: BPE, single digits, byte fallback, no normalising.

The model copies a tool's argument from the conversation, so the same text must be tokenized in the same way
wherever it stands. So Chinese characters and capital letters are separate pieces and not part of longer ones,
and rare characters fall back to bytes.
"""

import io
import random
import re
from pathlib import Path

from sentencepiece import SentencePieceTrainer

from tools.demo import mixture
from tools.demo.pages import read

PIECES = 2039
"""With nine special ids they fill a vocabulary of 2,048 rows."""

_DIALOGUES = 12_000
_FILES = ("project", "usage", "concepts", "smalltalk", "unknown", "phrases", "tools", "words", "arithmetic")
_BREAK = "。"
_ALONE = re.compile(r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffefA-Z°×÷]")
"""Characters that are separate pieces, if the pages use them."""


def train_tokenizer(file: Path, seed: int) -> None:
    """Train a SentencePiece model and write it to `file`; the same seed gives the same model."""
    rng = random.Random(seed)
    sentences = (
        _ALONE.sub(_BREAK, text)
        for _ in range(_DIALOGUES)
        for line in mixture.dialogue(rng)
        for text in mixture.texts(line.turn)
    )
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=sentences,
        model_writer=model,
        model_type="bpe",
        vocab_size=PIECES,
        character_coverage=0.9999,
        user_defined_symbols=sorted(_alone_on_pages()),
        split_digits=True,
        byte_fallback=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        max_sentence_length=100_000,
        num_threads=1,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        minloglevel=1,
    )
    file.write_bytes(model.getvalue())


def _alone_on_pages() -> set[str]:
    """Return the characters of the pages, trained on or held back, that are separate pieces."""
    return {character for name in _FILES for character in _ALONE.findall(str(read(name)))}
