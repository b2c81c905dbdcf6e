"""Paged causal attention of several new tokens per sequence, for prompts and chunks of prompts.

Where a step has few new tokens, which follow many, their keys are divided among programs as those of decodes
are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_models.engine.kernels.heads import lean, load_heads, load_slopes, padded
from triton_models.engine.kernels.parts import leave_part, merge_parts
from triton_models.engine.models import ChunkRows, Tile

_BLOCK_KEYS = 64
_LARGEST_HEAD = 128
MANY_ROWS: Final = 992
"""With more rows in a step, tiles of twice the queries still give every multiprocessor work. There is a
captured step of this size, so that padding makes no step a large one."""

FEW_ROWS: Final = 128
"""With more rows in a step, this kernel divides no keys. That takes more registers, and captured steps of
their own."""

MANY_KEYS: Final = 640
"""With more tokens in a sequence, a step of few rows may have `StepLayout.many_keys`."""

_LEAST_LOADS = 8
"""Loads of keys that a part of the longest tile takes at least: so many that merging is little."""

_LOADS_PER_TILE = 2
"""Loads of keys in whose time a program begins and ends a tile, about; it merges a part in that of one."""

_ALMOST = 1.1
"""Tiles are whole if that takes at most so many times what it would if every program had as much to do, or
what it does with parts."""

_MOST_PARTS = 64
"""Most parts of a tile."""

_PROGRAMS_PER_SM = 2
"""Programs that the keys of few tokens are divided among, for each multiprocessor."""


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


def queries_per_tile(query_heads: int, kv_heads: int, rows: int) -> int:
    """Return how many tokens one program takes, with all query heads of a KV head: keys are read once."""
    return max(1, rows // (query_heads // kv_heads))


def _tile_rows(group: int, rows: int) -> int:
    """Return the rows of a tile, which has room for all query heads of a KV head."""
    return max(rows, padded(group))


class PrefillWorkspace:
    """Buffers in which the programs of a tile leave results for the one that merges them; made only once.

    Launches that share a workspace must not overlap: use one stream, or order them by events. `places`:
    parts of all divided tiles together. `rows`: of a tile.
    """

    def __init__(
        self,
        *,
        places: int,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        rows: int,
        device: torch.device,
    ) -> None:
        self.places = places
        rows = _tile_rows(query_heads // kv_heads, rows)
        self.sums = torch.empty(
            (kv_heads, places, rows, padded(head_dim)), dtype=torch.float32, device=device
        )
        """Unnormalised weighted sums of values: [KV heads, places, rows, padded head_dim]."""
        self.scales = torch.empty((kv_heads, places, 2, rows), dtype=torch.float32, device=device)
        """Each row's highest score, then its sum of weights."""
        self.arrivals = torch.zeros((kv_heads, places, 2), dtype=torch.int32, device=device)
        """Parts that have been left, at their tile's first place, of each half of its rows where these are
        attended to apart; zero again when a launch ends."""

    def reset(self) -> None:
        """Make the workspace usable again after a launch that failed midway."""
        self.arrivals.zero_()


