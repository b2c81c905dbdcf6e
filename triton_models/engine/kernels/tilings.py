"""How matrix products of few rows divide their work, by shape: constants, so serving tunes nothing."""

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a product divides its work. Results of different tilings differ by rounding.

    A part of the weight of `block_n` rows by `block_k` along K, the inner dimension, is loaded at once; both
    are powers of two of at least 16. `splits` programs share K. `warps`, `stages`: Triton's launch options
    `num_warps` and `num_stages`.
    """

    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int


_TILINGS: dict[tuple[int, int, bool], Tiling] = {
    # ChatGLM3-6B, by (outputs, K, gated): the best of a search on an H200 (bench/LOG.md).
    (4608, 4096, False): Tiling(block_n=64, block_k=128, splits=4, warps=4, stages=3),
    (4096, 4096, False): Tiling(block_n=64, block_k=128, splits=4, warps=4, stages=3),
    (13696, 4096, True): Tiling(block_n=64, block_k=128, splits=1, warps=4, stages=3),
    (4096, 13696, False): Tiling(block_n=64, block_k=128, splits=4, warps=4, stages=3),
    (65024, 4096, False): Tiling(block_n=32, block_k=256, splits=1, warps=4, stages=3),
}

_PROGRAMS = 3 * 132
"""Number of programs that a large GPU runs at once."""


def tiling_for(outputs: int, keys: int, *, gated: bool, dtype: torch.dtype) -> Tiling:
    """Return the constants for a weight's shape, whatever the number of rows, since they affect rounding.

    `outputs`, `keys`: the sizes of the product's N and K (inner) dimensions.

    Shapes that were not measured get enough splits to fill a large GPU. No matrix unit has float32's
    precision, so its tiles are small, to fit the registers.
    """
    wide = dtype == torch.float32
    measured = _TILINGS.get((outputs, keys, gated))
    if measured is not None and not wide:
        return measured
    block_n, block_k = (16, 32) if wide else (32, 128)
    block_k = min(block_k, max(16, triton.next_power_of_2(keys)))
    tiles, steps = triton.cdiv(outputs, block_n), triton.cdiv(keys, block_k)
    splits = max(1, min(8, _PROGRAMS // tiles, steps))
    return Tiling(block_n=block_n, block_k=block_k, splits=splits, warps=4, stages=3)
