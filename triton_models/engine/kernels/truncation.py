"""Finds which tokens of a row top_k, top_p and min_p keep, without sorting them.

The tokens kept are the most likely ones: all with a logit above a threshold, and the first few with a logit
equal to it. A fixed mapping turns float32 numbers into integers of the same order, called keys. The threshold
is the lowest key with fewer than a given number of tokens above it, or less than a given weight. Each pass
over the row tries three candidates and leaves a quarter of the range, so at most 17 passes find it in
float32, and 9 in bfloat16, whose keys need half the bits. Once few tokens are left in the range, they are
collected, and further passes read only them: a top_k takes two passes over the row, a top_p six.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine.sampler import SamplerInputs
from triton_models.engine.sampling import GREEDY_BELOW

_BLOCK = 4096
"""Logits that a row's program loads at once, and most tokens that it collects."""

_WARPS = 8

_STAGES: tl.constexpr = tl.constexpr(3)
"""Depth of the pipeline of loads."""

GROUPS: tl.constexpr = tl.constexpr(128)
"""Parts of a row whose largest logits bound the search for a top_k of at most this number."""

_GREEDY_BELOW: tl.constexpr = tl.constexpr(GREEDY_BELOW)

_ROUNDS: tl.constexpr = tl.constexpr(3)
"""Passes over a row with a top_p before tokens are collected: of 12 units of logits, which hold most tokens,
a fifth of one is left."""

