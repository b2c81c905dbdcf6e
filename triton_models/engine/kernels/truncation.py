"""Finds which tokens of a row top_k, top_p and min_p keep, without sorting them.

The tokens kept are the most likely ones: all with a logit above a threshold, and the first few with a logit
equal to it. A fixed mapping turns float32 numbers into integers of the same order, called keys. The threshold
is the lowest key with fewer than a given number of tokens above it, or less than a given weight. Each pass
over the row tries three candidates and leaves a quarter of the range, so at most 17 passes find it in
float32, and 9 in bfloat16, whose keys need half the bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine.sampler import SamplerInputs
from triton_models.engine.sampling import GREEDY_BELOW

_BLOCK = 4096
"""Logits that a row's program loads at once."""

_WARPS = 16

_STAGES: tl.constexpr = tl.constexpr(3)
"""Depth of the pipeline of loads."""

GROUPS: tl.constexpr = tl.constexpr(128)
"""Parts of a row whose largest logits bound the search for a top_k of at most this number."""

_GREEDY_BELOW: tl.constexpr = tl.constexpr(GREEDY_BELOW)

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
        inputs.temperatures,
        inputs.top_k,
        inputs.top_p,
        inputs.min_p,
        floors,
        last_ids,
        VOCABULARY=vocabulary,
        BLOCK=_BLOCK,
        UNUSED_BITS=_UNUSED_BITS[logits.dtype],
        num_warps=_WARPS,
    )


@triton.jit
def inverse(temperature):
    """Return the factor for differences of logits."""
    return tl.div_rn(1.0, temperature)


@triton.jit
def load_usable(row_logits, ids, VOCABULARY: tl.constexpr):
    """Return float32 logits, with -inf for ids that cannot be chosen: out of range, infinite or NaN."""
    wide = tl.load(row_logits + ids, mask=ids < VOCABULARY, other=float("-inf")).to(tl.float32)
    return tl.where(tl.abs(wide) < float("inf"), wide, float("-inf"))


@triton.jit
def weights_beside(values, peak, inverse_temperature):
    """Return exp((values - peak) * inverse_temperature): 1 at the peak, 0 for -inf, whatever the peak is."""
    return tl.exp((values - tl.where(peak > float("-inf"), peak, 0.0)) * inverse_temperature)


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
def _logit_of(log_weight, peak, inverse_temperature):
    """Return the logit whose weight relative to the peak has that logarithm."""
    return (peak.to(tl.float64) + log_weight.to(tl.float64) / inverse_temperature.to(tl.float64)).to(
        tl.float32
    )


