"""What the sampling kernels share: random numbers, weights relative to the largest logit, and the draw."""

import triton
import triton.language as tl

from triton_models.engine.sampling import GREEDY_BELOW

COLDEST: tl.constexpr = tl.constexpr(GREEDY_BELOW)
"""Below this temperature the most likely token is taken."""

# SplitMix64's, as in `triton_models.engine.random_numbers`.
_GAMMA: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
_UNIT: tl.constexpr = tl.constexpr(2.0**-48)

_NO_ID: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def uniform(seed, counter):
    """Return the number in [0, 1) that `random_numbers.uniform` gives, bit for bit, as float64."""
    state = _mix(seed.to(tl.uint64, bitcast=True)) + counter.to(tl.uint64) * _GAMMA
    return (_mix(state) >> 16).to(tl.float64) * _UNIT


@triton.jit
def _mix(state):
    state = state + _GAMMA
    state = (state ^ (state >> 30)) * _FIRST_MULTIPLIER
    state = (state ^ (state >> 27)) * _SECOND_MULTIPLIER
    return state ^ (state >> 31)


@triton.jit
def inverse(temperature):
    """Return the factor for differences of logits: 1 / temperature, or 1 where nothing is drawn."""
    return tl.where(temperature < COLDEST, 1.0, tl.div_rn(1.0, tl.maximum(temperature, COLDEST)))


@triton.jit
def load_usable(row_logits, ids, VOCABULARY: tl.constexpr):
    """Return float32 logits, with -inf for ids that cannot be chosen: out of range, infinite or NaN."""
    wide = tl.load(row_logits + ids, mask=ids < VOCABULARY, other=float("-inf")).to(tl.float32)
    return tl.where(tl.abs(wide) < float("inf"), wide, float("-inf"))


@triton.jit
def weights_beside(values, peak, coldness):
    """Return exp((values - peak) * coldness): 1 at the peak, 0 for -inf, whatever the peak is."""
    return tl.exp((values - tl.where(peak > float("-inf"), peak, 0.0)) * coldness)


@triton.jit
def first_over(weights, target, ids):
    """Return the first id whose cumulative weight exceeds the target, else the last one with any weight."""
    reached = tl.cumsum(weights.to(tl.float64), 0)
    weighty = weights > 0
    last = tl.max(tl.where(weighty, ids, 0), 0)
    # Sums added in a tree may decrease by rounding, so an id of weight zero could be the first to exceed it.
    return tl.minimum(tl.min(tl.where(weighty & (reached > target), ids, _NO_ID), 0), last)
