"""Trains `tokenizer.model` with the settings of ChatGLM's: BPE, single digits, byte fallback, no normalising.

What a tool's argument is copied from must be spelled alike wherever it stands. So Chinese characters and
capital letters are pieces by themselves and part of no longer one, and rare characters fall back to bytes.
"""

import io
import random
import re
from pathlib import Path

from sentencepiece import SentencePieceTrainer

from demo import mixture
from demo.pages import read

PIECES = 2039
"""With nine special ids they fill 2,048 rows."""

_DIALOGUES = 12_000
_FILES = ("project", "usage", "concepts", "smalltalk", "unknown", "phrases", "tools", "words", "arithmetic")
_BREAK = "。"
_ALONE = re.compile(r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffefA-Z°×÷]")
"""What is a piece by itself, if the pages use it."""


def train_tokenizer(file: Path, seed: int) -> None:
    """Write a SentencePiece model to `file`, the same for the same seed."""
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
    """Return the characters of the pages, in training or held back, that are pieces by themselves."""
    return {character for name in _FILES for character in _ALONE.findall(str(read(name)))}
