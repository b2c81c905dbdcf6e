"""Products of few rows with a weight matrix, limited by the time it takes to read the weights.

Every program multiplies a tile of weight rows with the padded rows of `x`. Where the tiles alone would not
keep every multiprocessor busy, the K (inner) dimension, whose size is `KEYS` below, is split among programs:
each stores a partial sum, and the last to finish adds them in order. So there are no floating-point atomics,
and the result does not depend on which program is last.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from triton_models.engine.kernels.early import early, wait_for_inputs
from triton_models.engine.kernels.elementwise import silu_times
from triton_models.engine.kernels.rows import (
    BLOCK,
    NOTHING,
    Rows,
    leave,
    load_squares,
    norm_factors,
    padded_blocks,
)

MAX_ROWS = 32
"""Most rows of `x`: with more, arithmetic matters, and a library is faster (bench/log/2026-11.md)."""

_MAX_TILES = 4096
_MIN_ROWS = 16
"""The fewest rows that the matrix units take."""


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
    # ChatGLM3-6B, by (outputs, K, gated): the best of a search on an H200 (bench/log/2026-11.md).
    (4608, 4096, False): Tiling(block_n=64, block_k=128, splits=4, warps=4, stages=3),
    (4096, 4096, False): Tiling(block_n=64, block_k=128, splits=4, warps=4, stages=3),
    (13696, 4096, True): Tiling(block_n=64, block_k=128, splits=1, warps=4, stages=3),
    (4096, 13696, False): Tiling(block_n=64, block_k=128, splits=4, warps=4, stages=3),
    (65024, 4096, False): Tiling(block_n=32, block_k=256, splits=1, warps=4, stages=3),
}

_stages: dict[tuple[object, ...], int] = {}
"""How many stages fit, where that is fewer than the tiling has."""

_PROGRAMS = 3 * 132
"""Number of programs that a large GPU runs at once."""
_TILED_PROGRAMS, _MOST_SPLITS = 300, 8


def tiling_for(outputs: int, keys: int, *, gated: bool, dtype: torch.dtype, adds: bool = False) -> Tiling:
    """Return the constants for a weight's shape, whatever the number of rows, since they affect rounding.

    `outputs`, `keys`: the sizes of the product's N and K (inner) dimensions. `adds`: to a residual.

    Shapes that were not measured get enough splits to fill a large GPU. No matrix unit has float32's
    precision, so its tiles are small, to fit the registers.
    """
    wide = dtype == torch.float32
    measured = _TILINGS.get((outputs, keys, gated))
    if measured is not None and not wide:
        return measured
    # With tiles of whole blocks, a product that adds to hidden states `leaves_rows`.
    adds = adds and not wide
    block_n = BLOCK if adds else 16 if wide else 32
    block_k = min(32 if wide else 128, max(16, triton.next_power_of_2(keys)))
    tiles, steps = triton.cdiv(outputs, block_n), triton.cdiv(keys, block_k)
    splits = max(1, min(splits_for(tiles) if adds else _PROGRAMS // tiles, _MOST_SPLITS, steps))
    return Tiling(block_n=block_n, block_k=block_k, splits=splits, warps=4, stages=3)


def splits_for(tiles: int) -> int:
    """Return how many programs share K where tiles have 64 outputs, by the number of tiles.

    So there are up to 300 programs: the best found on an H200 (bench/LOG.md).
    """
    splits = 1
    while splits < _MOST_SPLITS and 2 * splits * tiles <= _TILED_PROGRAMS:
        splits *= 2
    return splits


def new_arrivals(device: torch.device) -> Tensor:
    """Return counters that tell the programs of a split product which of them finishes last.

    They are zero between launches. Launches that share them must not overlap: use one stream, or order them
    by events.
    """
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def linear(
    x: Rows,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    arrivals: Tensor,
    residual: Tensor | None = None,
    gated: bool = False,
    tiling: Tiling | None = None,
    ahead: Rows | None = None,
) -> Tensor:
    """Return x @ weight^T + bias; or add it to `residual` in place; or, gated, silu(gate) * up of it.

    Sums are float32, and rounded to the dtype before the residual is added or the gate applied. A row's
    result depends on that row alone. Compiled once for each dtype, shape of `weight`, number of rows (up to
    16, or up to 32), presence of bias, residual, what is left of a norm and each part of `ahead`, and with or
    without gate.

    Args:
        x: [M, K], M at most `MAX_ROWS`, K a multiple of 8; without sums.
        weight: [N, K], contiguous, in the dtype of `x`; gated: [2 * N, K], of which the first half is the
            gate.
        bias: [N] in the dtype of `x`; not if gated.
        arrivals: from `new_arrivals`.
        residual: [M, N], contiguous, in the dtype of `x`; not if gated.
        gated: `swiglu` of the product.
        tiling: how to divide the work (gated: `block_n` rows of both halves); None: the choice of
            `tiling_for`.
        ahead: written as well: the result as the next product takes it, if the tiling `leaves_rows`; with a
            norm only beside a residual.

    Returns:
        [M, N] in the dtype of `x`; `residual` itself where it is given.

    Raises:
        ValueError: more rows than `MAX_ROWS`, or more split tiles than counters.
    """
    numbers = x.numbers
    rows, keys = numbers.shape
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows are more than {MAX_ROWS}")
    outputs = len(weight) // 2 if gated else len(weight)
    out = residual
    if out is None:
        out = numbers.new_empty((rows, outputs)) if ahead is None else ahead.numbers
    adds = residual is not None
    tiling = tiling or tiling_for(outputs, keys, gated=gated, adds=adds, dtype=numbers.dtype)
    tiles = triton.cdiv(outputs, tiling.block_n)
    block_m = _MIN_ROWS if rows <= _MIN_ROWS else MAX_ROWS
    partials = None
    if tiling.splits > 1:
        if tiles > len(arrivals):
            raise ValueError(f"{tiles} split tiles are more than {len(arrivals)} counters")
        shape = (tiles, tiling.splits, 1 + gated, block_m, tiling.block_n)
        partials = torch.empty(shape, dtype=torch.float32, device=numbers.device)
    written = NOTHING if ahead is None else ahead.written()
    launch(
        _linear[tiles, tiling.splits],
        tiling,
        rows,
        (numbers, weight, bias, out, partials, arrivals, rows, x.squares, x.epsilon, written),
        OUTPUTS=outputs,
        KEYS=keys,
        BLOCKS=padded_blocks(keys),
        BLOCK_M=block_m,
        GATED=gated,
        ADD=residual is not None,
    )
    return out


def leaves_rows(tiling: Tiling) -> bool:
    """Return whether products with a tiling can write rows for the next one: their tiles are whole blocks."""
    return tiling.block_n % BLOCK == 0


def launch(
    kernel: Callable[..., object],
    tiling: Tiling,
    rows: int,
    arguments: tuple[object, ...],
    **constants: int,
) -> None:
    """Launch `kernel`, on its grid, for so many rows, with as many stages as fit the GPU's shared memory.

    A large GPU's 227 KiB have room for all; others have 99. Results do not depend on it.

    Raises:
        OutOfResources: not even one stage fits.
    """
    key = (tiling, *constants.values(), *(each.dtype for each in arguments[:2] if isinstance(each, Tensor)))
    while True:
        stages = _stages.get(key, tiling.stages)
        try:
            kernel(
                *arguments,
                BLOCK_N=tiling.block_n,
                BLOCK_K=tiling.block_k,
                SPLITS=tiling.splits,
                **constants,
                num_warps=tiling.warps,
                num_stages=stages,
                **early(rows),
            )
        except OutOfResources:
            if stages == 1:
                raise
            _stages[key] = stages - 1
        else:
            return


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    weight,
    bias,
    out,
    partials,
    arrivals,
    rows,
    squares,
    epsilon,
    ahead,
    OUTPUTS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
):
    wait_for_inputs()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    parts = load_squares(squares, m, rows, KEYS, BLOCKS)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    steps: tl.constexpr = (KEYS + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)
    k = split * (steps * BLOCK_K) + tl.arange(0, BLOCK_K)
    x_tile = x + m[:, None] * KEYS + k[None, :]
    # Weight rows beyond the last one read the last one again; their sums are not stored.
    row = tl.minimum(n, OUTPUTS - 1).to(tl.int64)
    weight_tile = weight + row[:, None] * KEYS + k[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up_sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(steps):
        first = step * BLOCK_K
        inside = (k + first < KEYS)[None, :]
        x_part = tl.load(x_tile + first, mask=inside & (m < rows)[:, None], other=0.0)
        part = tl.load(weight_tile + first, mask=inside, other=0.0)
        sums = tl.dot(x_part, part.T, sums, input_precision="ieee")
        if GATED:
            up_tile = weight_tile + OUTPUTS * KEYS
            up_part = tl.load(up_tile + first, mask=inside, other=0.0)
            up_sums = tl.dot(x_part, up_part.T, up_sums, input_precision="ieee")
    if squares is not None:
        factors = norm_factors(parts, epsilon, KEYS)[:, None]
        sums *= factors
        up_sums *= factors
    combine(
        sums,
        up_sums,
        bias,
        out,
        ahead,
        partials,
        arrivals,
        tile,
        split,
        m,
        n,
        rows,
        OUTPUTS,
        BLOCK_M,
        BLOCK_N,
        SPLITS,
        GATED,
        ADD,
    )


@triton.jit
def combine(
    sums,
    up_sums,
    bias,
    out,
    ahead,
    partials,
    arrivals,
    tile,
    split,
    m,
    n,
    rows,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
):
    """Write a tile of `out`, or this split's part of it; the last split to come adds them all up.

    `sums`, and gated `up_sums`: [BLOCK_M, BLOCK_N] float32, of rows `m` and outputs `n`; `tile`: its number.
    """
    if SPLITS == 1:
        finish(sums, up_sums, bias, out, ahead, m, n, rows, OUTPUTS, GATED, ADD)
    else:
        block = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        stored = (m < rows)[:, None]
        part_size: tl.constexpr = BLOCK_M * BLOCK_N
        size: tl.constexpr = part_size * (2 if GATED else 1)
        partial = partials + tile * (SPLITS * size) + block
        tl.store(partial + split * size, sums, mask=stored, cache_modifier=".cg")
        if GATED:
            tl.store(partial + split * size + part_size, up_sums, mask=stored, cache_modifier=".cg")
        # One thread counts the program as finished, so all threads' stores must come before.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            tl.store(arrivals + tile, 0)
            sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            up_sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for other in tl.static_range(SPLITS):
                # Bypasses the L1 cache, which does not see other multiprocessors' stores.
                sums += tl.load(partial + other * size, mask=stored, other=0.0, cache_modifier=".cg")
                if GATED:
                    up_partial = partial + other * size + part_size
                    up_sums += tl.load(up_partial, mask=stored, other=0.0, cache_modifier=".cg")
            finish(sums, up_sums, bias, out, ahead, m, n, rows, OUTPUTS, GATED, ADD)


@triton.jit
def finish(
    sums,
    up_sums,
    bias,
    out,
    ahead,
    m,
    n,
    rows,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
):
    """Write a tile of `out`: the sums with the bias, if any, gated, or added to what `out` holds.

    `ahead`: see `rows.leave`; nothing, or a tile is whole blocks.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    here = out + m[:, None] * OUTPUTS + n[None, :]
    inside = (m < rows)[:, None] & (n < OUTPUTS)[None, :]
    if bias is not None:
        sums += tl.load(bias + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    result = sums.to(dtype)
    if GATED:
        result = silu_times(result, up_sums.to(dtype))
    if ADD:
        before = tl.load(here, mask=inside, other=0.0).to(tl.float32)
        result = (before + result.to(tl.float32)).to(dtype)
    tl.store(here, result, mask=inside)
    leave(result.to(tl.float32), ahead, m, n, rows, OUTPUTS)
