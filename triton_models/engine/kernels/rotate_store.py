"""Rotary position embedding and the KV cache's new entries, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

_HEADS = 16
"""Heads per program."""


def rotate_store(
    projected: Tensor,
    cos: Tensor,
    sin: Tensor,
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

    Compiled once for each dtype, number of heads, head_dim, R and block_size. No other argument causes
    another compilation, provided that the addresses of `projected`, `cos`, `sin`, `keys` and `values` are
    multiples of 16.

    Args:
        projected: [T, query heads + 2 * KV heads, head_dim], contiguous: queries, then keys, then values.
            The queries are rotated in place; the keys are left unchanged.
        cos: [positions, R / 2] float32, contiguous; R is even and at most head_dim.
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
        PAIRS=cos.shape[1],
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
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0)
    position = tl.load(positions + token)
    if position < 0:
        return
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, HEAD_DIM)[None, :]
    here = projected + (token.to(tl.int64) * (QUERY_HEADS + 2 * KV_HEADS) + heads) * HEAD_DIM + dims
    plain = tl.load(here, mask=heads < QUERY_HEADS + 2 * KV_HEADS, other=0.0)

    half: tl.constexpr = HEAD_DIM // 2
    pairs = tl.arange(0, half)
    angle = position * PAIRS + pairs
    cosine = tl.load(cos + angle, mask=pairs < PAIRS, other=0.0)[None, :]
    sine = tl.load(sin + angle, mask=pairs < PAIRS, other=0.0)[None, :]
    even, odd = tl.split(plain.to(tl.float32).reshape(HEADS, half, 2))
    turned = tl.join(even * cosine - odd * sine, odd * cosine + even * sine).reshape(HEADS, HEAD_DIM)
    rotary = dims < 2 * PAIRS
    rotated = tl.where(rotary, turned.to(plain.dtype), plain)
    tl.store(here, rotated, mask=(heads < QUERY_HEADS) & rotary)

    table = tables + tl.load(rows + token).to(tl.int64) * table_stride
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    place = (block * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS
    key_heads = heads - QUERY_HEADS
    is_key = (key_heads >= 0) & (key_heads < KV_HEADS)
    tl.store(keys + (place + key_heads) * HEAD_DIM + dims, rotated, mask=is_key)
    value_heads = key_heads - KV_HEADS
    is_value = (value_heads >= 0) & (value_heads < KV_HEADS)
    tl.store(values + (place + value_heads) * HEAD_DIM + dims, plain, mask=is_value)
