"""Token masks in one launch, which reads their bits and writes only the logits of tokens not allowed."""

import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine.sampler import MASK_BITS

_BLOCK = 4096
_BITS: tl.constexpr = tl.constexpr(MASK_BITS)


def forbid(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Do what `sampler.forbid` does.

    Args:
        logits: [S, vocab] float32, contiguous; changed in place.
        rows: [M] int64, the rows with a mask.
        words: [M, ceil(vocab / 32)] int32, contiguous: a bit for each token, set if it is allowed.
    """
    vocabulary = logits.shape[1]
    _forbid[len(rows), triton.cdiv(vocabulary, _BLOCK)](
        logits, rows, words, VOCABULARY=vocabulary, WORDS=words.shape[1], BLOCK=_BLOCK, num_warps=8
    )


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _forbid(logits, rows, words, VOCABULARY: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Take the forbidden tokens of a block of a row away."""
    place = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    listed = ids < VOCABULARY
    word = tl.load(words + place * WORDS + ids // _BITS, mask=listed, other=-1)
    allowed = (word >> (ids % _BITS)) & 1
    there = logits + tl.load(rows + place) * VOCABULARY + ids
    tl.store(there, float("-inf"), mask=listed & (allowed == 0))
