"""Products with weights of float8_e4m3fn: the rows of `x` are rounded to that, too, and multiplied in 8 bits.

Few rows get a kernel of ours. As in `kernels.linear`, every program multiplies a tile of weight rows with
the rows of `x`, K may be split among programs, and a row's result depends on that row alone. Scales are
applied to float32 sums.

More rows than `MAX_ROWS` are for a library's product. It may keep sums in fewer bits than float32 has, as
matrix units do by themselves; that is little beside the rounding of `x` to 8 bits (bench/LOG.md).
"""

from dataclasses import replace
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine.kernels.early import early, let_next_begin, prefetch, wait_for_inputs
from triton_models.engine.kernels.elementwise import norm_row, norm_warps, silu_times, swiglu
from triton_models.engine.kernels.heads import SCALED, Scales
from triton_models.engine.kernels.linear import Tiling, combine, finish, launch, splits_for
from triton_models.engine.kernels.rows import SCALED_BLOCK, load_marks
from triton_models.engine.models import Norm
from triton_models.engine.quantised import Fp8Linear

MAX_ROWS: Final = 32
"""Most rows of `x`: with more, the library's product is faster (bench/LOG.md)."""

_TILING = Tiling(block_n=64, block_k=SCALED_BLOCK, splits=1, warps=4, stages=4)
_MIN_ROWS = 16
"""The fewest rows that the matrix units take."""
_WARPS = 8
"""Of a row that is rounded to 8 bits."""
_SCALED_ROWS = 768
"""The fewest rows for which the library's product with scales of rows is taken, on Hopper: with 512 it is the
slower one, with 1,024 the faster."""
_PREFETCHED: tl.constexpr = tl.constexpr(2)
"""Parts of a program's weights that come while its rows are rounded."""
_SCALED_BLOCK = 1024
_GATE_WARPS = 16
_HOPPER = (9, 0)


def tiling_for(outputs: int) -> Tiling:
    """Return the constants for a weight of N `outputs`: the same for any number of rows, since they round."""
    return replace(_TILING, splits=splits_for(triton.cdiv(outputs, _TILING.block_n)))


