"""Penalties in one launch, which reads the counts of a row and touches only the logits of tokens seen."""

import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine.slots import PenalisedRows

_BLOCK = 4096


def penalise(penalties: PenalisedRows, logits: Tensor) -> None:
    """Do what `PenalisedRows.apply` does.

    Args:
        penalties: the rows.
        logits: [S, vocab] float32, contiguous; changed in place.
    """
    if penalties.guessed is not None:
        penalties.apply(logits)  # few steps, of few rows: counts of guesses are no part of the table
        return
    seen, factors = penalties.table.seen, penalties.table.factors
    vocabulary = logits.shape[1]
    _penalise[len(penalties.rows), triton.cdiv(vocabulary, _BLOCK)](
        logits,
        penalties.rows,
        penalties.slots,
        seen,
        factors,
        factors.shape[1],
        VOCABULARY=vocabulary,
        BLOCK=_BLOCK,
        num_warps=8,
    )


@triton.jit(do_not_specialize_on_alignment=["rows", "slots"])
def _penalise(logits, rows, slots, seen, factors, all_slots, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Penalise a block of a row's tokens."""
    place = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + place)
    counts = tl.load(seen + slot * VOCABULARY + ids, mask=ids < VOCABULARY, other=0)
    there = logits + tl.load(rows + place) * VOCABULARY + ids
    values = tl.load(there, mask=counts > 0, other=0.0)
    repetition = tl.load(factors + slot)
    presence = tl.load(factors + all_slots + slot)
    frequency = tl.load(factors + 2 * all_slots + slot)
    values = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    generated = counts >> 1
    values -= frequency * generated.to(tl.float32)
    values -= tl.where(generated > 0, presence, 0.0)
    tl.store(there, values, mask=counts > 0)
