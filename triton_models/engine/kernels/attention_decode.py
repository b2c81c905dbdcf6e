"""Paged attention of one new token per sequence, split over its keys (flash-decoding)."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine.kernels.early import early, wait_for_inputs
from triton_models.engine.kernels.heads import (
    SCALED,
    Scales,
    lean,
    load_heads,
    load_projected,
    load_slopes,
    padded,
    store_new,
)
from triton_models.engine.kernels.parts import leave_part, merge_parts
from triton_models.engine.kernels.rows import block_sums, in_8_bits, mark_places
from triton_models.engine.models import Rotary

PARTS = 32
"""Most parts of a sequence: the workspace has room for so many."""

_PROGRAMS_PER_SM = 2
"""Programs that long sequences are divided among, for each multiprocessor (bench/LOG.md: three take less time
where many sequences differ in length, and more where they do not)."""

_TILES_BY_LENGTH: tl.constexpr = tl.constexpr(8)
"""Tiles of a sequence's parts, if these are not too many then, where its length alone decides."""

_PROGRAMS_BY_LENGTH = 64
"""Programs that a row has room for there, with all KV heads: those without work take time, too."""

_MERGE_STEP: tl.constexpr = tl.constexpr(4)
"""Parts whose loads are in flight at the same time while the last program merges."""

_ITEM: tl.constexpr = tl.constexpr(5)
"""Numbers of a program in what `share_out` returns."""

_CLASSES: tl.constexpr = tl.constexpr(4)
"""By their size, the programs of a launch are sorted into so many classes."""

_LEAST_LANES = 128
"""Rows that the kernel which shares out the work takes at least, so that few variants are compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """How a step's decodes are divided among programs. How a sequence is divided affects its rounding."""

    tile: int
    """Keys loaded at once, a power of two of at least 16."""
    warps: int
    """Triton's launch option `num_warps`."""
    stages: int
    """Triton's launch option `num_stages`."""
    extra: int | None
    """Programs of a KV head beside one for each row, at least one, among which the longest sequences are
    divided. None: a sequence's length alone decides, so that its results are the same bits in any batch."""
    parts: int = PARTS
    """Most parts of a sequence, at most `PARTS`."""

    def programs(self, batch: int) -> int:
        """Return how many a KV head needs for a batch of this size."""
        return batch * self.parts if self.extra is None else batch + self.extra