def fp8_linear(
    x: tuple[Tensor, Tensor],
    matrix: Fp8Linear,
    *,
    arrivals: Tensor,
    residual: Tensor | None = None,
    gated: bool = False,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return `matrix(x)`; or add it to `residual` in place; or, gated, silu(gate) * up of it.

    Compiled as `kernels.linear.linear` is, for 16 or 32 rows, and with scales of rows or of blocks.

    Args:
        x: [M, K] from `quantise_rows`, M at most `MAX_ROWS`; or, if not gated, with scales of blocks as
            attention writes them, [blocks, 32] (`kernels.rows`).
        matrix: [N, K]; gated: [2 * N, K], the gate first.
        arrivals: from `kernels.linear.new_arrivals`.
        residual: [M, N], contiguous, in the dtype of the model; not if gated.
        gated: `swiglu` of the product.
        tiling: how to divide the work; None: the choice of `tiling_for`.

    Returns:
        [M, N] in the dtype of the model; `residual` itself where it is given.

    Raises:
        ValueError: more rows than `MAX_ROWS`, more split tiles than counters, or scales of blocks and gated.
    """
    numbers, x_scales = x
    rows, keys = numbers.shape
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows are more than {MAX_ROWS}")
    blocked = x_scales.dim() > 1
    if gated and blocked:
        raise ValueError("gated products take scales of rows")
    outputs = len(matrix.weight) // 2 if gated else len(matrix.weight)
    device = numbers.device
    out = torch.empty((rows, outputs), dtype=matrix.dtype, device=device) if residual is None else residual
    tiling = tiling or tiling_for(outputs)
    if blocked:
        tiling = replace(tiling, block_k=SCALED_BLOCK)
    tiles = triton.cdiv(outputs, tiling.block_n)
    block_m = max(_MIN_ROWS, triton.next_power_of_2(rows))
    partials = None
    if tiling.splits > 1:
        if tiles > len(arrivals):
            raise ValueError(f"{tiles} split tiles are more than {len(arrivals)} counters")
        shape = (tiles, tiling.splits, 1 + gated, block_m, tiling.block_n)
        partials = torch.empty(shape, dtype=torch.float32, device=device)
    launch(
        _fp8[tiles, tiling.splits],
        tiling,
        rows,
        (numbers, x_scales, matrix.weight, matrix.scales, matrix.bias, out, partials, arrivals, rows),
        OUTPUTS=outputs,
        KEYS=keys,
        BLOCK_M=block_m,
        BLOCKED=blocked,
        GATED=gated,
        ADD=residual is not None,
    )
    return out


def scaled_product(
    x: tuple[Tensor, Tensor],
    matrix: Fp8Linear,
    *,
    unit: Tensor,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Return what `fp8_linear` returns, by the library's product, of any number of rows.

    The library knows scales of rows, but has one kernel for them, which is for many rows. For fewer it is
    asked for a product without scales, which are applied in a launch after it.

    Args:
        x: from `quantise_rows`.
        matrix: of a model in bfloat16, which has room for sums without scales; its rows and columns are
            multiples of 16, as the library needs.
        unit: 1, in float32, on the device.
        residual: as in `fp8_linear`.
        gated: as in `fp8_linear`; without a bias.
    """
    product, scaled = _product(x, matrix, unit)
    if scaled:
        if residual is not None:
            return residual.add_(product)
        return swiglu(product) if gated else product
    rows, outputs = len(product), product.shape[1] // (1 + gated)
    out = residual
    if out is None:
        out = torch.empty((rows, outputs), dtype=matrix.dtype, device=product.device)
    _scale[rows, triton.cdiv(outputs, _SCALED_BLOCK)](
        product,
        x[1],
        matrix.scales,
        matrix.bias,
        out,
        rows,
        OUTPUTS=outputs,
        BLOCK=_SCALED_BLOCK,
        GATED=gated,
        ADD=residual is not None,
    )
    return out


def unscaled_product(x: tuple[Tensor, Tensor], matrix: Fp8Linear, *, unit: Tensor) -> tuple[Tensor, Scales]:
    """Return the library's product as it comes, [M, N], and what is left to be done (`scaled_product`)."""
    product, scaled = _product(x, matrix, unit)
    return product, SCALED if scaled else (x[1], matrix.scales, matrix.bias)


def gated_rows(x: tuple[Tensor, Tensor], matrix: Fp8Linear, *, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Return `quantise_rows(scaled_product(x, matrix, gated=True))`, without a launch and a copy between."""
    product, scaled = _product(x, matrix, unit)
    rows, outputs = len(product), product.shape[1] // 2
    numbers = torch.empty((rows, outputs), dtype=torch.float8_e4m3fn, device=product.device)
    scales = torch.empty(rows, dtype=torch.float32, device=product.device)
    _gate_rows[(rows,)](
        product,
        None if scaled else x[1],
        matrix.scales,
        numbers,
        scales,
        OUTPUTS=outputs,
        BLOCK=triton.next_power_of_2(outputs),
        num_warps=_GATE_WARPS,
    )
    return numbers, scales


def added_rows(
    x: tuple[Tensor, Tensor], matrix: Fp8Linear, *, unit: Tensor, residual: Tensor, norm: Norm
) -> tuple[Tensor, Tensor]:
    """Return `quantise_rows(scaled_product(x, matrix, residual=residual), norm)`, in one launch less."""
    product, scaled = _product(x, matrix, unit)
    rows, outputs = product.shape
    numbers = torch.empty((rows, outputs), dtype=torch.float8_e4m3fn, device=product.device)
    scales = torch.empty(rows, dtype=torch.float32, device=product.device)
    block = triton.next_power_of_2(outputs)
    _add_rows[(rows,)](
        product,
        None if scaled else x[1],
        matrix.scales,
        None if scaled else matrix.bias,
        residual,
        norm.weight,
        norm.bias,
        norm.epsilon,
        numbers,
        scales,
        OUTPUTS=outputs,
        BLOCK=block,
        num_warps=norm_warps(block),
    )
    return numbers, scales


def _product(x: tuple[Tensor, Tensor], matrix: Fp8Linear, unit: Tensor) -> tuple[Tensor, bool]:
    """Return a product, and whether it has its scales and bias."""
    numbers, x_scales = x
    if len(numbers) >= _SCALED_ROWS and _takes_row_scales(numbers.device):
        scales = x_scales[:, None], matrix.scales[None, :]
        return _library(numbers, matrix, scales, matrix.bias), True
    return _library(numbers, matrix, (unit, unit), None), False


def _library(
    numbers: Tensor,
    matrix: Fp8Linear,
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
) -> Tensor:
    scale_a, scale_b = scales
    product: Tensor = torch._scaled_mm(  # noqa: SLF001 - its oldest name, with which scales keep their shapes
        numbers,
        matrix.weight.T,
        scale_a=scale_a,
        scale_b=scale_b,
        bias=bias,
        out_dtype=matrix.dtype,
        use_fast_accum=True,
    )
    return product


def _takes_row_scales(device: torch.device) -> bool:
    """Return whether scales of rows work: on Hopper. Others had faults (PyTorch's issues 177651, 192707)."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == _HOPPER


def quantise_rows(x: Tensor, norm: Norm | None = None) -> tuple[Tensor, Tensor]:
    """Return `x`, or its norm, as float8_e4m3fn times a scale for each row: [M, K], and [M] in float32.

    `x`: [M, K], contiguous. The norm is that of `kernels.elementwise.norm`, bit for bit, in the same launch.
    """
    rows, keys = x.shape
    numbers = torch.empty((rows, keys), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(keys)
    _quantise_rows[(rows,)](
        x,
        None if norm is None else norm.weight,
        None if norm is None else norm.bias,
        0.0 if norm is None else norm.epsilon,
        numbers,
        scales,
        KEYS=keys,
        BLOCK=block,
        num_warps=_WARPS if norm is None else norm_warps(block),
        **early(rows),
    )
    return numbers, scales


@triton.jit(do_not_specialize=["rows"])
def _fp8(
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCKED: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Weight rows beyond the last one read the last one again; their sums are not stored.
    row = tl.minimum(n, OUTPUTS - 1).to(tl.int64)
    # Sums are [N, M]: the rows of `x` are fewer than the matrix units take on that side.
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up_sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    x_row = x + m[None, :] * KEYS
    weight_row = weight + row[:, None] * KEYS
    here = (m < rows)[None, :]
    steps: tl.constexpr = (KEYS + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)
    if not BLOCKED:
        begins = (split * steps + tl.arange(0, _PREFETCHED)) * BLOCK_K
        first = weight_row + tl.minimum(begins, KEYS - 1)[None, :]
        prefetch(first)
        if GATED:
            prefetch(first + OUTPUTS * KEYS)
    wait_for_inputs()
    x_scale = m
    if BLOCKED:
        x_scale = load_marks(x_scales, m, split * steps, KEYS, BLOCK_K)
    for step in range(steps):
        k = (split * steps + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = k < KEYS
        x_part = tl.load(x_row + k[:, None], mask=inside[:, None] & here, other=0.0)
        part = tl.load(weight_row + k[None, :], mask=inside[None, :], other=0.0)
        if BLOCKED:
            sums += tl.dot(part, x_part) * x_scale[None, :]
            # Scales are read one turn ahead.
            x_scale = load_marks(x_scales, m, split * steps + step + 1, KEYS, BLOCK_K)
        else:
            sums = tl.dot(part, x_part, sums)
        if GATED:
            up_row = weight_row + OUTPUTS * KEYS
            part = tl.load(up_row + k[None, :], mask=inside[None, :], other=0.0)
            up_sums = tl.dot(part, x_part, up_sums)
    by = tl.load(scales + row)[:, None]
    if BLOCKED:
        sums *= by
    else:
        x_scale = tl.load(x_scales + m, mask=m < rows, other=0.0)[None, :]
        sums *= by * x_scale
        if GATED:
            up_sums *= tl.load(scales + OUTPUTS + row)[:, None] * x_scale
    combine(
        tl.trans(sums),
        tl.trans(up_sums),
        bias,
        out,
        (None, None, None, None),
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


@triton.jit(do_not_specialize=["rows"])
def _scale(
    product,
    x_scales,
    scales,
    bias,
    out,
    rows,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < OUTPUTS
    width: tl.constexpr = OUTPUTS * (2 if GATED else 1)
    here = product + m[:, None] * width + n[None, :]
    x_scale = tl.load(x_scales + m)[:, None]
    by = tl.load(scales + n, mask=inside, other=0.0)[None, :]
    sums = tl.load(here, mask=inside[None, :], other=0.0).to(tl.float32) * (by * x_scale)
    up_sums = sums
    if GATED:
        by = tl.load(scales + OUTPUTS + n, mask=inside, other=0.0)[None, :]
        up_sums = tl.load(here + OUTPUTS, mask=inside[None, :], other=0.0).to(tl.float32) * (by * x_scale)
    finish(sums, up_sums, bias, out, (None, None, None, None), m, n, rows, OUTPUTS, GATED, ADD)


@triton.jit
def _gate_rows(
    product,
    x_scales,
    scales,
    numbers,
    gated_scales,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < OUTPUTS
    here = product + row * (2 * OUTPUTS) + n
    gate = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(here + OUTPUTS, mask=inside, other=0.0).to(tl.float32)
    if x_scales is not None:
        x_scale = tl.load(x_scales + row)
        gate *= tl.load(scales + n, mask=inside, other=0.0) * x_scale
        up *= tl.load(scales + OUTPUTS + n, mask=inside, other=0.0) * x_scale
    dtype: tl.constexpr = product.dtype.element_ty
    part = silu_times(gate.to(dtype), up.to(dtype)).to(tl.float32)
    store_row(part, numbers + row * OUTPUTS, gated_scales + row, n, OUTPUTS)


@triton.jit
def _add_rows(
    product,
    x_scales,
    scales,
    bias,
    residual,
    weight,
    norm_bias,
    eps,
    numbers,
    row_scales,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # As in `_quantise_rows`.
    n = tl.max_contiguous(tl.arange(0, BLOCK), 128 // residual.dtype.element_ty.primitive_bitwidth)
    inside = n < OUTPUTS
    part = tl.load(product + row * OUTPUTS + n, mask=inside, other=0.0).to(tl.float32)
    if x_scales is not None:
        part *= tl.load(scales + n, mask=inside, other=0.0) * tl.load(x_scales + row)
    if bias is not None:
        part += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = residual.dtype.element_ty
    here = residual + row * OUTPUTS + n
    before = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    sums = (before + part.to(dtype).to(tl.float32)).to(dtype)
    tl.store(here, sums, mask=inside)
    normed = norm_row(sums.to(tl.float32), weight, norm_bias, eps, n, OUTPUTS).to(dtype).to(tl.float32)
    store_row(normed, numbers + row * OUTPUTS, row_scales + row, n, OUTPUTS)


@triton.jit
def store_row(part, numbers, scale_at, k, KEYS: tl.constexpr):
    """Store a float32 row, zeros from `KEYS` on, as numbers of 8 bits, and the scale that they are times."""
    most = tl.max(tl.abs(part))
    scale = tl.where(most == 0, 1.0, most / 448)
    tl.store(scale_at, scale)
    tl.store(numbers + k, (part / scale).to(numbers.dtype.element_ty), mask=k < KEYS)


@triton.jit
def _quantise_rows(x, weight, bias, eps, numbers, scales, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    let_next_begin()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    if weight is not None:
        # Threads take 16 bytes of `x`, not of `numbers`, as in `norm`: this sets the order of its sums.
        k = tl.max_contiguous(k, 128 // x.dtype.element_ty.primitive_bitwidth)
    part = tl.load(x + row * KEYS + k, mask=k < KEYS, other=0.0).to(tl.float32)
    if weight is not None:
        # Rounded as a norm that is stored, so that its product is the same.
        part = norm_row(part, weight, bias, eps, k, KEYS).to(x.dtype.element_ty).to(tl.float32)
    store_row(part, numbers + row * KEYS, scales + row, k, KEYS)
