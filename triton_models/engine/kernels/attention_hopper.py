"""Attention of prompts on Hopper GPUs, by programs whose warps have different work, and which stay.

One warp copies keys and values of 128 tokens at once into shared memory. Two groups of four warps attend,
each with 64 rows of a tile: while one has the matrix units, the other takes exponentials. Each asks for the
scores of the next keys before it has the softmax of these. That is how FlashAttention 3 divides it (Shah et
al., arXiv 2407.08608, section 3).

The programs are as many as multiprocessors, and each takes tile after tile, so that the next one's keys are
on their way while results of this one are stored. Where tiles are too few, each is divided by its keys, and
the last program to finish a part merges all.

It is written in Gluon, Triton's language for a program's layouts and barriers, which promises no stability:
whoever uses this module tries it first (`ops_hopper`), and has `attention_prefill` for everything else.
"""

from typing import Final

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from triton_models.engine.kernels.attention_prefill import PrefillWorkspace

TILE_ROWS: Final = 128
"""Queries of one head that a tile has room for, of `queries_per_tile` tokens."""

KEYS: Final = 128
"""Keys that are attended to at once."""

_BOX: Final = 64
"""Tokens of a block, and numbers of a head, that one copy takes: 128 bytes, the widest that a matrix unit's
layout in shared memory takes."""

_HEAD_DIMS = (64, 128)
"""Multiples of a box. With more, shared memory has no room for two stages."""

_STAGES: Final = 2

# Of a program's warps that do the same. Triton 3.6 has the older name.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def fits(dtype: torch.dtype, group: int, head_dim: int, block_size: int) -> bool:
    """Return whether `attend` takes these 16 bits; `group`: query heads of a KV head."""
    halves = dtype in (torch.float16, torch.bfloat16)
    return halves and group <= TILE_ROWS and head_dim in _HEAD_DIMS and not block_size % _BOX


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    workspace: PrefillWorkspace,
    programs: int,
    slopes: Tensor | None = None,
) -> None:
    """Do what `prefill_attention` does.

    Compiled once for each dtype, number of heads, head_dim, block_size and number of places, and whether
    there are slopes.

    Args:
        queries: [T, query heads, head_dim] in 16 bits; only tokens may be strided, by a multiple of 16 bytes.
            See `fits` for the rest.
        keys: [blocks, block_size, KV heads, head_dim], contiguous; block_size is a multiple of 64.
        values: like `keys`.
        tables: [S, W] int32, block numbers.
        tiles: [N, 7] int32, contiguous: from `make_tiles` for `KEYS` keys and as many tokens as have room in
            `TILE_ROWS`, then any without tokens.
        out: [T, query heads, head_dim], contiguous; the rows that tiles name are written.
        workspace: for the parts of divided tiles of `TILE_ROWS` rows.
        programs: multiprocessors of the device.
        slopes: [query heads] float32, as `Alibi` has them; None: scores do not depend on the distance.
    """
    _, query_heads, head_dim = queries.shape
    _, block_size, kv_heads, _ = keys.shape
    work = kv_heads * tiles.shape[0]
    _attend[min(work, programs),](
        queries,
        *(_in_boxes(each) for each in (keys, values)),
        tables,
        tiles,
        out,
        slopes,
        workspace.sums,
        workspace.scales,
        workspace.arrivals,
        # In units of 16 bytes, so that the compiler knows a row's alignment.
        queries.stride(0) // 8,
        tables.stride(0),
        work,
        GROUP=query_heads // kv_heads,
        KV_HEADS=kv_heads,
        DIMS=head_dim,
        BLOCK_SIZE=block_size,
        PLACES=workspace.places,
        ROWS=TILE_ROWS // 2,
        KEYS=KEYS,
        BOX=_BOX,
        STAGES=_STAGES,
        num_warps=4,
    )


