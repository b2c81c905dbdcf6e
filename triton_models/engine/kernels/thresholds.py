"""Thresholds among a row's logits, found without sorting them.

A fixed mapping turns float32 numbers into integers of the same order, called keys. The threshold is the
lowest key with fewer than a given number of tokens above it, or less than a given weight. Each pass over the
row tries three candidates and leaves a quarter of the range, so at most 17 passes find it in float32, and 9
in bfloat16, whose keys need half the bits.
"""

import triton
import triton.language as tl

from triton_models.engine.kernels.drawing import load_usable, weights_beside

STAGES: tl.constexpr = tl.constexpr(3)
"""Depth of the pipeline of loads."""

GROUPS: tl.constexpr = tl.constexpr(128)
"""Parts of a row whose largest logits bound the search for a top_k of at most this number."""


@triton.jit
def order(values, UNUSED_BITS: tl.constexpr):
    """Map float32 numbers to int32 keys in the same order; 0 and -0 map to the same key."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED_BITS


@triton.jit
def value_of(key, UNUSED_BITS: tl.constexpr):
    """Return the float32 number of a key: the inverse of `order`."""
    key = key << UNUSED_BITS
    # A negative number's bits are inverted, including the unused ones.
    bits = tl.where(key < 0, (key | ((1 << UNUSED_BITS) - 1)) ^ 0x7FFFFFFF, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def logit_of(log_weight, peak, coldness):
    """Return the logit whose weight relative to the peak has that logarithm."""
    return (peak.to(tl.float64) + log_weight.to(tl.float64) / coldness.to(tl.float64)).to(tl.float32)


@triton.jit
def kth_group_peak(row_logits, k, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Return the k-th largest of the group peaks of a row: at least k logits are that large."""
    lanes = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in tl.range(0, VOCABULARY, BLOCK, num_stages=STAGES):
        lanes = tl.maximum(lanes, load_usable(row_logits, start + tl.arange(0, BLOCK), VOCABULARY))
    group_peaks = tl.max(tl.reshape(lanes, (GROUPS, BLOCK // GROUPS)), 1)
    larger = tl.sum((group_peaks[None, :] > group_peaks[:, None]).to(tl.int32), 1)
    return tl.min(tl.where(larger < k, group_peaks, float("inf")), 0)


@triton.jit
def search(
    row_logits,
    low,
    high,
    limit,
    peak,
    coldness,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    WEIGHED: tl.constexpr,
):
    """Find the lowest key in [low, high] with less than `limit` above it: number of tokens, or their weight.

    Returns the key, which is one of the row's, and what is above it. Nothing may be above `high`, and `low`
    must be at most the key.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    above = tl.full((), 0.0, tl.float64)
    while low < high:
        first = low + (high - low) // 4
        second = low + (high - low) // 2
        third = low + (high - low) * 3 // 4
        over_first = tl.zeros((BLOCK,), tl.float32)
        over_second = tl.zeros((BLOCK,), tl.float32)
        over_third = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, VOCABULARY, BLOCK, num_stages=STAGES):
            values = load_usable(row_logits, start + tl.arange(0, BLOCK), VOCABULARY)
            keys = order(values, UNUSED_BITS)
            weights = weights_beside(values, peak, coldness) if WEIGHED else 1.0
            over_first += tl.where(keys > first.to(tl.int32), weights, 0.0)
            over_second += tl.where(keys > second.to(tl.int32), weights, 0.0)
            over_third += tl.where(keys > third.to(tl.int32), weights, 0.0)
        above_first = tl.sum(over_first.to(tl.float64), 0)
        above_second = tl.sum(over_second.to(tl.float64), 0)
        above_third = tl.sum(over_third.to(tl.float64), 0)
        if above_first < limit:
            high, above = first, above_first
        elif above_second < limit:
            low, high, above = first + 1, second, above_second
        elif above_third < limit:
            low, high, above = second + 1, third, above_third
        else:
            low = third + 1
    return low.to(tl.int32), above


@triton.jit
def kept_weight(
    row_logits,
    threshold,
    ties,
    peak,
    coldness,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
):
    """Return the weight of the tokens above the threshold and of the first `ties` that equal it."""
    over = tl.zeros((BLOCK,), tl.float32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, VOCABULARY, BLOCK, num_stages=STAGES):
        values = load_usable(row_logits, start + tl.arange(0, BLOCK), VOCABULARY)
        keys = order(values, UNUSED_BITS)
        over += tl.where(keys > threshold, weights_beside(values, peak, coldness), 0.0)
        equal += (keys == threshold).to(tl.int32)
    weight = weights_beside(value_of(threshold, UNUSED_BITS), peak, coldness).to(tl.float64)
    return tl.sum(over.to(tl.float64), 0) + tl.minimum(ties, tl.sum(equal, 0)) * weight
