"""Paged attention of one new token per sequence, split over its keys (flash-decoding)."""

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine.kernels.heads import lean, load_heads, load_slopes, padded

SEGMENTS = 32
"""Most segments of a sequence; their number and bounds depend on its length alone."""

_SPLITS_BESIDE_PROMPTS = 4
"""Fewest splits in steps with prompts."""

_TILES_BESIDE_PROMPTS = 4
"""Fewest tiles of a program there, so that only long sequences are divided."""

_RESIDENT = 3
"""Programs with full tiles, 72 KiB of shared memory each, that a multiprocessor of a Hopper GPU holds."""


_MERGE_STEP: tl.constexpr = tl.constexpr(4)
"""Segments whose loads are in flight at the same time while the last program merges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How the kernel divides its work. `tile` affects rounding, so results repeat only with the same one.

    `tile`: keys loaded at once, a power of two of at least 16. `warps`, `stages`: Triton's launch options
    `num_warps` and `num_stages`. `least`: tiles that a program takes at least; it affects speed alone.
    """

    tile: int
    warps: int
    stages: int
    least: int = 1


def decode_config(head_dim: int, dtype: torch.dtype, *, crowded: bool = False) -> DecodeConfig:
    """Return the constants for a head's shape: 32 KiB of keys in a tile where a number has 16 bits.

    `crowded`: the device cannot hold all programs of the launch at once with such tiles. They are half as
    large then, and more of them run at the same time. No matrix unit has float32's precision, so its tiles
    are small, to fit the registers.
    """
    dims = padded(head_dim)
    if dtype not in (torch.float16, torch.bfloat16):
        return DecodeConfig(tile=max(16, min(128, 2048 // dims)), warps=8, stages=3)
    tile = max(16, min(128, 16384 // dims))
    if crowded:
        return DecodeConfig(tile=max(16, tile // 2), warps=2, stages=2)
    return DecodeConfig(tile=tile, warps=4, stages=2)


def plan_decode(
    batch: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    sm_count: int,
    max_length: int,
    beside_prompts: bool,
) -> tuple[int, DecodeConfig]:
    """Return how many programs share a sequence and KV head in a step, and the kernel's constants.

    With 16-bit numbers, rounding differs between large and small batches, as that of the products does.

    Args:
        batch: decodes of the step, with padding.
        kv_heads: number of KV heads.
        head_dim: width of a head.
        dtype: of the keys and values.
        sm_count: multiprocessors of the device.
        max_length: tokens of the longest sequence.
        beside_prompts: whether the step has prompts. Then most decodes of a captured one may be padding, and
            a few of them long.
    """
    splits = choose_splits(batch, kv_heads, sm_count, max_length)
    if beside_prompts:
        splits = max(splits, _SPLITS_BESIDE_PROMPTS)
    crowded = splits == 1 and batch * kv_heads > _RESIDENT * sm_count
    config = decode_config(head_dim, dtype, crowded=crowded)
    return splits, replace(config, least=_TILES_BESIDE_PROMPTS) if beside_prompts else config


class DecodeWorkspace:
    """Buffers in which a sequence's programs leave results for the one that merges them; made only once.

    Launches that share a workspace must not overlap: use one stream, or order them by events. Only launches
    that split need one. `rows`: the largest batch that is split.
    """

    def __init__(
        self, *, rows: int, query_heads: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        self.rows = rows
        group = query_heads // kv_heads
        self.sums = torch.empty(
            (rows, kv_heads, SEGMENTS, group, padded(head_dim)), dtype=torch.float32, device=device
        )
        """Unnormalised weighted sums of values: [rows, KV heads, segments, query heads, padded head_dim]."""
        self.scales = torch.empty(
            (rows, kv_heads, SEGMENTS, 2, padded(group)), dtype=torch.float32, device=device
        )
        """Each segment's highest score, then its sum of weights."""
        self.arrivals = torch.zeros((rows, kv_heads), dtype=torch.int32, device=device)
        """Programs that have finished; zero again when a launch ends."""

    def reset(self) -> None:
        """Make the workspace usable again after a launch that failed midway."""
        self.arrivals.zero_()


def choose_splits(
    batch: int, kv_heads: int, sm_count: int, max_length: int, *, tile: int = 128, programs_per_sm: int = 1
) -> int:
    """Return how many programs should share a sequence: just enough to fill the device.

    It affects speed but not results (see `decode_attention`), so graphs of different batch sizes may differ
    in it. `max_length`: tokens of the longest sequence of the launch; `programs_per_sm`: how many programs to
    provide for each multiprocessor.
    """
    wanted = sm_count * programs_per_sm // (batch * kv_heads)
    tiles = math.ceil(max_length / tile)
    return max(1, min(wanted, tiles, SEGMENTS))


def decode_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    rows: Tensor,
    lengths: Tensor,
    out: Tensor,
    *,
    splits: int,
    workspace: DecodeWorkspace | None = None,
    config: DecodeConfig | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Attend one token of each sequence to the whole sequence, scaled by head_dim ** -0.5.

    A sequence is divided into at most `SEGMENTS` segments of whole tiles, depending on its length alone.
    `splits` programs share the segments. If there are several, each stores its segments in the workspace, and
    the last to finish merges all of them in order; a single program merges in registers, with the same
    operations in the same order. So with one `config`, whatever its `least`, a row's result is bitwise the
    same for any batch and any `splits`.

    Nothing beyond a sequence's length is used: entries of `tables` there may be anything, and what other
    tokens left in a sequence's last block affects no result. `lengths` and `rows` are read on the device, so
    the launch can be captured in a CUDA graph.

    Compiled once for each dtype, number of heads, head_dim, block_size, config, whether `splits` is 1, and
    whether there are slopes. No other argument causes another compilation, provided that the addresses of
    `queries`, `keys`, `values`, `out` and `slopes` and the stride in bytes between the tokens of `queries`
    are multiples of 16.

    Args:
        queries: [B, query heads, head_dim]; only the batch may be strided.
        keys: [blocks, block_size, KV heads, head_dim], contiguous, of the same dtype as the queries.
        values: like `keys`.
        tables: [S, W] int32, block numbers.
        rows: [B] int32, each token's row in `tables`.
        lengths: [B] int32, tokens of each sequence with the new one; 0 marks padding: its result is 0.
        out: [B, query heads, head_dim], contiguous, written.
        splits: programs per sequence and KV head, see `plan_decode`.
        workspace: required if `splits` is more than 1.
        config: None: the choice of `decode_config`.
        slopes: [query heads] float32, as `Alibi` has them; None: scores do not depend on the distance.

    Raises:
        ValueError: `splits` needs a workspace, which is missing or too small.
    """
    batch, query_heads, head_dim = queries.shape
    _, block_size, kv_heads, _ = keys.shape
    split = splits > 1
    if split and (workspace is None or workspace.rows < batch):
        raise ValueError(f"splitting {batch} rows needs a workspace of as many")
    config = config or decode_config(head_dim, queries.dtype)
    _decode[kv_heads, batch, splits](
        queries,
        keys,
        values,
        tables,
        rows,
        lengths,
        out,
        workspace.sums if workspace and split else out,
        workspace.scales if workspace and split else out,
        workspace.arrivals if workspace and split else lengths,
        slopes,
        queries.stride(0),
        tables.stride(0),
        GROUP=query_heads // kv_heads,
        LANES=padded(query_heads // kv_heads),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIMS=padded(head_dim),
        BLOCK_SIZE=block_size,
        TILE=config.tile,
        LEAST=config.least,
        MAX_SEGMENTS=SEGMENTS,
        SPLIT=split,
        num_warps=config.warps,
        num_stages=config.stages,
    )


@triton.jit
def _merge(high, weights, sums, other_high, other_weights, other_sums, log2_scale):
    """Merge a segment into those before it; scores are unscaled, and -inf means no keys.

    Every multiplication followed by an addition is an explicit fma, so that the compiler cannot contract them
    differently in the two places that merge.
    """
    new = tl.maximum(high, other_high)
    keep = tl.exp2((high - new) * log2_scale)
    add = tl.exp2((other_high - new) * log2_scale)
    weights = tl.fma(weights, keep, other_weights * add)
    sums = tl.fma(sums, tl.broadcast_to(keep[:, None], sums.shape), other_sums * add[:, None])
    return new, weights, sums


@triton.jit
def _merge_all(
    sums_in,
    scales_in,
    first,
    segments,
    real,
    log2_scale,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Merge a sequence's segments in order; the surplus ones of the last loop iteration change nothing."""
    lanes = tl.arange(0, LANES)
    dims = tl.arange(0, DIMS)
    high = tl.full([LANES], -float("inf"), tl.float32)
    weights = tl.zeros([LANES], tl.float32)
    sums = tl.zeros([LANES, DIMS], tl.float32)
    for begin in range(0, segments, _MERGE_STEP):
        for step in tl.static_range(_MERGE_STEP):
            exists = begin + step + tl.zeros_like(lanes) < segments
            at = first + begin + step
            # Bypasses the L1 cache, which is not coherent.
            scales = scales_in + at * (2 * LANES) + lanes
            other_high = tl.load(scales, mask=exists, other=-float("inf"), cache_modifier=".cg")
            other_weights = tl.load(scales + LANES, mask=exists, other=0.0, cache_modifier=".cg")
            other_sums = tl.load(
                sums_in + at * (GROUP * DIMS) + lanes[:, None] * DIMS + dims[None, :],
                mask=real & exists[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            high, weights, sums = _merge(
                high, weights, sums, other_high, other_weights, other_sums, log2_scale
            )
    return high, weights, sums


@triton.jit(
    do_not_specialize=["query_stride", "table_stride"],
    do_not_specialize_on_alignment=["tables", "rows", "lengths", "arrivals"],
)
def _decode(
    queries,
    keys,
    values,
    tables,
    rows,
    lengths,
    out,
    sums_out,
    scales_out,
    arrivals,
    slopes,
    query_stride,
    table_stride,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    kv_head, batch_row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + batch_row)
    # Padding is computed as one empty tile, and its result is replaced at the end.
    tiles = tl.maximum(tl.cdiv(length, TILE), 1)
    segment_tiles = tl.cdiv(tiles, MAX_SEGMENTS)
    segments = tl.cdiv(tiles, segment_tiles)
    share = tl.maximum(tl.cdiv(segments, tl.num_programs(2)), tl.cdiv(LEAST, segment_tiles))
    if part * share >= segments:
        return
    first = part * share * segment_tiles
    last = tl.minimum(first + share * segment_tiles, tiles)

    log2_scale: tl.constexpr = 1.4426950408889634 * HEAD_DIM**-0.5
    lanes = tl.arange(0, LANES)
    dims = tl.arange(0, DIMS)
    steps = tl.arange(0, TILE)
    heads = kv_head * GROUP + lanes
    real = (lanes < GROUP)[:, None]
    filled = real & (dims < HEAD_DIM)[None, :]
    slope = load_slopes(slopes, heads, lanes < GROUP, HEAD_DIM)
    query = tl.load(
        queries + batch_row.to(tl.int64) * query_stride + heads[:, None] * HEAD_DIM + dims[None, :],
        mask=filled,
        other=0.0,
    )
    table = tables + tl.load(rows + batch_row).to(tl.int64) * table_stride
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    pair = batch_row * KV_HEADS + kv_head
    partial = pair.to(tl.int64) * MAX_SEGMENTS

    high = tl.full([LANES], -float("inf"), tl.float32)
    weights = tl.zeros([LANES], tl.float32)
    sums = tl.zeros([LANES, DIMS], tl.float32)
    all_high, all_weights, all_sums = high, weights, sums
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
        starts = tile % segment_tiles == 0
        high = tl.where(starts, -float("inf"), high)
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
        if ((tile + 1) % segment_tiles == 0) | (tile + 1 == tiles):
            if SPLIT:
                at = partial + tile // segment_tiles
                tl.store(scales_out + at * (2 * LANES) + lanes, high)
                tl.store(scales_out + at * (2 * LANES) + LANES + lanes, weights)
                tl.store(
                    sums_out + at * (GROUP * DIMS) + lanes[:, None] * DIMS + dims[None, :],
                    sums,
                    mask=real,
                )
            else:
                all_high, all_weights, all_sums = _merge(
                    all_high, all_weights, all_sums, high, weights, sums, log2_scale
                )
    if SPLIT:
        # All threads' stores precede the barrier, and the barrier precedes the atomic, which publishes them
        # (release) and makes the others' visible to the last program (acquire).
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu")
        if arrived + 1 < tl.cdiv(segments, share):
            return
        tl.store(arrivals + pair, 0)
        all_high, all_weights, all_sums = _merge_all(
            sums_out, scales_out, partial, segments, real, log2_scale, GROUP, LANES, DIMS
        )
    result = tl.where(length > 0, all_sums / all_weights[:, None], 0.0)
    tl.store(
        out + (batch_row.to(tl.int64) * (KV_HEADS * GROUP) + heads[:, None]) * HEAD_DIM + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=filled,
    )
