"""Finds a threshold in a row of logits by passes over it, without sorting.

A fixed mapping turns float32 numbers into integers of the same order, called keys. The threshold is the
lowest key with fewer than a given number of tokens above it, or less than a given weight. Each pass over the
row tries three candidates and leaves a quarter of the range, so at most 17 passes find it in float32, and 9
in bfloat16, whose keys need half the bits. Once few tokens are left in the range, they are collected, and the
search goes on among them in registers.
"""

import triton
import triton.language as tl

GROUPS: tl.constexpr = tl.constexpr(128)
"""Parts of a row whose largest logits bound the search for a top_k of at most this number."""

FOLD: tl.constexpr = tl.constexpr(4)
"""Neighbours of a row whose weights are added first: a thread loads as many at once, or twice as many."""

_ENOUGH: tl.constexpr = tl.constexpr(32)
"""Passes that end every search."""


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
    """Return the float32 number of a key: the inverse of `order`, which gives no number the key -1.

    Of that one, the number is the largest below 0: exactly the numbers above it have keys above -1, too.
    """
    key = tl.where(key == -1, -2, key) << UNUSED_BITS
    # A negative number's bits are inverted, including the unused ones.
    bits = tl.where(key < 0, (key | ((1 << UNUSED_BITS) - 1)) ^ 0x7FFFFFFF, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def group_peaks(row_logits, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest logit of each of `GROUPS` parts of a row."""
    lanes = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        lanes = tl.maximum(lanes, load_usable(row_logits, start + tl.arange(0, BLOCK), VOCABULARY))
    return tl.max(tl.reshape(lanes, (GROUPS, BLOCK // GROUPS)), 1)


@triton.jit
def kth_largest(values, k):
    """Return the k-th largest of a few values, of which there are at least k."""
    larger = tl.sum((values[None, :] > values[:, None]).to(tl.int32), 1)
    return tl.min(tl.where(larger < k, values, float("inf")), 0)


@triton.jit
def collect(
    row_logits, low, high, few, few_ids, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr
):
    """Copy the tokens whose logits are in [low, high], and fill `few` with -inf; returns whether they fit.

    Their order is always the same, but not that of their ids.
    """
    here = tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, VOCABULARY, BLOCK):
        values = load_usable(row_logits, start + here, VOCABULARY)
        counts += ((values >= low) & (values <= high) & (start + here < VOCABULARY)).to(tl.int32)
    number = tl.sum(counts, 0)
    if number <= FEW:
        all_few = tl.arange(0, FEW)
        tl.store(few + all_few, tl.full((FEW,), float("-inf"), tl.float32), mask=all_few >= number)
        places = tl.cumsum(counts, 0) - counts
        for start in range(0, VOCABULARY, BLOCK):
            values = load_usable(row_logits, start + here, VOCABULARY)
            wanted = (values >= low) & (values <= high) & (start + here < VOCABULARY)
            tl.store(few + places, values, mask=wanted)
            tl.store(few_ids + places, start + here, mask=wanted)
            places += wanted.to(tl.int32)
        tl.debug_barrier()  # other threads than those that wrote them read them
    return number <= FEW


@triton.jit
def search(
    row_logits,
    low,
    high,
    above,
    limit,
    peak,
    inverse_temperature,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    WEIGHED: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Find the lowest key in [low, high] with less than `limit` above it: number of tokens, or their weight.

    `low` must be at most that key, and `high` at least; `above` is what is above `high`. Returns `low`,
    `high` and `above`; at the end both are the key, which is one of the row's. Where ROUNDS is not 0, at
    most so many passes are made, and what they leave is returned. Those divide the range as numbers, not as
    keys: where most logits are, its parts then hold about as many.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    above = above.to(tl.float64)
    left = tl.full((), ROUNDS if ROUNDS > 0 else _ENOUGH, tl.int32)
    while (low < high) & (left > 0):
        first, second, third = _candidates(low, high, UNUSED_BITS, BY_KEYS=ROUNDS == 0)
        over_first = tl.zeros((BLOCK // FOLD,), tl.float32)
        over_second = tl.zeros((BLOCK // FOLD,), tl.float32)
        over_third = tl.zeros((BLOCK // FOLD,), tl.float32)
        for start in range(0, VOCABULARY, BLOCK):
            values = load_usable(row_logits, start + tl.arange(0, BLOCK), VOCABULARY)
            weights = weights_beside(values, peak, inverse_temperature) if WEIGHED else 1.0
            over_first += folded(tl.where(values > value_of(first, UNUSED_BITS), weights, 0.0))
            over_second += folded(tl.where(values > value_of(second, UNUSED_BITS), weights, 0.0))
            over_third += folded(tl.where(values > value_of(third, UNUSED_BITS), weights, 0.0))
        low, high, above = _narrowed(
            low,
            high,
            above,
            first,
            second,
            third,
            total(over_first),
            total(over_second),
            total(over_third),
            limit,
        )
        left -= 1
    return low.to(tl.int32), high.to(tl.int32), above


@triton.jit
def search_few(values, weights, low, high, above, limit, UNUSED_BITS: tl.constexpr):
    """Do the same, to the end, where what is in [low, high] was collected; `weights`: what each counts.

    Returns the key, and what is above it.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    missing = above
    while low < high:
        first, second, third = _candidates(low, high, UNUSED_BITS, BY_KEYS=True)
        over_first = missing + total(folded(tl.where(values > value_of(first, UNUSED_BITS), weights, 0.0)))
        over_second = missing + total(folded(tl.where(values > value_of(second, UNUSED_BITS), weights, 0.0)))
        over_third = missing + total(folded(tl.where(values > value_of(third, UNUSED_BITS), weights, 0.0)))
        low, high, above = _narrowed(
            low, high, above, first, second, third, over_first, over_second, over_third, limit
        )
    return low.to(tl.int32), above


@triton.jit
def _candidates(low, high, UNUSED_BITS: tl.constexpr, BY_KEYS: tl.constexpr):
    """Return the keys in [low, high) that divide the range in four: as keys, or as numbers."""
    if BY_KEYS:
        first = (low + (high - low) // 4).to(tl.int32)
        second = (low + (high - low) // 2).to(tl.int32)
        third = (low + (high - low) * 3 // 4).to(tl.int32)
    else:
        bottom = value_of(low.to(tl.int32), UNUSED_BITS)
        quarter = (value_of(high.to(tl.int32), UNUSED_BITS) - bottom) * 0.25
        first = _clamped(order(bottom + quarter, UNUSED_BITS), low, high)
        second = _clamped(order(bottom + 2 * quarter, UNUSED_BITS), low, high)
        third = _clamped(order(bottom + 3 * quarter, UNUSED_BITS), low, high)
    return first, second, third


@triton.jit
def _clamped(key, low, high):
    """Return the key, or the nearest one in [low, high)."""
    return tl.minimum(tl.maximum(key.to(tl.int64), low), high - 1).to(tl.int32)


@triton.jit
def _narrowed(low, high, above, first, second, third, over_first, over_second, over_third, limit):
    """Return the part of the range that has the key, and what is above it.

    `over_first` to `over_third`: what is above each candidate.
    """
    if over_first < limit:
        high, above = first.to(tl.int64), over_first
    elif over_second < limit:
        low, high, above = first.to(tl.int64) + 1, second.to(tl.int64), over_second
    elif over_third < limit:
        low, high, above = second.to(tl.int64) + 1, third.to(tl.int64), over_third
    else:
        low = third.to(tl.int64) + 1
    return low, high, above


@triton.jit
def folded(numbers):
    """Return the sums of neighbours."""
    return tl.sum(tl.reshape(numbers, (numbers.shape[0] // FOLD, FOLD)), 1)


@triton.jit
def total(numbers):
    """Return the sum, in float64."""
    return tl.sum(numbers.to(tl.float64), 0)
