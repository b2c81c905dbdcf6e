"""Paged causal attention of several new tokens per sequence, for prompts and chunks of prompts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_models.engine.kernels.heads import lean, load_heads, load_slopes, padded
from triton_models.engine.models import ChunkRows

_BLOCK_KEYS = 64
_LARGEST_HEAD = 128
MANY_ROWS: Final = 992
"""With more rows in a step, tiles of twice the queries still give every multiprocessor work. There is a
captured step of this size, so that padding makes no step a large one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """How the kernel divides its work.

    `rows`: rows of the matrix products, each a query of one head; `keys`: keys loaded at once. Both are
    powers of two of at least 16. `warps`, `stages`: Triton's launch options `num_warps` and `num_stages`.
    `in_blocks`: `keys` are all or part of a block, and loaded by the Tensor Memory Accelerator, one copy each
    of keys and values, instead of token by token.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    in_blocks: bool = False


def prefill_config(
    head_dim: int, dtype: torch.dtype, *, block_size: int = 16, rows: int = 0
) -> PrefillConfig:
    """Return the constants for a head's shape.

    With 16 bits, 64 rows are one matrix instruction of a warp group, and few enough that a prompt of some 250
    tokens fills a Hopper GPU. Where blocks are loaded at once, a warp group has registers for twice as many.
    No matrix unit has float32's precision, so its tiles are small, to fit the registers.

    Args:
        head_dim: numbers of a head.
        dtype: of queries, keys and values.
        block_size: tokens of a block; as many as a tile's keys where the GPU gains by that (`backend`).
        rows: of the step. They change no result.
    """
    size = padded(head_dim)
    if dtype not in (torch.float16, torch.bfloat16):
        return PrefillConfig(rows=16, keys=max(16, min(64, 4096 // size)), warps=8, stages=2)
    # The strides of what is copied are multiples of 16 bytes.
    in_blocks = block_size % _BLOCK_KEYS == 0 and head_dim % 8 == 0
    if in_blocks and rows > MANY_ROWS and size <= _LARGEST_HEAD:
        return PrefillConfig(rows=128, keys=_BLOCK_KEYS, warps=4, stages=3, in_blocks=True)
    # GPUs for desktops have 99 KiB of shared memory for a program; those with such blocks have more.
    keys = 64 if in_blocks or size <= _LARGEST_HEAD else 32
    return PrefillConfig(rows=64, keys=keys, warps=4, stages=2, in_blocks=in_blocks)


def queries_per_tile(query_heads: int, kv_heads: int, config: PrefillConfig) -> int:
    """Return how many tokens one program takes, with all query heads of a KV head: keys are read once."""
    return max(1, config.rows // (query_heads // kv_heads))


def make_tiles(chunks: Iterable[ChunkRows], tile: int) -> list[tuple[int, int, int, int]]:
    """Divide the new tokens of a step among programs.

    Args:
        chunks: the new tokens of each sequence.
        tile: most tokens in one tile, from `queries_per_tile`.

    Returns:
        (table row, first row of the step, first position, tokens) of each tile, the longest past first.
        Programs start in this order, so that short ones fill the gaps at the end.
    """
    tiles = [
        (each.slot, row, each.offset + row - each.start, min(tile, each.end - row))
        for each in chunks
        for row in range(each.start, each.end, tile)
    ]
    return sorted(tiles, key=lambda each: -each[2])


def prefill_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    config: PrefillConfig | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Attend each new token to its sequence up to and including itself, scaled by head_dim ** -0.5.

    The keys and values of the new tokens must already be in the cache. Nothing beyond a tile's last token is
    used: entries of `tables` there may be anything, and what other tokens left in a block affects no result.
    A row's result does not depend on what else is in the step.

    Compiled once for each dtype, number of heads, head_dim, block_size, config, and whether there are slopes.
    No other argument causes another compilation, provided that the addresses of `queries`, `keys`, `values`,
    `out` and `slopes` and the stride in bytes between the tokens of `queries` are multiples of 16.

    Args:
        queries: [T, query heads, head_dim], every row of the step; only tokens may be strided.
        keys: [blocks, block_size, KV heads, head_dim], contiguous, of the same dtype as the queries.
        values: like `keys`.
        tables: [S, W] int32, block numbers.
        tiles: [N, 4] int32, contiguous, from `make_tiles` with `queries_per_tile` of the same config.
        out: [T, query heads, head_dim], contiguous; the rows that tiles name are written.
        config: None: the choice of `prefill_config`. With `in_blocks`, its keys divide `block_size`, and the
            numbers of a head take a multiple of 16 bytes.
        slopes: [query heads] float32, as `Alibi` has them; None: scores do not depend on the distance.

    Raises:
        ValueError: keys are to be loaded in blocks that hold no whole number of tiles.
    """
    _, query_heads, head_dim = queries.shape
    _, block_size, kv_heads, _ = keys.shape
    config = config or prefill_config(head_dim, queries.dtype)
    group = query_heads // kv_heads
    cached: tuple[Tensor, ...] | tuple[TensorDescriptor, ...] = (keys, values)
    if config.in_blocks:
        if block_size % config.keys:
            raise ValueError(f"{config.keys} keys do not divide a block of {block_size}")
        cached = tuple(_by_head(each, config.keys) for each in cached)
    # The first axis runs fastest: all heads of a long tile start before short tiles.
    _prefill[kv_heads, tiles.shape[0]](
        queries,
        *cached,
        tables,
        tiles,
        out,
        slopes,
        queries.stride(0),
        tables.stride(0),
        GROUP=group,
        ROWS=max(config.rows, triton.next_power_of_2(group)),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIMS=padded(head_dim),
        BLOCK_SIZE=block_size,
        KEYS=config.keys,
        IN_BLOCKS=config.in_blocks,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _by_head(cached: Tensor, keys: int) -> TensorDescriptor:
    """Describe a cache as [KV heads, tokens, head_dim], of which a copy is `keys` tokens of a head."""
    _, _, kv_heads, head_dim = cached.shape
    tokens = cached.numel() // (kv_heads * head_dim)
    strides = [head_dim, kv_heads * head_dim, 1]
    return TensorDescriptor(cached, [kv_heads, tokens, head_dim], strides, [1, keys, padded(head_dim)])


@triton.jit
def _attend(
    query,
    query_positions,
    slope,
    high,
    weights,
    sums,
    keys,
    values,
    kv_head,
    table,
    first,
    last,
    end,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the key tiles `first` to `last`: an online softmax, unnormalised.

    Every query attends to all keys of unmasked tiles.
    """
    log2_scale: tl.constexpr = 1.4426950408889634 * HEAD_DIM**-0.5
    steps = tl.arange(0, KEYS)
    for tile in range(first, last):
        positions = tile * KEYS + steps
        inside = positions < end
        if IN_BLOCKS:
            start = tile * KEYS
            place = tl.load(table + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE
            key = keys.load([kv_head, place, 0]).reshape(KEYS, DIMS)
        else:
            if MASKED:
                # Positions beyond the end are looked up in block 0, which exists; keys are masked below.
                blocks = tl.load(table + positions // BLOCK_SIZE, mask=inside, other=0)
            else:
                blocks = tl.load(table + positions // BLOCK_SIZE)
            places = (blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)
            key = load_heads(keys, places, inside, HEAD_DIM, DIMS, MASKED=False)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        scores = lean(scores, slope, positions[None, :] - query_positions[:, None])
        if MASKED:
            scores = tl.where(positions[None, :] <= query_positions[:, None], scores, -float("inf"))
        # Zeros instead of what the block holds, since a weight of 0 would not cancel a NaN.
        if IN_BLOCKS:
            value = values.load([kv_head, place, 0]).reshape(KEYS, DIMS)
            if MASKED:
                value = tl.where(inside[:, None], value, 0.0)
        else:
            value = load_heads(values, places, inside, HEAD_DIM, DIMS, MASKED)
        new = tl.maximum(high, tl.max(scores, 1))
        keep = tl.exp2((high - new) * log2_scale)
        weight = tl.exp2(scores * log2_scale - (new * log2_scale)[:, None])
        weights = weights * keep + tl.sum(weight, 1)
        sums = tl.dot(weight.to(value.dtype), value, sums * keep[:, None], input_precision="ieee")
        high = new
    return high, weights, sums


@triton.jit(
    do_not_specialize=["query_stride", "table_stride"],
    do_not_specialize_on_alignment=["tables", "tiles"],
)
def _prefill(
    queries,
    keys,
    values,
    tables,
    tiles,
    out,
    slopes,
    query_stride,
    table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tiles += tl.program_id(1) * 4
    table_row, first_row = tl.load(tiles), tl.load(tiles + 1)
    offset, count = tl.load(tiles + 2), tl.load(tiles + 3)

    # Rows are queries; the GROUP heads of one token are adjacent.
    lanes = tl.arange(0, ROWS)
    tokens = lanes // GROUP
    heads = kv_head * GROUP + lanes % GROUP
    dims = tl.arange(0, DIMS)
    real = (tokens < count)[:, None] & (dims < HEAD_DIM)[None, :]
    rows = (first_row + tokens).to(tl.int64)
    query = tl.load(
        queries + (rows * query_stride + heads * HEAD_DIM)[:, None] + dims[None, :], mask=real, other=0.0
    )
    table = tables + table_row.to(tl.int64) * table_stride
    if not IN_BLOCKS:
        keys += kv_head * HEAD_DIM
        values += kv_head * HEAD_DIM

    high = tl.full([ROWS], -float("inf"), tl.float32)
    weights = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIMS], tl.float32)
    query_positions = offset + tokens
    slope = load_slopes(slopes, heads, tokens < count, HEAD_DIM)
    end = offset + count
    whole = (offset + 1) // KEYS
    high, weights, sums = _attend(
        query, query_positions, slope, high, weights, sums, keys, values, kv_head, table,
        0, whole, end, KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, KEYS, IN_BLOCKS, MASKED=False,
    )  # fmt: skip
    high, weights, sums = _attend(
        query, query_positions, slope, high, weights, sums, keys, values, kv_head, table,
        whole, tl.cdiv(end, KEYS), end, KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, KEYS, IN_BLOCKS, MASKED=True,
    )  # fmt: skip
    tl.store(
        out + (rows * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :],
        (sums / weights[:, None]).to(out.dtype.element_ty),
        mask=real,
    )
