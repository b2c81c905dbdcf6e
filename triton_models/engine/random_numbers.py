"""Random numbers that depend only on a request's seed and a position, never on the batch or the device.

The mixing function is SplitMix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014), in int64 arithmetic that wraps around on every device.
"""

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER = _signed(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = _signed(0x94D049BB133111EB)

_BITS = 48
"""Bits kept of each number: few enough that `x * number`, rounded to float64, is still below `x`."""


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return one number in [0, 1) per row.

    Args:
        seeds: [N] int64.
        positions: [N] int64; each position of a seed is an independent draw.

    Returns:
        [N] float64, multiples of 2**-48.
    """
    # The seed is mixed by itself first; otherwise neighbouring seeds would share their numbers, shifted.
    mixed = _mix(_mix(seeds) + positions * _GAMMA)
    return _shift_right(mixed, 64 - _BITS).to(torch.float64) * 2.0**-_BITS


def _mix(state: Tensor) -> Tensor:
    state = state + _GAMMA
    state = (state ^ _shift_right(state, 30)) * _FIRST_MULTIPLIER
    state = (state ^ _shift_right(state, 27)) * _SECOND_MULTIPLIER
    return state ^ _shift_right(state, 31)


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Shift right without sign extension, for which torch has no operator."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
