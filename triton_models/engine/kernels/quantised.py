"""Products with weight matrices of 8 or 4 bits a weight, which are read as they are stored.

As in `kernels.linear`, every program multiplies a tile of weight rows with the rows of `x`, K may be split
among programs, and a row's result depends on that row alone. The weights become numbers of the dtype of `x`
on their way into the matrix units; scales and zeros are applied to float32 sums. More rows than `MAX_ROWS`
are for a library's products: of weights that `expand` writes out, or of 8-bit numbers that `quantise_rows`
makes of `x`.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine.kernels.linear import Tiling, combine, launch
from triton_models.engine.quantised import GROUP, Fp8Linear, Int4Linear, Int8Linear, QuantisedLinear

MAX_ROWS: Final[Mapping[type[QuantisedLinear], int]] = MappingProxyType(
    {Int8Linear: 256, Int4Linear: 128, Fp8Linear: 64}
)
"""Most rows of `x`: with more, a library's products are faster (bench/LOG.md)."""

_TILINGS = {
    Int8Linear: (300, Tiling(block_n=64, block_k=128, splits=1, warps=4, stages=3)),
    Int4Linear: (600, Tiling(block_n=64, block_k=GROUP, splits=1, warps=4, stages=3)),
    Fp8Linear: (200, Tiling(block_n=64, block_k=256, splits=1, warps=4, stages=3)),
}
"""How many programs to divide a product among, and how: the best found on an H100 (bench/LOG.md)."""
_MOST_SPLITS = 8
_MIN_ROWS, _MOST_ROWS = 16, 64
"""The fewest rows that the matrix units take, and the most that a program multiplies its weights with."""
_EXPANDED = 16
"""Groups of a row, or blocks of as many weights, that one program expands."""


def tiling_for(form: type[QuantisedLinear], outputs: int, dtype: torch.dtype) -> Tiling:
    """Return the constants for a weight of N `outputs`; the number of rows must not matter, since they round.

    No matrix unit has float32's precision, so its tiles are small, to fit the registers.
    """
    programs, tiling = _TILINGS[form]
    block_n = _MIN_ROWS if dtype == torch.float32 else tiling.block_n
    tiles, splits = triton.cdiv(outputs, block_n), 1
    while splits < _MOST_SPLITS and 2 * splits * tiles <= programs:
        splits *= 2
    return replace(tiling, block_n=block_n, splits=splits)


