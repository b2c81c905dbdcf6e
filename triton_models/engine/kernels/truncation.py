"""Draws from rows that are limited by top_k, top_p or min_p, without sorting them.

The tokens kept of a row are the most likely ones: all with a logit above a threshold, and the first few with
a logit equal to it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine.kernels.drawing import (
    COLDEST,
    first_over,
    inverse,
    load_usable,
    uniform,
    weights_beside,
)
from triton_models.engine.kernels.thresholds import (
    GROUPS,
    STAGES,
    kept_weight,
    kth_group_peak,
    logit_of,
    order,
    search,
    value_of,
)

_BLOCK = 4096
"""Logits that a row's program loads at once."""

_WARPS = 16

_MARGIN: tl.constexpr = tl.constexpr(0.01)
"""Margin for a bound on logarithms of weights, far larger than their rounding errors."""

_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits that are always 0 in a float32 converted from this dtype."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """The rows that do not draw from every token, and the limits of all S rows.

    `rows`: [N] int64, each at most once, or -1 for padding. `top_k`: [S] int64, 0 keeps all. `top_p`,
    `min_p`: [S] float64, 1 and 0 keep all. The tokens kept are those at least min_p times as likely as the
    most likely one; of these the top_k most likely; and of those the fewest that make up top_p of their sum,
    with equal ones in order of id. Greedy rows are left unchanged.
    """

    rows: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def draw_truncated(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    counters: Tensor,
    peaks: Tensor,
    truncation: Truncation,
    tokens: Tensor,
) -> None:
    """Draw the tokens of the truncated rows.

    Compiled once for each dtype of the logits and size of the vocabulary, provided that the address of
    `logits` is a multiple of 16.

    Args:
        logits: [S, V], contiguous, float32, float16 or bfloat16.
        temperatures: [S] float32.
        seeds: [S] int64.
        counters: [S] int64 or int32.
        peaks: [S, B] float32, the largest usable logit of each part of a row.
        truncation: the rows and their limits.
        tokens: [S] int64, to which the ids are written.
    """
    blocks = peaks.shape[1]
    _draw_truncated[(len(truncation.rows),)](
        logits,
        temperatures,
        seeds,
        counters,
        peaks,
        truncation.rows,
        truncation.top_k,
        truncation.top_p,
        truncation.min_p,
        tokens,
        VOCABULARY=logits.shape[1],
        BLOCK=_BLOCK,
        BLOCKS=blocks,
        BLOCKS_PADDED=triton.next_power_of_2(blocks),
        UNUSED_BITS=_UNUSED_BITS[logits.dtype],
        num_warps=_WARPS,
    )


@triton.jit(
    do_not_specialize_on_alignment=[
        "temperatures",
        "seeds",
        "counters",
        "truncated",
        "top_k",
        "top_p",
        "min_p",
        "tokens",
    ]
)
def _draw_truncated(
    logits,
    temperatures,
    seeds,
    counters,
    peaks,
    truncated,
    top_k,
    top_p,
    min_p,
    tokens,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
):
    place = tl.program_id(0)
    row = tl.load(truncated + place)
    if row < 0:
        return
    temperature = tl.load(temperatures + row)
    if temperature < COLDEST:
        return
    coldness = inverse(temperature)
    row_logits = logits + row * VOCABULARY
    blocks = tl.arange(0, BLOCKS_PADDED)
    row_peaks = tl.load(peaks + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=float("-inf"))
    peak = tl.max(row_peaks, 0)
    highest = order(peak, UNUSED_BITS)

    # Kept so far: tokens above the threshold, and `ties` of those that equal it.
    threshold = order(tl.full((), float("-inf"), tl.float32), UNUSED_BITS)
    ties = tl.full((), VOCABULARY, tl.int64)
    least = tl.load(min_p + row).to(tl.float32)
    if least > 0:
        bound = logit_of(tl.log(least), peak, coldness)
        lowest = order(bound, UNUSED_BITS)
        lowest = tl.minimum(tl.where(value_of(lowest, UNUSED_BITS) < bound, lowest + 1, lowest), highest)
        threshold, ties = lowest - 1, tl.full((), 0, tl.int64)
    k = tl.load(top_k + row)
    if (k > 0) & (k < VOCABULARY):
        low = threshold
        if k <= GROUPS:
            low = tl.maximum(low, order(kth_group_peak(row_logits, k, VOCABULARY, BLOCK), UNUSED_BITS))
        found, above = search(
            row_logits,
            low,
            highest,
            k.to(tl.float64),
            peak,
            coldness,
            VOCABULARY,
            BLOCK,
            UNUSED_BITS,
            WEIGHED=False,
        )
        found_ties = k - above.to(tl.int64)
        ties = tl.where(found == threshold, tl.minimum(ties, found_ties), found_ties)
        threshold = found
    p = tl.load(top_p + row)
    if p < 1:
        limit = p * kept_weight(row_logits, threshold, ties, peak, coldness, VOCABULARY, BLOCK, UNUSED_BITS)
        # All tokens with less than (1 - top_p) / V of the most likely one's weight together weigh less than
        # the 1 - top_p that may be dropped, so the threshold is above them.
        lightest = tl.log((1 - p).to(tl.float32) / VOCABULARY) - _MARGIN
        low = tl.maximum(threshold, order(logit_of(lightest, peak, coldness), UNUSED_BITS) - 1)
        found, above = search(
            row_logits,
            low,
            highest,
            limit,
            peak,
            coldness,
            VOCABULARY,
            BLOCK,
            UNUSED_BITS,
            WEIGHED=True,
        )
        weight = weights_beside(value_of(found, UNUSED_BITS), peak, coldness).to(tl.float64)
        enough = tl.ceil((limit - above) / tl.where(weight > 0, weight, 1.0))
        found_ties = tl.minimum(enough, VOCABULARY).to(tl.int64)
        ties = tl.where(found == threshold, tl.minimum(ties, found_ties), found_ties)
        threshold = found

    whole = kept_weight(row_logits, threshold, ties, peak, coldness, VOCABULARY, BLOCK, UNUSED_BITS)
    target = uniform(tl.load(seeds + row), tl.load(counters + row)) * whole
    token = _draw_kept(row_logits, threshold, ties, target, peak, coldness, VOCABULARY, BLOCK, UNUSED_BITS)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _draw_kept(
    row_logits,
    threshold,
    ties,
    target,
    peak,
    coldness,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
):
    """Return the first kept id whose cumulative kept weight exceeds the target; else the last one kept."""
    weight = weights_beside(value_of(threshold, UNUSED_BITS), peak, coldness).to(tl.float64)
    before, chosen_before = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    ties_left, chosen_ties = ties, ties
    chosen = tl.full((), 0, tl.int32)
    found = tl.full((), 0, tl.int32)
    for start in tl.range(0, VOCABULARY, BLOCK, num_stages=STAGES):
        values = load_usable(row_logits, start + tl.arange(0, BLOCK), VOCABULARY)
        keys = order(values, UNUSED_BITS)
        over = tl.where(keys > threshold, weights_beside(values, peak, coldness), 0.0)
        tied = tl.minimum(ties_left, tl.sum((keys == threshold).to(tl.int32), 0))
        part = tl.sum(over.to(tl.float64), 0) + tied * weight
        take = (found == 0) & (part > 0)
        chosen = tl.where(take, start, chosen)
        chosen_before = tl.where(take, before, chosen_before)
        chosen_ties = tl.where(take, ties_left, chosen_ties)
        found |= (take & (before + part > target)).to(tl.int32)
        before += part
        ties_left -= tied
    ids = chosen + tl.arange(0, BLOCK)
    values = load_usable(row_logits, ids, VOCABULARY)
    keys = order(values, UNUSED_BITS)
    equal = (keys == threshold).to(tl.int32)
    kept = (keys > threshold) | ((equal == 1) & (tl.cumsum(equal, 0) <= chosen_ties))
    weights = tl.where(kept, weights_beside(values, peak, coldness), 0.0)
    return first_over(weights, target - chosen_before, ids)