def prefill_workspace(
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    sm_count: int,
    device: torch.device,
) -> PrefillWorkspace | None:
    """Return the workspace for the tiles of small steps; None where keys are not to be divided.

    That is so in float32, where a row is to be the same bits in any batch.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    places = max(1, _PROGRAMS_PER_SM * sm_count // kv_heads)
    return PrefillWorkspace(
        places=places,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rows=prefill_config(head_dim, dtype).rows,
        device=device,
    )


def make_tiles(
    chunks: Iterable[ChunkRows], tile: int, *, keys: int = 1, programs: int = 0, rounds: int = 1
) -> list[Tile]:
    """Divide the new tokens of a step among programs, and where these are few, the keys of tokens as well.

    Args:
        chunks: the new tokens of each sequence.
        tile: most tokens in one tile, from `queries_per_tile`.
        keys: loaded at once.
        programs: of a KV head, that should have work. 0: no keys are divided, so that a row's result depends
            on nothing else in the step.
        rounds: most parts that each of them may get, one after the other. So no more than the product of
            both need a place.

    Returns:
        The tiles, those with most keys first. Programs start in this order, so that short ones fill the gaps
        at the end.
    """
    whole = [
        Tile(each.slot, row, each.offset + row - each.start, min(tile, each.end - row), parts=1)
        for each in chunks
        for row in range(each.start, each.end, tile)
    ]
    if not programs:
        return sorted(whole, key=lambda each: -each.position)
    loads = [-(-(each.position + each.tokens) // keys) for each in whole]
    divided: list[tuple[float, Tile]] = []
    place = 0
    for each, load, parts in zip(whole, loads, _parts(loads, programs, rounds), strict=True):
        if parts == 1:
            divided.append((load, each))
        else:
            slot, row, position, tokens, *_ = each
            divided += [
                (load / parts, Tile(slot, row, position, tokens, part, parts, place)) for part in range(parts)
            ]
            place += parts
    divided.sort(key=itemgetter(0), reverse=True)
    return [each for _, each in divided]


def _parts(loads: list[int], programs: int, rounds: int) -> list[int]:
    """Return into how many parts tiles of so many loads are divided, so that the last is ready soonest."""
    best = [1] * len(loads)
    longest, total = max(loads), sum(loads)
    if longest < 2 * _LEAST_LOADS or longest * programs <= (_ALMOST - 1) * total:
        return best
    least = _time(loads, programs)
    enough = _ALMOST * (total + _LOADS_PER_TILE * len(loads)) / programs
    for most in range(programs, rounds * programs + 1, programs):
        if least <= enough:
            break
        each = max(1, min(most * longest // total, longest // _LEAST_LOADS, _MOST_PARTS))
        parts = [max(1, round(load * each / longest)) for load in loads]
        if sum(part for part in parts if part > 1) > most:
            parts = [max(1, load * each // longest) for load in loads]
        pieces = [load / part + part for load, part in zip(loads, parts, strict=True) for _ in range(part)]
        if _ALMOST * (time := _time(pieces, programs)) < least:
            best, least = parts, time
    return best


def _time(loads: Sequence[float], programs: int) -> float:
    """Return about how many loads the busiest program has, if they take the longest first, back and forth."""
    longest, turns = sorted(loads, reverse=True), 2 * programs
    first = longest[::turns] + longest[turns - 1 :: turns]
    last = longest[programs - 1 :: turns] + longest[programs::turns]
    return max(sum(each) + _LOADS_PER_TILE * len(each) for each in (first, last))


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
    workspace: PrefillWorkspace | None = None,
) -> None:
    """Attend each new token to its sequence up to and including itself, scaled by head_dim ** -0.5.

    The keys and values of the new tokens must already be in the cache. Nothing beyond a tile's last token is
    used: entries of `tables` there may be anything, and what other tokens left in a block affects no result.
    A row's result depends on how its tile's keys are divided, and on nothing else in the step.

    Compiled once for each dtype, number of heads, head_dim, block_size, config, and whether there are slopes
    and a workspace.
    No other argument causes another compilation, provided that the addresses of `queries`, `keys`, `values`,
    `out` and `slopes` and the stride in bytes between the tokens of `queries` are multiples of 16.

    Args:
        queries: [T, query heads, head_dim], every row of the step; only tokens may be strided.
        keys: [blocks, block_size, KV heads, head_dim], contiguous, of the same dtype as the queries.
        values: like `keys`.
        tables: [S, W] int32, block numbers.
        tiles: [N, 7] int32, contiguous, from `make_tiles` with `queries_per_tile` of the config's rows.
        out: [T, query heads, head_dim], contiguous; the rows that tiles name are written.
        config: None: the choice of `prefill_config`. With `in_blocks`, its keys divide `block_size`, and the
            numbers of a head take a multiple of 16 bytes.
        slopes: [query heads] float32, as `Alibi` has them; None: scores do not depend on the distance.
        workspace: for the parts of divided tiles, of the config's rows; None: there are none.

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
        workspace and workspace.sums,
        workspace and workspace.scales,
        workspace and workspace.arrivals,
        queries.stride(0),
        tables.stride(0),
        GROUP=group,
        ROWS=_tile_rows(group, config.rows),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIMS=padded(head_dim),
        BLOCK_SIZE=block_size,
        KEYS=config.keys,
        IN_BLOCKS=config.in_blocks,
        PLACES=workspace.places if workspace else 0,
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
    sums_out,
    scales_out,
    arrivals,
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
    PLACES: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tiles += tl.program_id(1) * 7
    table_row, first_row = tl.load(tiles), tl.load(tiles + 1)
    offset, count = tl.load(tiles + 2), tl.load(tiles + 3)
    if count == 0:
        return

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
    first, last = 0, tl.cdiv(end, KEYS)
    if PLACES:
        # Every query attends to the first key of the last part, which is longer than a tile has tokens.
        part, parts = tl.load(tiles + 4), tl.load(tiles + 5)
        first, last = last * part // parts, last * (part + 1) // parts
    high, weights, sums = _attend(
        query, query_positions, slope, high, weights, sums, keys, values, kv_head, table,
        first, tl.minimum(whole, last), end,
        KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, KEYS, IN_BLOCKS, MASKED=False,
    )  # fmt: skip
    high, weights, sums = _attend(
        query, query_positions, slope, high, weights, sums, keys, values, kv_head, table,
        tl.maximum(first, whole), last, end,
        KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, KEYS, IN_BLOCKS, MASKED=True,
    )  # fmt: skip
    if PLACES:  # noqa: SIM102 - without places, the second is not compiled
        if parts > 1:
            log2_scale: tl.constexpr = 1.4426950408889634 * HEAD_DIM**-0.5
            place = kv_head * PLACES + tl.load(tiles + 6)
            arrived = leave_part(
                sums_out, scales_out, arrivals + 2 * place, place + part,
                high, weights, sums, real, ROWS, ROWS, DIMS,
            )  # fmt: skip
            if arrived + 1 < parts:
                return
            tl.store(arrivals + 2 * place, 0)
            weights, sums = merge_parts(
                sums_out, scales_out, place, parts, real, log2_scale, ROWS, ROWS, DIMS, 1
            )
    tl.store(
        out + (rows * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :],
        (sums / weights[:, None]).to(out.dtype.element_ty),
        mask=real,
    )