def quantised_linear(
    x: Tensor,
    matrix: QuantisedLinear,
    *,
    arrivals: Tensor,
    residual: Tensor | None = None,
    gated: bool = False,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return `matrix(x)`; or add it to `residual` in place; or, gated, silu(gate) * up of it.

    With weights of float8_e4m3fn, the rows of `x` are rounded to that, too. Compiled as
    `kernels.linear.linear` is, for 16, 32 or 64 rows.

    Args:
        x: [M, K], contiguous, M at most that of `MAX_ROWS`.
        matrix: [N, K]; gated: [2 * N, K], the gate first.
        arrivals: from `kernels.linear.new_arrivals`.
        residual: [M, N], contiguous, in the dtype of `x`; not if gated.
        gated: `swiglu` of the product.
        tiling: how to divide the work; with 4 bits, `block_k` is a group. None: the choice of `tiling_for`.

    Returns:
        [M, N] in the dtype of `x`; `residual` itself where it is given.

    Raises:
        ValueError: more rows than in `MAX_ROWS`, or more split tiles than counters.
    """
    rows, keys = x.shape
    if rows > MAX_ROWS[type(matrix)]:
        raise ValueError(f"{rows} rows are more than {MAX_ROWS[type(matrix)]}")
    x_scales, dtype = None, x.dtype
    if isinstance(matrix, Fp8Linear):
        x, x_scales = quantise_rows(x)
    bits = 4 if isinstance(matrix, Int4Linear) else 8
    outputs = len(matrix.weight) // 2 if gated else len(matrix.weight)
    out = residual if residual is not None else torch.empty((rows, outputs), dtype=dtype, device=x.device)
    tiling = tiling or tiling_for(type(matrix), outputs, dtype)
    tiles = triton.cdiv(outputs, tiling.block_n)
    block_m = min(_MOST_ROWS, max(_MIN_ROWS, triton.next_power_of_2(rows)))
    parts = triton.cdiv(rows, block_m)
    partials = None
    if tiling.splits > 1:
        if parts * tiles > len(arrivals):
            raise ValueError(f"{parts * tiles} split tiles are more than {len(arrivals)} counters")
        shape = (parts * tiles, tiling.splits, 1 + gated, block_m, tiling.block_n)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    launch(
        _quantised[parts, tiles, tiling.splits],
        tiling,
        (x, x_scales, matrix.weight, _scales(matrix), matrix.bias, out, partials, arrivals, rows),
        OUTPUTS=outputs,
        KEYS=keys,
        BITS=bits,
        BLOCK_M=block_m,
        GATED=gated,
        ADD=residual is not None,
    )
    return out


def expand(matrix: QuantisedLinear, start: int, stop: int) -> Tensor:
    """Return what `matrix.dense(start, stop)` does, in one launch: [n, K]."""
    stop = min(stop, len(matrix.weight))
    out = torch.empty((stop - start, matrix.columns), dtype=matrix.dtype, device=matrix.weight.device)
    blocks = triton.cdiv(matrix.columns, _EXPANDED * GROUP)
    _expand[stop - start, blocks](
        matrix.weight,
        _scales(matrix),
        out,
        start,
        len(matrix.weight),
        KEYS=matrix.columns,
        BITS=4 if isinstance(matrix, Int4Linear) else 8,
        BLOCKS=_EXPANDED,
    )
    return out


def scaled_product(x: Tensor, matrix: Fp8Linear) -> Tensor:
    """Return `matrix(x)` with the rows of `x` rounded to 8 bits, too, by the library: [M, K] gives [M, N].

    Args:
        x: bfloat16, contiguous.
        matrix: N and K are multiples of 16, as the library needs.
    """
    numbers, scales = quantise_rows(x)
    product: Tensor = torch._scaled_mm(  # noqa: SLF001 - its only name
        numbers,
        matrix.weight.T,
        scale_a=scales[:, None],
        scale_b=matrix.scales[None, :],
        bias=matrix.bias,
        out_dtype=x.dtype,
    )
    return product


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x`, [M, K], as float8_e4m3fn times a scale for each row: [M, K], and [M] in float32."""
    rows, keys = x.shape
    numbers = torch.empty((rows, keys), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    _quantise_rows[(rows,)](x, numbers, scales, KEYS=keys, BLOCK=triton.next_power_of_2(keys), num_warps=8)
    return numbers, scales


def _scales(matrix: QuantisedLinear) -> Tensor:
    """Return the scales; with 4 bits, a scale and its zero, of bfloat16, as one number: [groups, N] int32."""
    return matrix.scales.view(torch.int32)[..., 0] if isinstance(matrix, Int4Linear) else matrix.scales


@triton.jit(do_not_specialize=["rows"])
def _quantised(
    x,
    x_scales,
    weight,
    scales,
    bias,
    out,
    partials,
    arrivals,
    rows,
    OUTPUTS: tl.constexpr,
    KEYS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
):
    # Programs that share weights run together, and find them in the cache.
    part = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    m = part * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Weight rows beyond the last one read the last one again; their sums are not stored.
    row = tl.minimum(n, OUTPUTS - 1).to(tl.int64)
    # Sums are [N, M]: the weights are the operand that the matrix units take from registers.
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up_sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    x_row = x + m[None, :] * KEYS
    here = (m < rows)[None, :]
    if BITS == 8:  # noqa: PLR2004
        steps: tl.constexpr = (KEYS + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)
        weight_row = weight + row[:, None] * KEYS
        for step in range(steps):
            k = (split * steps + step) * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = k < KEYS
            x_part = tl.load(x_row + k[:, None], mask=inside[:, None] & here, other=0.0)
            sums = _add_part(sums, weight_row + k[None, :], inside, x_part)
            if GATED:
                up_sums = _add_part(up_sums, weight_row + OUTPUTS * KEYS + k[None, :], inside, x_part)
        scale = tl.load(scales + row).to(tl.float32)[:, None]
        up_scale = scale
        if GATED:
            up_scale = tl.load(scales + OUTPUTS + row).to(tl.float32)[:, None]
        if x_scales is not None:
            x_scale = tl.load(x_scales + m, mask=m < rows, other=0.0)[None, :]
            scale *= x_scale
            up_scale *= x_scale
        sums *= scale
        up_sums *= up_scale
    else:
        groups: tl.constexpr = (KEYS + 127) // 128
        turns: tl.constexpr = (groups + SPLITS - 1) // SPLITS
        weight_rows: tl.constexpr = OUTPUTS * (2 if GATED else 1)
        byte = tl.arange(0, 64)
        weight_row = weight + row[:, None] * (groups * 64) + byte[None, :]
        for turn in range(turns):
            group = split * turns + turn
            some = group < groups
            k = group * 128 + byte
            x_low = tl.load(x_row + k[:, None], mask=(k < KEYS)[:, None] & here, other=0.0)
            x_high = tl.load(x_row + 64 + k[:, None], mask=(k + 64 < KEYS)[:, None] & here, other=0.0)
            pairs = tl.load(weight_row + group * 64, mask=some, other=0)
            scale = tl.load(scales + group * weight_rows + row, mask=some, other=0)
            sums = _add_group(sums, pairs, scale, x_low, x_high)
            if GATED:
                pairs = tl.load(weight_row + OUTPUTS * (groups * 64) + group * 64, mask=some, other=0)
                scale = tl.load(scales + group * weight_rows + OUTPUTS + row, mask=some, other=0)
                up_sums = _add_group(up_sums, pairs, scale, x_low, x_high)
    combine(
        tl.trans(sums),
        tl.trans(up_sums),
        bias,
        out,
        partials,
        arrivals,
        part * tl.num_programs(1) + tile,
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
def _add_part(sums, place, inside, x_part):
    """Add the products with the 8-bit weights at `place`, without their scales."""
    if x_part.dtype == tl.float8e4nv:
        part = tl.load(place, mask=inside[None, :], other=0.0)
    else:
        part = tl.load(place, mask=inside[None, :], other=0).to(tl.float32).to(x_part.dtype)
    return tl.dot(part, x_part, sums, input_precision="ieee")


@triton.jit
def _add_group(sums, pairs, scale_and_zero, x_low, x_high):
    """Add a group's products: weights are (q - 8) * scale + zero, two q in a byte."""
    dtype: tl.constexpr = x_low.dtype
    # In the last bits of a power of two, q is that number plus q, without a conversion.
    offset: tl.constexpr = 0 if dtype == tl.float32 else (128 if dtype == tl.bfloat16 else 1024)
    if dtype == tl.float32:
        low = (pairs & 15).to(tl.float32)
        high = (pairs >> 4).to(tl.float32)
    else:
        bits: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
        low = ((pairs & 15).to(tl.uint16) | bits).to(dtype, bitcast=True)
        high = ((pairs >> 4).to(tl.uint16) | bits).to(dtype, bitcast=True)
    products = tl.dot(low, x_low, input_precision="ieee")
    products = tl.dot(high, x_high, products, input_precision="ieee")
    # A product with ones is the quickest way to the sums of x, [M], for each of the outputs.
    ones = tl.full(low.shape, 1.0, tl.float32).to(dtype)
    x_sums = tl.dot(ones, x_low, input_precision="ieee")
    x_sums = tl.dot(ones, x_high, x_sums, input_precision="ieee")
    scale, zero = _scale_and_zero(scale_and_zero)
    zero -= (8 + offset) * scale
    return sums + products * scale[:, None] + x_sums * zero[:, None]


@triton.jit
def _scale_and_zero(both):
    """Return the two bfloat16 of a number as float32: the first is in its low half."""
    return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["start"])
def _expand(
    weight,
    scales,
    out,
    start,
    weight_rows,
    KEYS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    here = tl.program_id(0).to(tl.int64)
    row = start + here
    if BITS == 8:  # noqa: PLR2004
        k = tl.program_id(1) * (BLOCKS * 128) + tl.arange(0, BLOCKS * 128)
        numbers = tl.load(weight + row * KEYS + k, mask=k < KEYS, other=0).to(tl.float32)
        numbers *= tl.load(scales + row).to(tl.float32)
        tl.store(out + here * KEYS + k, numbers.to(dtype), mask=k < KEYS)
    else:
        groups: tl.constexpr = (KEYS + 127) // 128
        group = (tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS))[:, None]
        byte = tl.arange(0, 64)[None, :]
        some = group < groups
        pairs = tl.load(weight + (row * groups + group) * 64 + byte, mask=some, other=0)
        scale, zero = _scale_and_zero(tl.load(scales + group * weight_rows + row, mask=some, other=0))
        low = ((pairs & 15).to(tl.float32) - 8) * scale + zero
        high = ((pairs >> 4).to(tl.float32) - 8) * scale + zero
        k = group * 128 + byte
        tl.store(out + here * KEYS + k, low.to(dtype), mask=k < KEYS)
        tl.store(out + here * KEYS + k + 64, high.to(dtype), mask=k + 64 < KEYS)


@triton.jit
def _quantise_rows(x, numbers, scales, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    part = tl.load(x + row * KEYS + k, mask=k < KEYS, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(part))
    scale = tl.where(most == 0, 1.0, most / 448)
    tl.store(scales + row, scale)
    tl.store(numbers + row * KEYS + k, (part / scale).to(numbers.dtype.element_ty), mask=k < KEYS)