@triton.jit
def group_peaks(row_logits, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest logit of each of `GROUPS` parts of a row."""
    lanes = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in tl.range(0, VOCABULARY, BLOCK, num_stages=_STAGES):
        lanes = tl.maximum(lanes, load_usable(row_logits, start + tl.arange(0, BLOCK), VOCABULARY))
    return tl.max(tl.reshape(lanes, (GROUPS, BLOCK // GROUPS)), 1)


@triton.jit
def kth_largest(values, k):
    """Return the k-th largest of a few values, of which there are at least k."""
    larger = tl.sum((values[None, :] > values[:, None]).to(tl.int32), 1)
    return tl.min(tl.where(larger < k, values, float("inf")), 0)


@triton.jit
def search(
    row_logits,
    low,
    high,
    limit,
    peak,
    inverse_temperature,
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
        for start in tl.range(0, VOCABULARY, BLOCK, num_stages=_STAGES):
            values = load_usable(row_logits, start + tl.arange(0, BLOCK), VOCABULARY)
            keys = order(values, UNUSED_BITS)
            weights = weights_beside(values, peak, inverse_temperature) if WEIGHED else 1.0
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
    over = tl.zeros((BLOCK,), tl.float32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, VOCABULARY, BLOCK, num_stages=_STAGES):
        values = load_usable(row_logits, start + tl.arange(0, BLOCK), VOCABULARY)
        keys = order(values, UNUSED_BITS)
        over += tl.where(keys > threshold, weights_beside(values, peak, inverse_temperature), 0.0)
        equal += (keys == threshold).to(tl.int32)
    weight = weights_beside(value_of(threshold, UNUSED_BITS), peak, inverse_temperature).to(tl.float64)
    return tl.sum(over.to(tl.float64), 0) + tl.minimum(ties, tl.sum(equal, 0)) * weight


@triton.jit
def _id_of_tie(
    row_logits, threshold, ties, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, UNUSED_BITS: tl.constexpr
):
    """Return the id of the token that is number `ties`, from 1, of those that equal the threshold.

    If there are fewer, any id that is not lower than theirs.
    """
    found = tl.full((), VOCABULARY, tl.int32)
    for start in tl.range(0, VOCABULARY, BLOCK, num_stages=_STAGES):
        ids = start + tl.arange(0, BLOCK)
        keys = order(load_usable(row_logits, ids, VOCABULARY), UNUSED_BITS)
        equal = ((keys == threshold) & (ids < VOCABULARY)).to(tl.int32)
        count = tl.sum(equal, 0)
        if (ties > 0) & (ties <= count):
            found = tl.min(tl.where(tl.cumsum(equal, 0) >= ties, ids, VOCABULARY), 0)
        ties -= count
    return found


@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_k", "top_p", "min_p", "floors", "last_ids"])
def _find_limits(
    logits,
    temperatures,
    top_k,
    top_p,
    min_p,
    floors,
    last_ids,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
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
    peaks = group_peaks(row_logits, VOCABULARY, BLOCK)
    peak = tl.max(peaks, 0)
    highest = order(peak, UNUSED_BITS)

    # Kept so far: tokens above the threshold, and `ties` of those that equal it.
    threshold = order(tl.full((), float("-inf"), tl.float32), UNUSED_BITS)
    ties = tl.full((), VOCABULARY, tl.int64)
    if least > 0:
        bound = _logit_of(tl.log(least), peak, inverse_temperature)
        lowest = order(bound, UNUSED_BITS)
        lowest = tl.minimum(tl.where(value_of(lowest, UNUSED_BITS) < bound, lowest + 1, lowest), highest)
        threshold, ties = lowest - 1, tl.full((), 0, tl.int64)
    if counted:
        low = threshold
        if k <= GROUPS:
            low = tl.maximum(low, order(kth_largest(peaks, k), UNUSED_BITS))
        found, above = search(
            row_logits,
            low,
            highest,
            k.to(tl.float64),
            peak,
            inverse_temperature,
            VOCABULARY,
            BLOCK,
            UNUSED_BITS,
            WEIGHED=False,
        )
        found_ties = k - above.to(tl.int64)
        ties = tl.where(found == threshold, tl.minimum(ties, found_ties), found_ties)
        threshold = found
    if p < 1:
        limit = p * _kept_weight(
            row_logits, threshold, ties, peak, inverse_temperature, VOCABULARY, BLOCK, UNUSED_BITS
        )
        # All tokens with less than (1 - top_p) / V of the most likely one's weight together weigh less than
        # the 1 - top_p that may be dropped, so the threshold is above them.
        lightest = tl.log((1 - p).to(tl.float32) / VOCABULARY) - _MARGIN
        low = tl.maximum(threshold, order(_logit_of(lightest, peak, inverse_temperature), UNUSED_BITS) - 1)
        found, above = search(
            row_logits,
            low,
            highest,
            limit,
            peak,
            inverse_temperature,
            VOCABULARY,
            BLOCK,
            UNUSED_BITS,
            WEIGHED=True,
        )
        weight = weights_beside(value_of(found, UNUSED_BITS), peak, inverse_temperature).to(tl.float64)
        enough = tl.ceil((limit - above) / tl.where(weight > 0, weight, 1.0))
        found_ties = tl.minimum(enough, VOCABULARY).to(tl.int64)
        ties = tl.where(found == threshold, tl.minimum(ties, found_ties), found_ties)
        threshold = found

    last = tl.where(ties > 0, VOCABULARY, -1)
    if (ties > 0) & (ties < VOCABULARY):
        last = _id_of_tie(row_logits, threshold, ties, VOCABULARY, BLOCK, UNUSED_BITS)
    tl.store(floors + row, value_of(threshold, UNUSED_BITS))
    tl.store(last_ids + row, last)
