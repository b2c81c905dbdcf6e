"""What a layer computes token by token, in one launch each: norms, rotation and storing, SwiGLU, GELU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine.kernels.heads import load_angles, padded, rotate

_NUMBERS_PER_WARP = 512
_ACTIVATION_BLOCK = 1024
_ACTIVATION_WARPS = 4

_HEADS = 16
"""Heads per program of `rotate_store`."""


def norm(hidden: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """Return the LayerNorm of each row, or without a bias the RMSNorm, computed in float32.

    After Ba et al., 2016, and Zhang and Sennrich, 2019. A row's result depends on that row alone. Compiled
    once for each dtype and width, and with or without a bias.

    Args:
        hidden: [T, H], contiguous, float32, float16 or bfloat16.
        weight: [H] float32.
        eps: added to the variance, or to the mean square.
        bias: [H] float32.

    Returns:
        [T, H] in the dtype of `hidden`.
    """
    rows, width = hidden.shape
    normed = torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    _norm[(rows,)](hidden, weight, bias, normed, eps, WIDTH=width, BLOCK=block, num_warps=norm_warps(block))
    return normed


def norm_warps(block: int) -> int:
    """Return the warps that norm a row of `block` numbers: their number sets the order of its sums."""
    return max(1, min(16, block // _NUMBERS_PER_WARP))


@triton.jit
def _norm(hidden, weight, bias, normed, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    here = tl.program_id(0).to(tl.int64) * WIDTH + columns
    row = tl.load(hidden + here, mask=inside, other=0.0).to(tl.float32)
    row = norm_row(row, weight, bias, eps, columns, WIDTH)
    tl.store(normed + here, row.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def norm_row(row, weight, bias, eps, columns, WIDTH: tl.constexpr):
    """Return the norm of a float32 row, whose numbers from `WIDTH` on are zeros, and stay so."""
    inside = columns < WIDTH
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    if bias is not None:
        row = tl.where(inside, row - tl.sum(row) / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(row * row) / WIDTH + eps)
    scaled = row * scale * factors
    if bias is not None:
        scaled += tl.load(bias + columns, mask=inside, other=0.0)
    return scaled


def rotate_store(
    projected: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    tables: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    query_heads: int,
) -> None:
    """Rotate queries and keys by their positions, and write keys and values to the cache.

    Interleaved pairs (2i, 2i + 1) of the first R numbers of a head are rotated in float32, with each product
    and sum rounded separately, as in the plain code; the rest of a head is not rotated.

    Compiled once for each dtype, number of heads, head_dim, R and block_size, and without rotation. No
    other argument causes another compilation, provided that the addresses of `projected`, `cos`, `sin`,
    `keys` and `values` are multiples of 16.

    Args:
        projected: [T, query heads + 2 * KV heads, head_dim], contiguous: queries, then keys, then values.
            The queries are rotated in place; the keys are left unchanged.
        cos: [positions, R / 2] float32, contiguous; R is even and at most head_dim. None: nothing is rotated.
        sin: like `cos`.
        positions: [T] int32, each token's position in its sequence; negative for padding, for which nothing
            is written.
        tables: [S, W] int32, block numbers.
        rows: [T] int32, each token's row in `tables`.
        keys: [blocks, block_size, KV heads, head_dim], contiguous, written at the tokens' places.
        values: like `keys`.
        query_heads: number of query heads.
    """
    tokens, heads, head_dim = projected.shape
    _, block_size, kv_heads, _ = keys.shape
    _rotate_store[tokens, triton.cdiv(heads, _HEADS)](
        projected,
        cos,
        sin,
        positions,
        tables,
        rows,
        keys,
        values,
        tables.stride(0),
        QUERY_HEADS=query_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIMS=padded(head_dim),
        PAIRS=0 if cos is None else cos.shape[1],
        BLOCK_SIZE=block_size,
        HEADS=_HEADS,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["positions", "tables", "rows"]
)
def _rotate_store(
    projected,
    cos,
    sin,
    positions,
    tables,
    rows,
    keys,
    values,
    table_stride,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0)
    position = tl.load(positions + token)
    if position < 0:
        return
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, DIMS)[None, :]
    filled = dims < HEAD_DIM
    here = projected + (token.to(tl.int64) * (QUERY_HEADS + 2 * KV_HEADS) + heads) * HEAD_DIM + dims
    plain = tl.load(here, mask=(heads < QUERY_HEADS + 2 * KV_HEADS) & filled, other=0.0)

    rotated = plain
    if cos is not None:
        cosine = load_angles(cos, position, PAIRS, DIMS)
        sine = load_angles(sin, position, PAIRS, DIMS)
        rotated = rotate(plain, cosine, sine, PAIRS)
        tl.store(here, rotated, mask=(heads < QUERY_HEADS) & (dims < 2 * PAIRS))

    table = tables + tl.load(rows + token).to(tl.int64) * table_stride
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    place = (block * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS
    key_heads = heads - QUERY_HEADS
    is_key = (key_heads >= 0) & (key_heads < KV_HEADS)
    tl.store(keys + (place + key_heads) * HEAD_DIM + dims, rotated, mask=is_key & filled)
    value_heads = key_heads - KV_HEADS
    is_value = (value_heads >= 0) & (value_heads < KV_HEADS)
    tl.store(values + (place + value_heads) * HEAD_DIM + dims, plain, mask=is_value & filled)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(first half) * second half of each row (Shazeer, "GLU Variants Improve Transformer", 2020).

    silu is rounded to the dtype before the product, as in the plain forward pass.

    Compiled once for each dtype and width.

    Args:
        gate_up: [T, 2 * F], contiguous, float32, float16 or bfloat16.

    Returns:
        [T, F] in the same dtype.
    """
    rows, both = gate_up.shape
    width = both // 2
    gated = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[rows, triton.cdiv(width, _ACTIVATION_BLOCK)](
        gate_up, gated, WIDTH=width, BLOCK=_ACTIVATION_BLOCK, num_warps=_ACTIVATION_WARPS
    )
    return gated


@triton.jit
def silu_times(gate, up):
    """Return silu(gate) * up; silu and the product are rounded to the dtype that both have."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(up.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(up.dtype)


@triton.jit
def _swiglu(gate_up, gated, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    here = gate_up + row * (2 * WIDTH) + columns
    gate = tl.load(here, mask=inside, other=0.0)
    up = tl.load(here + WIDTH, mask=inside, other=0.0)
    tl.store(gated + row * WIDTH + columns, silu_times(gate, up), mask=inside)


def gelu(inputs: Tensor) -> Tensor:
    """Return GELU in its form with tanh (Hendrycks and Gimpel, 2016), computed in float32, in place.

    Compiled once for each dtype and width.

    Args:
        inputs: [T, F], contiguous, float32, float16 or bfloat16.

    Returns:
        `inputs`.
    """
    rows, width = inputs.shape
    _gelu[rows, triton.cdiv(width, _ACTIVATION_BLOCK)](
        inputs, WIDTH=width, BLOCK=_ACTIVATION_BLOCK, num_warps=_ACTIVATION_WARPS
    )
    return inputs


@triton.jit
def _gelu(inputs, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = inputs + row * WIDTH + columns
    number = tl.load(here, mask=columns < WIDTH, other=0.0).to(tl.float32)
    inner = 0.7978845608028654 * number * (1.0 + 0.044715 * number * number)
    # (1 + tanh(inner)) / 2, which neither overflows nor turns into NaN.
    result = number / (1.0 + tl.exp(-2.0 * inner))
    tl.store(here, result.to(inputs.dtype.element_ty), mask=columns < WIDTH)