def _in_boxes(cached: Tensor) -> TensorDescriptor:
    """Describe a cache as [tokens, KV heads * head_dim], of which a copy is a box."""
    _, _, kv_heads, head_dim = cached.shape
    width = kv_heads * head_dim
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(cached, [cached.numel() // width, width], [width, 1], [_BOX, _BOX], layout)


@gluon.jit
def _tile(tiles, turn, work, KV_HEADS: gl.constexpr):
    """Return where a tile is that this program takes in a turn, its tokens, and its KV head.

    Tiles are sorted, those with most keys first. Every second turn runs backwards through the programs, so
    that all get about the same. Tokens are 0 where nothing is left.
    """
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    place = gl.where(turn % 2 == 1, programs - 1 - place, place)
    index = turn * programs + place
    tile = tiles + gl.where(index < work, index // KV_HEADS, 0) * 7
    return tile, gl.where(index < work, gl.load(tile + 3), 0), index % KV_HEADS


@gluon.jit
def _keys_of(tile, count, KEYS: gl.constexpr):
    """Return the position of a tile's first token, the first load of its part, and the one after the last."""
    offset, part, parts = gl.load(tile + 2), gl.load(tile + 4), gl.load(tile + 5)
    loads = gl.cdiv(offset + count, KEYS)
    return offset, loads * part // parts, loads * (part + 1) // parts


@gluon.jit
def _copy(
    cached, kv_head, table, load, last_box, ready, boxes, first,
    BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, BOX: gl.constexpr, DIMS: gl.constexpr,
):  # fmt: skip
    """Start to copy `KEYS` keys or values, box by box; those of the last box stand for any beyond."""
    across: gl.constexpr = KEYS // BOX
    mbarrier.expect(ready, KEYS * DIMS * 2)
    for part in gl.static_range(across):
        start = gl.minimum(load * across + part, last_box) * BOX
        place = gl.load(table + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE
        for half in gl.static_range(DIMS // BOX):
            tma.async_copy_global_to_shared(
                cached, [place, kv_head * DIMS + half * BOX], ready, boxes.index(first + half * across + part)
            )


@gluon.jit
def _copy_all(
    keys, values, key_boxes, value_boxes, key_ready, value_ready, key_free, value_free,
    tables, tiles, table_stride, work,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, BOX: gl.constexpr,
    DIMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy keys and values of all tiles of this program, as soon as there is room for them."""
    boxes: gl.constexpr = KEYS // BOX * (DIMS // BOX)
    done = 0
    turn = 0
    tile, count, kv_head = _tile(tiles, turn, work, KV_HEADS)
    while count > 0:
        offset, first, last = _keys_of(tile, count, KEYS)
        table = tables + gl.load(tile).to(gl.int64) * table_stride
        last_box = (offset + count - 1) // BOX
        for load in range(first, last):
            stage = done % STAGES
            phase = done // STAGES & 1 ^ 1
            mbarrier.wait(key_free.index(stage), phase)
            _copy(
                keys, kv_head, table, load, last_box, key_ready.index(stage), key_boxes,
                stage * boxes, BLOCK_SIZE, KEYS, BOX, DIMS,
            )  # fmt: skip
            mbarrier.wait(value_free.index(stage), phase)
            _copy(
                values, kv_head, table, load, last_box, value_ready.index(stage), value_boxes,
                stage * boxes, BLOCK_SIZE, KEYS, BOX, DIMS,
            )  # fmt: skip
            done += 1
        turn += 1
        tile, count, kv_head = _tile(tiles, turn, work, KV_HEADS)


@gluon.jit
def _softmax(scores, high, weights, log2_scale: gl.constexpr):
    """Go on with an online softmax; `keep`: what remains of sums so far."""
    new = gl.maximum(high, gl.max(scores, 1))
    keep = gl.exp2((high - new) * log2_scale)
    weight = gl.exp2(scores * log2_scale - (new * log2_scale)[:, None])
    return weight, new, weights * keep + gl.sum(weight, 1), keep


@gluon.jit
def _zero_beyond(boxes, first, begins, end, KEYS: gl.constexpr, BOX: gl.constexpr, DIMS: gl.constexpr):
    """Zero values of tokens from `end` on, since a weight of 0 would not cancel a NaN that a block holds.

    Both groups do it, each before it reads them; both write the same.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    spots = begins + gl.arange(0, BOX, gl.SliceLayout(1, layout))
    for part in gl.static_range(KEYS // BOX):
        if begins + (part + 1) * BOX > end:
            for half in gl.static_range(DIMS // BOX):
                box = boxes.index(first + half * (KEYS // BOX) + part)
                inside = (spots + part * BOX < end)[:, None]
                box.store(gl.where(inside, box.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _leave_part(
    sums_out, scales_out, arrivals, at, high, weights, sums,
    HALF: gl.constexpr, ROWS: gl.constexpr, DIMS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store what one half of a tile's rows comes to at a place; return how many other parts' have arrived.

    As `parts.leave_part`. `LAYOUT`: of `sums`.
    """
    lanes = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, DIMS, gl.SliceLayout(0, LAYOUT))
    scales = scales_out + at * (4 * ROWS) + lanes
    gl.store(scales, gl.convert_layout(high, gl.SliceLayout(1, LAYOUT)))
    gl.store(scales + 2 * ROWS, gl.convert_layout(weights, gl.SliceLayout(1, LAYOUT)))
    gl.store(sums_out + at * (2 * ROWS * DIMS) + lanes[:, None] * DIMS + dims[None, :], sums)
    _barrier()
    return gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def _merge_parts(
    sums_in, scales_in, at, parts, log2_scale: gl.constexpr,
    HALF: gl.constexpr, ROWS: gl.constexpr, DIMS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the weights and sums of all parts from a place on, merged in order, as `parts.merge_parts`."""
    lanes = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, DIMS, gl.SliceLayout(0, LAYOUT))
    scales = scales_in + at * (4 * ROWS) + lanes
    numbers = sums_in + at * (2 * ROWS * DIMS) + lanes[:, None] * DIMS + dims[None, :]
    high = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    weights = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    sums = gl.full([ROWS, DIMS], 0.0, gl.float32, LAYOUT)
    for part in range(parts):
        # Bypasses the L1 cache, which is not coherent.
        other_high = gl.load(scales + part * (4 * ROWS), cache_modifier=".cg")
        other_weights = gl.load(scales + part * (4 * ROWS) + 2 * ROWS, cache_modifier=".cg")
        other_sums = gl.load(numbers + part * (2 * ROWS * DIMS), cache_modifier=".cg")
        new = gl.maximum(high, other_high)
        keep = gl.exp2((high - new) * log2_scale)
        add = gl.exp2((other_high - new) * log2_scale)
        weights = weights * keep + other_weights * add
        sums = sums * keep[:, None] + other_sums * add[:, None]
        high = new
    return weights, sums


@gluon.jit
def _masked(scores, load, steps, positions, slopes, whole, KEYS: gl.constexpr):
    """Return scores less what the rows' slopes take, and -inf of keys that come after the rows' tokens.

    Scores are unscaled, and so are slopes; None: there are none. Loads before `whole` have no such keys.
    """
    if slopes is not None:
        distances = (load * KEYS + steps)[None, :] - positions[:, None]
        scores = scores + slopes[:, None] * distances.to(gl.float32)
    if load >= whole:
        hidden = (load * KEYS + steps)[None, :] > positions[:, None]
        scores = gl.where(hidden, -float("inf"), scores)
    return scores


@gluon.jit
def _attend_half(
    HALF: gl.constexpr, queries, out, query_tiles, key_boxes, value_boxes,
    key_ready, value_ready, key_free, value_free, mine, others,
    tiles, slopes, part_sums, part_scales, arrivals, query_stride, work,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, PLACES: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, BOX: gl.constexpr, DIMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attend with one half of each tile's rows."""
    dtype: gl.constexpr = queries.dtype.element_ty
    boxes: gl.constexpr = KEYS // BOX * (DIMS // BOX)
    log2_scale: gl.constexpr = 1.4426950408889634 * DIMS**-0.5
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIMS, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    # 16 bytes for each thread, a row side by side.
    row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIMS, DIMS // 8], [4, 1], [1, 0])

    # A tile's boxes lie as its layout has them: tokens of the first numbers, then those of the next.
    key_tiles = key_boxes._reinterpret(dtype, [STAGES, KEYS, DIMS], shared)  # noqa: SLF001 - the only way
    value_tiles = value_boxes._reinterpret(dtype, [STAGES, KEYS, DIMS], shared)  # noqa: SLF001
    query_tile = query_tiles.index(HALF)
    # Rows are queries; the GROUP heads of one token are adjacent.
    lanes = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, row_layout))
    dims = gl.arange(0, DIMS, gl.SliceLayout(0, row_layout))
    tokens = lanes // GROUP
    score_lanes = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout))
    query_tokens = score_lanes // GROUP
    steps = gl.arange(0, KEYS, gl.SliceLayout(0, score_layout))
    zeros = gl.full([ROWS, KEYS], 0.0, gl.float32, score_layout)

    done = 0
    swaps = 0
    turn = 0
    tile, count, kv_head = _tile(tiles, turn, work, KV_HEADS)
    while count > 0:
        rows = (gl.load(tile + 1) + tokens).to(gl.int64)
        heads = kv_head * GROUP + lanes % GROUP
        real = (tokens < count)[:, None] & (dims < DIMS)[None, :]
        places = (rows * (query_stride * 8) + heads * DIMS)[:, None] + dims[None, :]
        query_tile.store(gl.load(queries + places, mask=real, other=0.0))
        fence_async_shared()
        offset, first, last = _keys_of(tile, count, KEYS)
        positions = offset + query_tokens
        # Every query attends to the first key of the last part, which is longer than a tile has tokens.
        whole = (offset + 1) // KEYS
        slope = None
        if slopes is not None:
            slope = gl.load(slopes + kv_head * GROUP + score_lanes % GROUP) * DIMS**0.5
        high = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, score_layout))
        weights = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, score_layout))
        sums = gl.full([ROWS, DIMS], 0.0, gl.float32, sum_layout)

        stage = done % STAGES
        mbarrier.wait(key_ready.index(stage), done // STAGES & 1)
        key = key_tiles.index(stage).permute([1, 0])
        scores = warpgroup_mma(query_tile, key, zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(key_free.index(stage), count=1)
        scores = _masked(scores, first, steps, positions, slope, whole, KEYS)
        weight, high, weights, keep = _softmax(scores, high, weights, log2_scale)
        weight = gl.convert_layout(weight.to(dtype), weight_layout)

        for load in range(first + 1, last):
            before = stage
            phase = done // STAGES & 1
            done += 1
            stage = done % STAGES
            mbarrier.wait(key_ready.index(stage), done // STAGES & 1)
            # The groups ask for products by turns, so that one's are computed during the other's softmax.
            mbarrier.wait(mine, swaps & 1 ^ 1 - HALF)
            swaps += 1
            key = key_tiles.index(stage).permute([1, 0])
            scores = warpgroup_mma(query_tile, key, zeros, use_acc=False, is_async=True)
            mbarrier.wait(value_ready.index(before), phase)
            sums = warpgroup_mma(weight, value_tiles.index(before), sums, is_async=True)
            mbarrier.arrive(others, count=1)
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(key_free.index(stage), count=1)
            scores = _masked(scores, load, steps, positions, slope, whole, KEYS)
            next_weight, high, weights, keep = _softmax(scores, high, weights, log2_scale)
            sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(value_free.index(before), count=1)
            weight = gl.convert_layout(next_weight.to(dtype), weight_layout)
            sums = sums * gl.convert_layout(keep, gl.SliceLayout(1, sum_layout))[:, None]

        mbarrier.wait(value_ready.index(stage), done // STAGES & 1)
        if last * KEYS > offset + count:
            _zero_beyond(value_boxes, stage * boxes, (last - 1) * KEYS, offset + count, KEYS, BOX, DIMS)
        sums = warpgroup_mma(weight, value_tiles.index(stage), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(value_free.index(stage), count=1)
        done += 1
        total = gl.convert_layout(weights, gl.SliceLayout(1, sum_layout))
        part, parts = gl.load(tile + 4), gl.load(tile + 5)
        complete = parts <= 1
        if parts > 1:
            place = kv_head * PLACES + gl.load(tile + 6)
            arrival = arrivals + 2 * place + HALF
            arrived = _leave_part(
                part_sums, part_scales, arrival, place + part, high, weights, sums,
                HALF, ROWS, DIMS, sum_layout,
            )  # fmt: skip
            complete = arrived + 1 == parts
            if complete:
                gl.store(arrival, 0)
                total, sums = _merge_parts(
                    part_sums, part_scales, place, parts, log2_scale, HALF, ROWS, DIMS, sum_layout
                )
        if complete:
            # By way of the queries' place, which is free, a thread gets 16 adjacent bytes to store.
            query_tile.store((sums / total[:, None]).to(dtype))
            places = (rows * (KV_HEADS * GROUP) + heads)[:, None] * DIMS + dims[None, :]
            gl.store(out + places, query_tile.load(row_layout), mask=real)
        turn += 1
        tile, count, kv_head = _tile(tiles, turn, work, KV_HEADS)


@gluon.jit(
    do_not_specialize=["query_stride", "table_stride", "work"],
    do_not_specialize_on_alignment=["tables", "tiles"],
)
def _attend(
    queries, keys, values, tables, tiles, out, slopes, part_sums, part_scales, arrivals,
    query_stride, table_stride, work,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, DIMS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    PLACES: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = queries.dtype.element_ty
    boxes: gl.constexpr = STAGES * (KEYS // BOX) * (DIMS // BOX)
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    query_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, DIMS], shared)
    key_boxes = gl.allocate_shared_memory(dtype, [boxes, BOX, BOX], shared)
    value_boxes = gl.allocate_shared_memory(dtype, [boxes, BOX, BOX], shared)
    key_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    swap = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_ready.index(stage), count=1)
        mbarrier.init(value_ready.index(stage), count=1)
        mbarrier.init(key_free.index(stage), count=2)
        mbarrier.init(value_free.index(stage), count=2)
    mbarrier.init(swap.index(0), count=1)
    mbarrier.init(swap.index(1), count=1)
    fence_async_shared()
    # The launch's 12 warps have 168 registers a thread: those that copy leave theirs to those that attend.
    gl.warp_specialize(
        [
            (
                _attend_half,
                (
                    0, queries, out, query_tiles, key_boxes, value_boxes,
                    key_ready, value_ready, key_free, value_free, swap.index(0), swap.index(1),
                    tiles, slopes, part_sums, part_scales, arrivals, query_stride, work,
                    GROUP, KV_HEADS, PLACES, ROWS, KEYS, BOX, DIMS, STAGES,
                ),
            ),
            (
                _attend_half,
                (
                    1, queries, out, query_tiles, key_boxes, value_boxes,
                    key_ready, value_ready, key_free, value_free, swap.index(1), swap.index(0),
                    tiles, slopes, part_sums, part_scales, arrivals, query_stride, work,
                    GROUP, KV_HEADS, PLACES, ROWS, KEYS, BOX, DIMS, STAGES,
                ),
            ),
            (
                _copy_all,
                (
                    keys, values, key_boxes, value_boxes, key_ready, value_ready, key_free, value_free,
                    tables, tiles, table_stride, work, KV_HEADS, BLOCK_SIZE, KEYS, BOX, DIMS, STAGES,
                ),
            ),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )  # fmt: skip