def plan_decode(kv_heads: int, head_dim: int, dtype: torch.dtype, *, sm_count: int) -> DecodePlan:
    """Return how decodes are divided among programs, whatever their number and lengths.

    A tile has 32 KiB of keys where a number has 16 bits. There rounding depends on what else is in the step,
    as that of the products does; in float32 it must not. No matrix unit has float32's precision, so its tiles
    are small, to fit the registers.

    Args:
        kv_heads: number of KV heads.
        head_dim: width of a head.
        dtype: of the keys and values.
        sm_count: multiprocessors of the device.
    """
    dims = padded(head_dim)
    if dtype in (torch.float16, torch.bfloat16):
        extra = max(1, _PROGRAMS_PER_SM * sm_count // kv_heads)
        return DecodePlan(tile=max(16, min(128, 16384 // dims)), warps=4, stages=2, extra=extra)
    parts = max(1, min(PARTS, _PROGRAMS_BY_LENGTH // kv_heads))
    return DecodePlan(tile=max(16, min(128, 2048 // dims)), warps=8, stages=3, extra=None, parts=parts)


class DecodeWorkspace:
    """Buffers in which a sequence's programs leave results for the one that merges them; made only once.

    Launches that share a workspace must not overlap: use one stream, or order them by events. `rows`: the
    largest batch.
    """

    def __init__(
        self, *, rows: int, query_heads: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        self.rows = rows
        group = query_heads // kv_heads
        self.sums = torch.empty(
            (rows, kv_heads, PARTS, group, padded(head_dim)), dtype=torch.float32, device=device
        )
        """Unnormalised weighted sums of values: [rows, KV heads, parts, query heads, padded head_dim]."""
        self.scales = torch.empty(
            (rows, kv_heads, PARTS, 2, padded(group)), dtype=torch.float32, device=device
        )
        """Each part's highest score, then its sum of weights."""
        self.arrivals = torch.zeros((rows, kv_heads), dtype=torch.int32, device=device)
        """Programs that have finished; zero again when a launch ends."""

    def reset(self) -> None:
        """Make the workspace usable again after a launch that failed midway."""
        self.arrivals.zero_()


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The newest token of each sequence, as a layer projected it: nothing is rotated or stored yet."""

    projected: Tensor
    """[B, query heads + 2 * KV heads, head_dim], contiguous: queries, then keys, then values."""
    rotary: Rotary | None
    """Rotates queries and keys by their positions; [positions, R / 2], contiguous, R at most head_dim. None:
    nothing is rotated."""
    scales: Scales = SCALED
    """What is left to be done to `projected`."""


def share_out(lengths: Tensor, slots: Tensor, plan: DecodePlan) -> Tensor:
    """Return what each program of a KV head does in all layers of a step, for `decode_attention`.

    A program takes a part of a sequence, which is whole tiles of it, or all of it. Those with most to do come
    first, since the device begins programs in their order. Nothing is copied to the host, so the launch can
    be captured in a CUDA graph. Compiled once for each tile and power of two that holds B, from 128 on.

    Args:
        lengths: [B] int32, tokens of each sequence with the new one; 0 in rows without a decode.
        slots: [B] int32, each row's place in the block tables; further ones are not read.
        plan: as `decode_attention` gets it.

    Returns:
        [plan.programs(B), 5] int32: row (-1: nothing is to be done), slot, length, part, tiles of each part
        but the last.
    """
    batch = len(lengths)
    programs = plan.programs(batch)
    items = torch.empty((programs, int(_ITEM)), dtype=torch.int32, device=lengths.device)
    _share_out[1,](
        lengths,
        slots,
        items,
        batch,
        programs,
        plan.extra or 0,
        TILE=plan.tile,
        MAX_PARTS=plan.parts,
        LANES=max(_LEAST_LANES, padded(batch)),
        num_warps=4,
    )
    return items


def decode_attention(
    queries: Tensor | NewTokens,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    items: Tensor,
    out: Tensor,
    *,
    plan: DecodePlan,
    workspace: DecodeWorkspace,
    slopes: Tensor | None = None,
    marks: Tensor | None = None,
) -> None:
    """Attend one token of each sequence to the whole sequence, scaled by head_dim ** -0.5.

    Given new tokens, it does first what `rotate_store` does, to the same bits, but that `projected` stays as
    it is. A new token's place must be no other row's; the results of rows that share one, as those that pad a
    step do, may be anything.

    The programs of a divided sequence store what their parts come to in the workspace, and the last to finish
    merges all of them in order. So a row's result depends on its sequence's division, but on nothing else.

    Nothing beyond a sequence's length is used: entries of `tables` there may be anything, and what other
    tokens left in a sequence's last block affects no result. Rows without a decode are not written.

    Compiled once for each dtype, number of heads, head_dim, block_size, tile with its launch options, and
    whether there are slopes; also with and without new tokens, and for each R of these; with and without
    marks, and for up to 32 rows, where launches begin early (`kernels.early`). No other argument causes
    another compilation, provided that the addresses of `queries`, rotary tables, `keys`, `values`, `out` and
    `slopes` and the stride in bytes between the tokens of `queries` are multiples of 16.

    Args:
        queries: [B, query heads, head_dim]; only the batch may be strided. Or new tokens, whose keys and
            values are not in the cache yet.
        keys: [blocks, block_size, KV heads, head_dim], contiguous, of the same dtype as the queries. Those of
            new tokens are written at their places.
        values: like `keys`.
        tables: [S, W] int32, block numbers.
        items: what `share_out` returned for this plan.
        out: [B, query heads, head_dim], contiguous, written.
        plan: see `plan_decode`.
        workspace: of at least B rows.
        slopes: [query heads] float32, as `Alibi` has them; None: scores do not depend on the distance.
        marks: from `kernels.rows.new_marks`, written: the sums of the blocks of `out` or, if it is in 8 bits,
            what they are times. A head is whole blocks then: of 64 numbers, or of 128.

    Raises:
        ValueError: the workspace is too small.
    """
    _, block_size, kv_heads, _ = keys.shape
    rotary, scales, stores = None, SCALED, isinstance(queries, NewTokens)
    if isinstance(queries, NewTokens):
        rotary, scales, queries = queries.rotary, queries.scales, queries.projected
    batch, query_heads, head_dim = queries.shape
    if stores:
        query_heads -= 2 * kv_heads
    if workspace.rows < batch:
        raise ValueError(f"{batch} rows need a workspace of as many")
    _decode[kv_heads * len(items),](
        queries,
        scales,
        keys,
        values,
        tables,
        items,
        out,
        workspace.sums,
        workspace.scales,
        workspace.arrivals,
        slopes,
        marks,
        rotary.cos if rotary else None,
        rotary.sin if rotary else None,
        queries.stride(0),
        tables.stride(0),
        GROUP=query_heads // kv_heads,
        LANES=padded(query_heads // kv_heads),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIMS=padded(head_dim),
        BLOCK_SIZE=block_size,
        TILE=plan.tile,
        MAX_PARTS=PARTS,
        STORES=stores,
        PAIRS=rotary.cos.shape[1] if rotary else 0,
        num_warps=plan.warps,
        num_stages=plan.stages,
        enable_fp_fusion=False,
        **early(batch),
    )


@triton.jit(
    do_not_specialize=["batch", "programs", "extra"],
    do_not_specialize_on_alignment=["lengths", "slots", "items"],
)
def _share_out(
    lengths,
    slots,
    items,
    batch,
    programs,
    extra,
    TILE: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    LANES: tl.constexpr,
):
    lanes = tl.arange(0, LANES)
    length = tl.load(lengths + lanes, mask=lanes < batch, other=0)
    slot = tl.load(slots + lanes, mask=lanes < batch, other=0)
    tiles = tl.cdiv(length, TILE)
    if extra > 0:
        # So the programs of all parts are at most `extra` and one for each row.
        share = tl.cdiv(tl.sum(tiles), extra) + tl.zeros_like(tiles)
    else:
        share = _TILES_BY_LENGTH + tl.zeros_like(tiles)
    share = tl.maximum(tl.maximum(share, tl.cdiv(tiles, MAX_PARTS)), 1)
    parts = tl.cdiv(tiles, share)
    sizes = tl.minimum(share, tiles)
    largest = tl.maximum(tl.max(sizes), 1)
    classes = tl.minimum(largest, _CLASSES)
    own = (sizes * classes - 1) // largest
    begins = tl.zeros_like(parts)
    earlier = 0
    for rank in range(classes):
        chosen = own == classes - 1 - rank
        here = tl.where(chosen, parts, 0)
        begins = tl.where(chosen, earlier + tl.cumsum(here) - here, begins)
        earlier += tl.sum(here)
    for part in range(tl.max(parts)):
        item = items + (begins + part) * _ITEM
        exists = part < parts
        tl.store(item, lanes, mask=exists)
        tl.store(item + 1, slot, mask=exists)
        tl.store(item + 2, length, mask=exists)
        tl.store(item + 3, part + tl.zeros_like(lanes), mask=exists)
        tl.store(item + 4, share, mask=exists)
    for first in range(earlier, programs, LANES):
        tl.store(items + (first + lanes) * _ITEM, -1, mask=first + lanes < programs)


@triton.jit(
    do_not_specialize=["query_stride", "table_stride"],
    do_not_specialize_on_alignment=["tables", "items", "arrivals"],
)
def _decode(
    queries,
    scales,
    keys,
    values,
    tables,
    items,
    out,
    sums_out,
    scales_out,
    arrivals,
    slopes,
    marks,
    cos,
    sin,
    query_stride,
    table_stride,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    STORES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    wait_for_inputs()
    kv_head = tl.program_id(0) % KV_HEADS
    item = items + tl.program_id(0) // KV_HEADS * _ITEM
    batch_row, slot, length = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    part, share = tl.load(item + 3), tl.load(item + 4)
    if batch_row < 0:
        return
    tiles = tl.cdiv(length, TILE)
    first = part * share
    last = tl.minimum(first + share, tiles)

    log2_scale: tl.constexpr = 1.4426950408889634 * HEAD_DIM**-0.5
    lanes = tl.arange(0, LANES)
    dims = tl.arange(0, DIMS)
    steps = tl.arange(0, TILE)
    heads = kv_head * GROUP + lanes
    real = (lanes < GROUP)[:, None]
    filled = real & (dims < HEAD_DIM)[None, :]
    slope = load_slopes(slopes, heads, lanes < GROUP, HEAD_DIM)
    # A width that the compiler knows lets it load several numbers at once.
    queries += batch_row.to(tl.int64) * ((GROUP + 2) * KV_HEADS * HEAD_DIM if STORES else query_stride)
    if scales[0] is not None:
        scales = (scales[0] + batch_row, scales[1], scales[2])
    query = load_projected(queries, heads[:, None] * HEAD_DIM + dims[None, :], filled, scales)
    table = tables + slot.to(tl.int64) * table_stride
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    if STORES:
        query = store_new(
            query, queries, scales, cos, sin, keys, values, table, length - 1, last == tiles, kv_head,
            KV_HEADS * GROUP, KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, PAIRS,
        )  # fmt: skip
    pair = batch_row * KV_HEADS + kv_head
    partial = pair.to(tl.int64) * MAX_PARTS

    high = tl.full([LANES], -float("inf"), tl.float32)
    weights = tl.zeros([LANES], tl.float32)
    sums = tl.zeros([LANES, DIMS], tl.float32)
    for tile in range(first, last):
        positions = tile * TILE + steps
        inside = positions < length
        # Positions beyond the length are looked up in block 0, which exists; their keys are masked below.
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=inside, other=0)
        places = (blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)
        key = load_heads(keys, places, inside, HEAD_DIM, DIMS, MASKED=False)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        scores = lean(scores, slope, (positions - length + 1)[None, :])
        scores = tl.where(inside[None, :], scores, -float("inf"))
        new = tl.maximum(high, tl.max(scores, 1))
        keep = tl.exp2((high - new) * log2_scale)
        weight = tl.exp2(
            tl.fma(scores, log2_scale, tl.broadcast_to((-new * log2_scale)[:, None], scores.shape))
        )
        weights = tl.fma(weights, keep, tl.sum(weight, 1))
        # Zeros instead of what the block holds, since a weight of 0 would not cancel a NaN.
        value = load_heads(values, places, inside, HEAD_DIM, DIMS, MASKED=True)
        sums = tl.dot(weight.to(value.dtype), value, sums * keep[:, None], input_precision="ieee")
        high = new
    if share < tiles:
        at = partial + part
        arrived = leave_part(
            sums_out, scales_out, arrivals + pair, at, high, weights, sums, real, GROUP, LANES, DIMS
        )
        parts = tl.cdiv(tiles, share)
        if arrived + 1 < parts:
            return
        tl.store(arrivals + pair, 0)
        weights, sums = merge_parts(
            sums_out, scales_out, partial, parts, real, log2_scale, GROUP, LANES, DIMS, _MERGE_STEP
        )
    result = sums / weights[:, None]
    head = batch_row.to(tl.int64) * (KV_HEADS * GROUP) + heads[:, None]
    numbers = result.to(out.dtype.element_ty)
    if marks is not None:
        if out.dtype.element_ty == tl.float8e4nv:
            numbers, head_marks = in_8_bits(result, out.dtype.element_ty)
        else:
            head_marks = block_sums(numbers)
        of_head: tl.constexpr = head_marks.shape[1]
        block = heads[:, None] * of_head + tl.arange(0, of_head)[None, :]
        tl.store(mark_places(marks, batch_row, block), head_marks, mask=real)
    tl.store(out + head * HEAD_DIM + dims[None, :], numbers, mask=filled)
