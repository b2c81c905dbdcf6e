"""Finds which tokens of a row top_k, top_p and min_p keep, without sorting them.

The tokens kept are the most likely ones: all with a logit above a threshold, and the first few with a logit
equal to it. A top_k of at most 128 takes three passes over the row, a top_p seven.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine.kernels.threshold import (
    FOLD,
    GROUPS,
    collect,
    folded,
    group_peaks,
    kth_largest,
    load_usable,
    order,
    search,
    search_few,
    total,
    value_of,
    weights_beside,
)
from triton_models.engine.sampler import SamplerInputs
from triton_models.engine.sampling import GREEDY_BELOW

_BLOCK = 8192
"""Logits that a row's program loads at once."""

_FEW = 1024
"""Most tokens that it collects."""

_WARPS = 16

_GREEDY_BELOW: tl.constexpr = tl.constexpr(GREEDY_BELOW)

_ROUNDS: tl.constexpr = tl.constexpr(3)
"""Passes over a row with a top_p before tokens are collected: of 12 units of logits, which hold most tokens,
a fifth of one is left."""

_MARGIN: tl.constexpr = tl.constexpr(0.01)
"""Margin for a bound on logarithms of weights, far larger than their rounding errors."""

_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits that are always 0 in a float32 converted from this dtype."""


def find_limits(logits: Tensor, inputs: SamplerInputs, floors: Tensor, last_ids: Tensor) -> None:
    """Find the tokens that each row keeps, as `draw.kept` defines them.

    They are those with a logit above the row's floor, or equal to it and with an id up to the row's last.
    Compiled once for each dtype of the logits and size of the vocabulary, provided that the address of
    `logits` is a multiple of 16.

    Args:
        logits: [S, V], contiguous, float32, float16 or bfloat16.
        inputs: the rows' rules; greedy rows are left out.
        floors: [S] float32, written.
        last_ids: [S] int32, written.
    """
    rows, vocabulary = logits.shape
    _find_limits[(rows,)](
        logits,
        logits.new_empty(rows, _FEW),
        torch.empty(rows, _FEW, dtype=torch.int32, device=logits.device),
        inputs.temperatures,
        inputs.top_k,
        inputs.top_p,
        inputs.min_p,
        floors,
        last_ids,
        VOCABULARY=vocabulary,
        BLOCK=_BLOCK,
        FEW=_FEW,
        UNUSED_BITS=_UNUSED_BITS[logits.dtype],
        num_warps=_WARPS,
    )


@triton.jit
def inverse(temperature):
    """Return the factor for differences of logits."""
    return tl.div_rn(1.0, temperature)


@triton.jit
def _logit_of(log_weight, peak, inverse_temperature):
    """Return the logit whose weight relative to the peak has that logarithm."""
    return (peak.to(tl.float64) + log_weight.to(tl.float64) / inverse_temperature.to(tl.float64)).to(
        tl.float32
    )


@triton.jit
def _kept_weight(
    row_logits,
    threshold,
    ties,
    peak,
    inverse_temperature,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
):
    """Return the weight of the tokens above the threshold and of the first `ties` that equal it."""
    floor = value_of(threshold, UNUSED_BITS)
    over = tl.zeros((BLOCK // FOLD,), tl.float32)
    equal = tl.zeros((BLOCK // FOLD,), tl.int32)
    for start in range(0, VOCABULARY, BLOCK):
        values = load_usable(row_logits, start + tl.arange(0, BLOCK), VOCABULARY)
        over += folded(tl.where(values > floor, weights_beside(values, peak, inverse_temperature), 0.0))
        equal += folded((values == floor).to(tl.int32))
    weight = weights_beside(floor, peak, inverse_temperature).to(tl.float64)
    return total(over) + tl.minimum(ties, tl.sum(equal, 0)) * weight


@triton.jit
def _kept_weight_of_few(values, threshold, ties, peak, inverse_temperature, UNUSED_BITS: tl.constexpr):
    """Do the same for tokens that were collected."""
    floor = value_of(threshold, UNUSED_BITS)
    over = folded(tl.where(values > floor, weights_beside(values, peak, inverse_temperature), 0.0))
    weight = weights_beside(floor, peak, inverse_temperature).to(tl.float64)
    return total(over) + tl.minimum(ties, tl.sum((values == floor).to(tl.int32), 0)) * weight


@triton.jit
def _above_share(share, peak, inverse_temperature, VOCABULARY: tl.constexpr, UNUSED_BITS: tl.constexpr):
    """Return the threshold, and how many tokens that equal it are kept, for at least that share of the peak.

    Where it is 0, all are kept.
    """
    threshold = order(tl.full((), float("-inf"), tl.float32), UNUSED_BITS)
    ties = tl.full((), VOCABULARY, tl.int64)
    if share > 0:
        bound = _logit_of(tl.log(share), peak, inverse_temperature)
        lowest = order(bound, UNUSED_BITS)
        lowest = tl.where(value_of(lowest, UNUSED_BITS) < bound, lowest + 1, lowest)
        threshold = tl.minimum(lowest, order(peak, UNUSED_BITS)) - 1
        ties = tl.full((), 0, tl.int64)
    return threshold, ties


@triton.jit
def _last_of_row(row_logits, floor, ties, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Return the id of the token that is number `ties`, from 1, of those that equal the floor.

    If there are fewer, any id that is not lower than theirs.
    """
    last = tl.full((), VOCABULARY, tl.int32)
    for start in range(0, VOCABULARY, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = load_usable(row_logits, ids, VOCABULARY)
        equal = ((values == floor) & (ids < VOCABULARY)).to(tl.int32)
        count = tl.sum(equal, 0)
        if (ties > 0) & (ties <= count):
            last = tl.min(tl.where(tl.cumsum(equal, 0) >= ties, ids, VOCABULARY), 0)
        ties -= count
    return last


@triton.jit
def _last_of_few(values, few_ids, floor, ties, VOCABULARY: tl.constexpr, FEW: tl.constexpr):
    """Do the same for tokens that were collected."""
    ids = tl.load(few_ids + tl.arange(0, FEW), mask=values == floor, other=VOCABULARY)
    low, last = tl.full((), 0, tl.int32), tl.full((), VOCABULARY, tl.int32)
    while low < last:
        middle = (low + last) // 2
        if tl.sum((ids <= middle).to(tl.int32), 0) >= ties:
            last = middle
        else:
            low = middle + 1
    return last


@triton.jit
def _limit_by_count(
    row_logits,
    few,
    few_ids,
    k,
    peaks,
    peak,
    inverse_temperature,
    threshold,
    ties,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
):
    """Keep at most k tokens. Returns threshold, ties, and 1 if all that may be kept are collected now."""
    low, highest = threshold, order(peak, UNUSED_BITS)
    none = tl.full((), 0.0, tl.float64)
    collected = tl.full((), 0, tl.int32)
    if k <= GROUPS:
        low = tl.maximum(low, order(kth_largest(peaks, k), UNUSED_BITS))
        lowest = value_of(low, UNUSED_BITS)
        collected += collect(row_logits, lowest, peak, few, few_ids, VOCABULARY, BLOCK, FEW).to(tl.int32)
    limit = k.to(tl.float64)
    if collected > 0:
        values = tl.load(few + tl.arange(0, FEW)).to(tl.float32)
        ones = tl.full((FEW,), 1.0, tl.float32)
        found, above = search_few(values, ones, low, highest, none, limit, UNUSED_BITS)
    else:
        found, _, above = search(
            row_logits,
            low,
            highest,
            none,
            limit,
            peak,
            inverse_temperature,
            VOCABULARY,
            BLOCK,
            UNUSED_BITS,
            WEIGHED=False,
            ROUNDS=0,
        )
    found_ties = k - above.to(tl.int64)
    ties = tl.where(found == threshold, tl.minimum(ties, found_ties), found_ties)
    return found, ties, collected


@triton.jit
def _limit_by_weight(
    row_logits,
    few,
    few_ids,
    p,
    collected,
    peak,
    inverse_temperature,
    threshold,
    ties,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
):
    """Keep tokens until they have the share p of the weight. Returns what `_limit_by_count` does."""
    all_few = few + tl.arange(0, FEW)
    if collected > 0:
        values = tl.load(all_few).to(tl.float32)
        kept = _kept_weight_of_few(values, threshold, ties, peak, inverse_temperature, UNUSED_BITS)
    else:
        kept = _kept_weight(
            row_logits, threshold, ties, peak, inverse_temperature, VOCABULARY, BLOCK, UNUSED_BITS
        )
    limit = p * kept
    # All tokens with less than (1 - top_p) / V of the most likely one's weight together weigh less than
    # the 1 - top_p that may be dropped, so the threshold is above them.
    lightest = tl.log((1 - p).to(tl.float32) / VOCABULARY) - _MARGIN
    low = tl.maximum(threshold, order(_logit_of(lightest, peak, inverse_temperature), UNUSED_BITS) - 1)
    high, above = order(peak, UNUSED_BITS), tl.full((), 0.0, tl.float64)
    if collected == 0:
        low, high, above = search(
            row_logits,
            low,
            high,
            above,
            limit,
            peak,
            inverse_temperature,
            VOCABULARY,
            BLOCK,
            UNUSED_BITS,
            WEIGHED=True,
            ROUNDS=_ROUNDS,
        )
        lowest, largest = value_of(low, UNUSED_BITS), value_of(high, UNUSED_BITS)
        collected += collect(row_logits, lowest, largest, few, few_ids, VOCABULARY, BLOCK, FEW).to(tl.int32)
    if collected > 0:
        values = tl.load(all_few).to(tl.float32)
        weights = weights_beside(values, peak, inverse_temperature)
        found, above = search_few(values, weights, low, high, above, limit, UNUSED_BITS)
    else:
        found, _, above = search(
            row_logits,
            low,
            high,
            above,
            limit,
            peak,
            inverse_temperature,
            VOCABULARY,
            BLOCK,
            UNUSED_BITS,
            WEIGHED=True,
            ROUNDS=0,
        )
    weight = weights_beside(value_of(found, UNUSED_BITS), peak, inverse_temperature).to(tl.float64)
    enough = tl.ceil((limit - above) / tl.where(weight > 0, weight, 1.0))
    found_ties = tl.minimum(enough, VOCABULARY).to(tl.int64)
    ties = tl.where(found == threshold, tl.minimum(ties, found_ties), found_ties)
    return found, ties, collected


@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_k", "top_p", "min_p", "floors", "last_ids"])
def _find_limits(
    logits,
    few,
    few_ids,
    temperatures,
    top_k,
    top_p,
    min_p,
    floors,
    last_ids,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
):
    row = tl.program_id(0)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row).to(tl.float32)
    temperature = tl.load(temperatures + row)
    counted = (k > 0) & (k < VOCABULARY)
    limited = counted | (p < 1) | (least > 0)
    if (temperature < _GREEDY_BELOW) | (limited == 0):
        tl.store(floors + row, float("-inf"))
        tl.store(last_ids + row, VOCABULARY)
        return
    inverse_temperature = inverse(temperature)
    row_logits = logits + row.to(tl.int64) * VOCABULARY
    few += row * FEW
    few_ids += row * FEW
    peaks = group_peaks(row_logits, VOCABULARY, BLOCK)
    peak = tl.max(peaks, 0)

    # Kept so far: tokens above the threshold, and `ties` of those that equal it.
    threshold, ties = _above_share(least, peak, inverse_temperature, VOCABULARY, UNUSED_BITS)
    collected = tl.full((), 0, tl.int32)
    if counted:
        threshold, ties, collected = _limit_by_count(
            row_logits,
            few,
            few_ids,
            k,
            peaks,
            peak,
            inverse_temperature,
            threshold,
            ties,
            VOCABULARY,
            BLOCK,
            FEW,
            UNUSED_BITS,
        )
    if p < 1:
        threshold, ties, collected = _limit_by_weight(
            row_logits,
            few,
            few_ids,
            p,
            collected,
            peak,
            inverse_temperature,
            threshold,
            ties,
            VOCABULARY,
            BLOCK,
            FEW,
            UNUSED_BITS,
        )

    floor = value_of(threshold, UNUSED_BITS)
    tl.store(floors + row, floor)
    if (ties == 0) | (ties >= VOCABULARY):
        tl.store(last_ids + row, tl.where(ties == 0, -1, VOCABULARY))
    elif collected == 0:
        tl.store(last_ids + row, _last_of_row(row_logits, floor, ties, VOCABULARY, BLOCK))
    else:
        values = tl.load(few + tl.arange(0, FEW)).to(tl.float32)
        tl.store(last_ids + row, _last_of_few(values, few_ids, floor, ties, VOCABULARY, FEW))