_ENOUGH: tl.constexpr = tl.constexpr(32)
"""Passes that end every search."""

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
        logits.new_empty(rows, _BLOCK),
        torch.empty(rows, _BLOCK, dtype=torch.int32, device=logits.device),
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
    """Return the float32 number of a key: the inverse of `order`, which gives no number the key -1.

    Of that one, the number is the largest below 0: exactly the numbers above it have keys above -1, too.
    """
    key = tl.where(key == -1, -2, key) << UNUSED_BITS
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
def collect(row_logits, low, high, few, few_ids, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the tokens whose logits are in [low, high] if they are at most BLOCK, and fill `few` with -inf.

    Returns their number. Their order is always the same, but not that of their ids.
    """
    here = tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, VOCABULARY, BLOCK, num_stages=_STAGES):
        values = load_usable(row_logits, start + here, VOCABULARY)
        counts += ((values >= low) & (values <= high) & (start + here < VOCABULARY)).to(tl.int32)
    number = tl.sum(counts, 0)
    if number <= BLOCK:
        tl.store(few + here, tl.full((BLOCK,), float("-inf"), tl.float32), mask=here >= number)
        places = tl.cumsum(counts, 0) - counts
        for start in tl.range(0, VOCABULARY, BLOCK, num_stages=_STAGES):
            values = load_usable(row_logits, start + here, VOCABULARY)
            wanted = (values >= low) & (values <= high) & (start + here < VOCABULARY)
            tl.store(few + places, values, mask=wanted)
            tl.store(few_ids + places, start + here, mask=wanted)
            places += wanted.to(tl.int32)
        tl.debug_barrier()  # other threads than those that wrote them read them
    return number


@triton.jit
def search(
    source,
    length,
    low,
    high,
    above,
    missing,
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

    `low` must be at most that key, and `high` at least; `above` is what is above `high`, and `missing` what
    `source` lacks of it. Returns `low`, `high` and `above`; at the end both are the key, which is one of the
    row's. Where ROUNDS is not 0, at most so many passes are made, and what they leave is returned. Those
    divide the range as numbers, not as keys: where most logits are, its parts then hold about as many.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    above = above.to(tl.float64)
    left = tl.full((), ROUNDS if ROUNDS > 0 else _ENOUGH, tl.int32)
    while (low < high) & (left > 0):
        if ROUNDS == 0:
            first = (low + (high - low) // 4).to(tl.int32)
            second = (low + (high - low) // 2).to(tl.int32)
            third = (low + (high - low) * 3 // 4).to(tl.int32)
        else:
            bottom = value_of(low.to(tl.int32), UNUSED_BITS)
            quarter = (value_of(high.to(tl.int32), UNUSED_BITS) - bottom) * 0.25
            first = _clamped(order(bottom + quarter, UNUSED_BITS), low, high)
            second = _clamped(order(bottom + 2 * quarter, UNUSED_BITS), low, high)
            third = _clamped(order(bottom + 3 * quarter, UNUSED_BITS), low, high)
        over_first = tl.zeros((BLOCK,), tl.float32)
        over_second = tl.zeros((BLOCK,), tl.float32)
        over_third = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, length, BLOCK, num_stages=_STAGES):
            values = load_usable(source, start + tl.arange(0, BLOCK), VOCABULARY)
            weights = weights_beside(values, peak, inverse_temperature) if WEIGHED else 1.0
            over_first += tl.where(values > value_of(first, UNUSED_BITS), weights, 0.0)
            over_second += tl.where(values > value_of(second, UNUSED_BITS), weights, 0.0)
            over_third += tl.where(values > value_of(third, UNUSED_BITS), weights, 0.0)
        above_first = missing + tl.sum(over_first.to(tl.float64), 0)
        above_second = missing + tl.sum(over_second.to(tl.float64), 0)
        above_third = missing + tl.sum(over_third.to(tl.float64), 0)
        if above_first < limit:
            high, above = first.to(tl.int64), above_first
        elif above_second < limit:
            low, high, above = first.to(tl.int64) + 1, second.to(tl.int64), above_second
        elif above_third < limit:
            low, high, above = second.to(tl.int64) + 1, third.to(tl.int64), above_third
        else:
            low = third.to(tl.int64) + 1
        left -= 1
    return low.to(tl.int32), high.to(tl.int32), above


@triton.jit
def _clamped(key, low, high):
    """Return the key, or the nearest one in [low, high)."""
    return tl.minimum(tl.maximum(key.to(tl.int64), low), high - 1).to(tl.int32)


@triton.jit
def _kept_weight(
    source,
    length,
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
    over = tl.zeros((BLOCK,), tl.float32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, length, BLOCK, num_stages=_STAGES):
        values = load_usable(source, start + tl.arange(0, BLOCK), VOCABULARY)
        over += tl.where(values > floor, weights_beside(values, peak, inverse_temperature), 0.0)
        equal += (values == floor).to(tl.int32)
    weight = weights_beside(floor, peak, inverse_temperature).to(tl.float64)
    return tl.sum(over.to(tl.float64), 0) + tl.minimum(ties, tl.sum(equal, 0)) * weight


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
    for start in tl.range(0, VOCABULARY, BLOCK, num_stages=_STAGES):
        ids = start + tl.arange(0, BLOCK)
        values = load_usable(row_logits, ids, VOCABULARY)
        equal = ((values == floor) & (ids < VOCABULARY)).to(tl.int32)
        count = tl.sum(equal, 0)
        if (ties > 0) & (ties <= count):
            last = tl.min(tl.where(tl.cumsum(equal, 0) >= ties, ids, VOCABULARY), 0)
        ties -= count
    return last


@triton.jit
def _last_of_few(few, few_ids, floor, ties, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Do the same for tokens that were collected."""
    here = tl.arange(0, BLOCK)
    equal = tl.load(few + here).to(tl.float32) == floor
    ids = tl.load(few_ids + here, mask=equal, other=VOCABULARY)
    low, last = tl.full((), 0, tl.int32), tl.full((), VOCABULARY, tl.int32)
    while low < last:
        middle = (low + last) // 2
        if tl.sum((ids <= middle).to(tl.int32), 0) >= ties:
            last = middle
        else:
            low = middle + 1
    return last


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
    few += row * BLOCK
    few_ids += row * BLOCK
    peaks = group_peaks(row_logits, VOCABULARY, BLOCK)
    peak = tl.max(peaks, 0)
    highest = order(peak, UNUSED_BITS)

    # The tokens that may be kept: those of the row, or collected from it.
    source, length = row_logits, tl.full((), VOCABULARY, tl.int32)
    collected = tl.full((), 0, tl.int32)
    none = tl.full((), 0.0, tl.float64)
    # Kept so far: tokens above the threshold, and `ties` of those that equal it.
    threshold, ties = _above_share(least, peak, inverse_temperature, VOCABULARY, UNUSED_BITS)
    if counted:
        low = threshold
        if k <= GROUPS:
            low = tl.maximum(low, order(kth_largest(peaks, k), UNUSED_BITS))
            count = collect(row_logits, value_of(low, UNUSED_BITS), peak, few, few_ids, VOCABULARY, BLOCK)
            if count <= BLOCK:
                source, length = few, tl.full((), BLOCK, tl.int32)
                collected += 1
        found, _, above = search(
            source,
            length,
            low,
            highest,
            none,
            none,
            k.to(tl.float64),
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
        threshold = found
    if p < 1:
        limit = p * _kept_weight(
            source, length, threshold, ties, peak, inverse_temperature, VOCABULARY, BLOCK, UNUSED_BITS
        )
        # All tokens with less than (1 - top_p) / V of the most likely one's weight together weigh less than
        # the 1 - top_p that may be dropped, so the threshold is above them.
        lightest = tl.log((1 - p).to(tl.float32) / VOCABULARY) - _MARGIN
        low = tl.maximum(threshold, order(_logit_of(lightest, peak, inverse_temperature), UNUSED_BITS) - 1)
        high, above, missing = highest, none, none
        if collected == 0:
            low, high, above = search(
                source,
                length,
                low,
                high,
                none,
                none,
                limit,
                peak,
                inverse_temperature,
                VOCABULARY,
                BLOCK,
                UNUSED_BITS,
                WEIGHED=True,
                ROUNDS=_ROUNDS,
            )
            count = collect(
                row_logits,
                value_of(low, UNUSED_BITS),
                value_of(high, UNUSED_BITS),
                few,
                few_ids,
                VOCABULARY,
                BLOCK,
            )
            if count <= BLOCK:
                source, length, missing = few, tl.full((), BLOCK, tl.int32), above
                collected += 1
        found, _, above = search(
            source,
            length,
            low,
            high,
            above,
            missing,
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
        threshold = found

    floor = value_of(threshold, UNUSED_BITS)
    tl.store(floors + row, floor)
    if (ties == 0) | (ties >= VOCABULARY):
        tl.store(last_ids + row, tl.where(ties == 0, -1, VOCABULARY))
    elif collected == 0:
        tl.store(last_ids + row, _last_of_row(row_logits, floor, ties, VOCABULARY, BLOCK))
    else:
        tl.store(last_ids + row, _last_of_few(few, few_ids, floor, ties, VOCABULARY, BLOCK))
