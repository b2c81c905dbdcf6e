"""Products with weight matrices of 8 or 4 bits a weight, stored in the order in which matrix units take them.

A tile is 64 rows by 128 columns (`GROUP`). A thread's part of it lies together, so that weights go from
memory to registers in reads of 16 bytes, and become numbers of the dtype of `x` there, without a conversion
instruction. Scales and zeros are applied to float32 sums.

As in `kernels.linear`, K may be split among programs, and a row's result depends on that row alone; but with
4 bits, more than 32 rows are rounded differently. More rows than `MAX_ROWS` are for a library's products, of
weights that are written out a few at a time.
"""

from dataclasses import replace
from functools import partial
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from triton_models.engine.kernels.early import wait_for_inputs
from triton_models.engine.kernels.linear import Tiling, combine, launch, splits_for
from triton_models.engine.kernels.rows import (
    BLOCK,
    NOTHING,
    Rows,
    load_marks,
    load_squares,
    norm_factors,
    padded_blocks,
)
from triton_models.engine.linear import Linear
from triton_models.engine.quantised import GROUP, Int4Linear, Int8Linear, product_by_parts

MAX_ROWS: Final = 512
"""Most rows of `x`: with more, a library's products are faster (bench/LOG.md)."""

TILE: Final = 64
"""Rows of a tile: what the matrix units take at once."""

_OFFSETS = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400}
"""Twice a power of two, 128 or 1,024: with an integer in its last seven bits, it is the power plus that."""

_MIN_ROWS, _MOST_ROWS = 16, 128
"""The fewest rows that the matrix units take, and the most that a program multiplies its weights with."""
_FEW_ROWS = 32
"""Up to so many rows, reading the weights takes longest; with more, arithmetic does."""
_MULTIPROCESSORS = 132
"""Of a large GPU."""
_AT_ONCE = range(3, 6)
"""Programs that such a one runs at once, where they wait much."""
_BLOCK: tl.constexpr = tl.constexpr(BLOCK)
_NIBBLE: Final = 4
"""Bits of the smaller numbers."""
_PACKED_WEIGHTS = 2**23
"""Most weights that are rearranged at once."""
_EXPANDED_WEIGHTS = 2**24
"""Most weights that are written out at once: 32 MB in 16 bits, which stay in a large GPU's cache."""


class TiledLinear(Linear):
    """The matrix of an `Int8Linear` or `Int4Linear`, of a dtype in 16 bits, in tiles.

    `weight` is int32, [tiles, groups, words]. A word of a tile belongs to a row and, of each half of 64
    columns (8 bits) or quarter of 32 (4 bits), to two neighbours: the first in its low 16 bits.

    * 8 bits: half j is in bits 8 j to 8 j + 7, as int8. `scales` is [rows], bfloat16.
    * 4 bits: quarter j is in bits 4 j to 4 j + 3. `scales` is [tiles, groups, 64] int32: bfloat16 scale and,
      in the high half, zero.

    Rows of the last tile that are none of the matrix, and columns of the last group, count for nothing.
    """

    def __init__(self, matrix: Int8Linear | Int4Linear) -> None:
        rows = len(matrix.weight)
        self.rows, self.columns, self.dtype = rows, matrix.columns, matrix.dtype
        self.bits = _NIBBLE if isinstance(matrix, Int4Linear) else 8
        self.tiles, self.groups = -(-rows // TILE), -(-self.columns // GROUP)
        device = matrix.weight.device
        weight = torch.empty(
            (self.tiles, self.groups, TILE * GROUP * self.bits // 32), dtype=torch.int32, device=device
        )
        step = max(1, _PACKED_WEIGHTS // (TILE * GROUP * self.groups))
        for tile in range(0, self.tiles, step):
            numbers = matrix.weight[tile * TILE : (tile + step) * TILE]
            numbers = functional.pad(numbers, (0, 0, 0, -len(numbers) % TILE))
            words = _words_of_4(numbers) if self.bits == _NIBBLE else _words_of_8(numbers, self.groups)
            weight[tile : tile + step] = _in_order(words)
        super().__init__(weight, matrix.bias)
        padding = self.tiles * TILE - rows
        if self.bits == _NIBBLE:
            both = functional.pad(matrix.scales.bfloat16(), (0, 0, 0, padding)).view(torch.int32)[..., 0]
            self.scales = both.view(self.groups, self.tiles, TILE).transpose(0, 1).contiguous()
        else:
            self.scales = functional.pad(matrix.scales, (0, padding))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return `inputs @ weight.T + bias` by a library, of a few weights at a time: [T, K] gives [T, N]."""
        step = max(1, _EXPANDED_WEIGHTS // (TILE * self.columns)) * TILE
        product = product_by_parts(inputs, partial(expand, self), range(0, self.rows, step))
        return product if self.bias is None else product.add_(self.bias)


def tiled(matrix: Linear) -> Linear:
    """Return the matrix in tiles, if it is one of 8 or 4 bits for a model in 16 bits; otherwise, itself."""
    if isinstance(matrix, Int8Linear | Int4Linear) and matrix.dtype in _OFFSETS:
        return TiledLinear(matrix)
    return matrix


def tiling_for(outputs: int, keys: int, *, late: bool = False) -> Tiling:
    """Return the constants for a weight of N `outputs` and K `keys`.

    Since they round, they are the same for any number of rows; but not with 4 bits, where few rows are
    multiplied in another way (`late`), which waits more and needs more programs beside it.
    """
    tiles, groups = triton.cdiv(outputs, TILE), triton.cdiv(keys, GROUP)
    if late:
        return Tiling(block_n=TILE, block_k=GROUP, splits=_late_splits(tiles, groups), warps=4, stages=3)
    return Tiling(block_n=TILE, block_k=GROUP, splits=splits_for(tiles), warps=4, stages=4)


def _late_splits(tiles: int, groups: int) -> int:
    """Return the splits with which the busiest of a large GPU's multiprocessors has the fewest groups.

    It has three to five programs at once: the best found on an H200 (bench/LOG.md).
    """

    def programs(splits: int) -> int:
        return -(-splits * tiles // _MULTIPROCESSORS)

    fitting = [splits for splits in range(1, groups + 1) if programs(splits) in _AT_ONCE]
    return min(fitting, key=lambda splits: programs(splits) * -(-groups // splits), default=splits_for(tiles))


def takes_sums(matrix: TiledLinear, rows: int) -> bool:
    """Return whether a product of so many rows needs their blocks' sums.

    It does where scales and zeros are applied to sums of products instead of weights: of few rows.
    """
    return matrix.bits == _NIBBLE and rows <= _FEW_ROWS


def tiled_linear(
    x: Rows,
    matrix: TiledLinear,
    *,
    arrivals: Tensor,
    residual: Tensor | None = None,
    gated: bool = False,
    tiling: Tiling | None = None,
    ahead: Rows | None = None,
) -> Tensor:
    """Return `matrix(x)`; or add it to `residual` in place; or, gated, silu(gate) * up of it.

    Compiled as `kernels.linear.linear` is, for 16, 32, 64 or 128 rows.

    Args:
        x: [M, K], in the dtype of the matrix, with sums if it `takes_sums`; M is at most `MAX_ROWS`.
        matrix: [N, K]; gated: [2 * N, K], the gate first, and N is a multiple of `TILE`.
        arrivals: from `kernels.linear.new_arrivals`.
        residual: [M, N], contiguous, in the dtype of `x`; not if gated.
        gated: `swiglu` of the product.
        tiling: how to divide the work: `splits`, `warps` and `stages`. None: the choice of `tiling_for`.
        ahead: written as well: the result as the next product takes it; with a norm only beside a residual.

    Returns:
        [M, N] in the dtype of `x`; `residual` itself where it is given.

    Raises:
        ValueError: more rows than `MAX_ROWS`, more split tiles than counters, or half a tile is gated.
    """
    numbers = x.numbers
    rows = len(numbers)
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows are more than {MAX_ROWS}")
    outputs = matrix.rows // 2 if gated else matrix.rows
    if gated and outputs % TILE:
        raise ValueError(f"{outputs} gated outputs are no multiple of {TILE}")
    out = residual
    if out is None:
        out = numbers.new_empty((rows, outputs)) if ahead is None else ahead.numbers
    tiles = triton.cdiv(outputs, TILE)
    block_m = min(_MOST_ROWS, max(_MIN_ROWS, triton.next_power_of_2(rows)))
    late = takes_sums(matrix, rows)
    tiling = tiling or tiling_for(outputs, matrix.columns, late=late)
    if block_m > _FEW_ROWS:
        # The rows of x take the room of the weights of one more stage.
        tiling = replace(tiling, stages=min(tiling.stages, 3))
    parts = triton.cdiv(rows, block_m)
    partials = None
    if tiling.splits > 1:
        if parts * tiles > len(arrivals):
            raise ValueError(f"{parts * tiles} split tiles are more than {len(arrivals)} counters")
        shape = (parts * tiles, tiling.splits, 1 + gated, block_m, TILE)
        partials = torch.empty(shape, dtype=torch.float32, device=numbers.device)
    launch(
        _tiled[parts, tiles, tiling.splits],
        tiling,
        rows,
        (
            numbers,
            x.sums,
            matrix.weight,
            matrix.scales,
            matrix.bias,
            out,
            partials,
            arrivals,
            rows,
            _OFFSETS[numbers.dtype],
            x.squares,
            x.epsilon,
            NOTHING if ahead is None else ahead.written(),
        ),
        OUTPUTS=outputs,
        KEYS=matrix.columns,
        BLOCKS=padded_blocks(matrix.columns),
        BITS=matrix.bits,
        BLOCK_M=block_m,
        LATE=late,
        GATED=gated,
        ADD=residual is not None,
    )
    return out


def expand(matrix: TiledLinear, start: int, stop: int) -> Tensor:
    """Return the weights of rows `start`, a multiple of `TILE`, to `stop` - 1 or the last: [n, K]."""
    stop = min(stop, matrix.rows)
    out = torch.empty((stop - start, matrix.columns), dtype=matrix.dtype, device=matrix.weight.device)
    _expand[triton.cdiv(stop - start, TILE), matrix.groups](
        matrix.weight[start // TILE :],
        matrix.scales[start // TILE if matrix.bits == _NIBBLE else start :],
        out,
        stop - start,
        _OFFSETS[matrix.dtype],
        KEYS=matrix.columns,
        BITS=matrix.bits,
    )
    return out


def _words_of_4(pairs: Tensor) -> Tensor:
    """Return rows of an `Int4Linear`, [n, groups * 64] uint8, as words in plain order: [n, groups, 16]."""
    pairs = pairs.view(len(pairs), -1, GROUP // 2).int()
    numbers = torch.cat((pairs & 15, pairs >> 4), dim=-1).view(len(pairs), -1, 4, 16, 2)
    words = torch.zeros_like(numbers[:, :, 0, :, 0])
    for quarter in range(4):
        for neighbour in range(2):
            words |= numbers[:, :, quarter, :, neighbour] << (4 * quarter + 16 * neighbour)
    return words


def _words_of_8(numbers: Tensor, groups: int) -> Tensor:
    """Return rows of an `Int8Linear`, [n, K] int8, as words in plain order: [n, groups, 32]."""
    numbers = functional.pad(numbers, (0, groups * GROUP - numbers.shape[1]))
    numbers = numbers.view(len(numbers), groups, 2, 32, 2).int()
    words = torch.zeros_like(numbers[:, :, 0, :, 0])
    for half in range(2):
        for neighbour in range(2):
            words |= (numbers[:, :, half, :, neighbour] & 255) << (8 * half + 16 * neighbour)
    return words


def _in_order(words: Tensor) -> Tensor:
    """Return words [64 * tiles, groups, 8 * blocks] in the order in which threads take them.

    Four warps have 16 rows of a tile each. Of each 16 columns, a thread takes two neighbours, and the two
    eight columns on, of two rows that are eight apart (the fragment A of PTX's `mma.m16n8k16` and
    `wgmma.m64nNk16`): four words, which follow each other here.
    """
    rows, groups, width = words.shape
    # Tile, warp, one of two rows, row, group, block of 16 columns, one of two eights, two neighbours.
    places = words.view(rows // TILE, 4, 2, 8, groups, width // 8, 2, 4)
    return places.permute(0, 4, 5, 1, 3, 7, 2, 6).reshape(rows // TILE, groups, TILE * width)


@triton.jit(do_not_specialize=["rows", "offset"])
def _tiled(
    x,
    x_sums_of,
    weight,
    scales,
    bias,
    out,
    partials,
    arrivals,
    rows,
    offset,
    squares,
    epsilon,
    ahead,
    OUTPUTS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    LATE: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
):
    wait_for_inputs()
    # Programs that share weights run together, and find them in the cache.
    part = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    m = part * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    parts = load_squares(squares, m, rows, KEYS, BLOCKS)
    groups: tl.constexpr = (KEYS + BLOCK_K - 1) // BLOCK_K
    turns: tl.constexpr = (groups + SPLITS - 1) // SPLITS
    words: tl.constexpr = BLOCK_N * BLOCK_K * BITS // 32
    first = split * turns
    weight += tile.to(tl.int64) * (groups * words)
    # From a tile of the gate to that of what it gates.
    up: tl.constexpr = (OUTPUTS // BLOCK_N) * groups
    here = (m < rows)[None, :]
    x_row = x + m[None, :] * KEYS
    # Sums are [N, M]: the weights are the operand that the matrix units take from registers.
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up_sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    # With 4 bits, a group's scales are read one turn ahead.
    scales += tile * BLOCK_N * (groups if BITS == 4 else 1) + n  # noqa: PLR2004
    up_scales = scales + OUTPUTS * (groups if BITS == 4 else 1)  # noqa: PLR2004
    scale = n
    up_scale = n
    if BITS == 4:  # noqa: PLR2004
        group = tl.minimum(first, groups - 1)
        scale = tl.load(scales + group * BLOCK_N)
        if GATED:
            up_scale = tl.load(up_scales + group * BLOCK_N)
    x_sums = _group_sums(x_sums_of, m, first, KEYS)
    for turn in range(turns):
        keys = (first + turn) * BLOCK_K + k
        x_part = tl.load(x_row + keys[:, None], mask=(keys < KEYS)[:, None] & here, other=0.0)
        # Turns beyond the last group multiply its weights by zeros.
        group = tl.minimum(first + turn, groups - 1)
        following = tl.minimum(group + 1, groups - 1)
        place = weight + group * words
        sums = _add_group(sums, place, scale, offset, x_part, x_sums, LATE, BITS)
        if BITS == 4:  # noqa: PLR2004
            scale = tl.load(scales + following * BLOCK_N)
        if GATED:
            place = weight + (up + group) * words
            up_sums = _add_group(up_sums, place, up_scale, offset, x_part, x_sums, LATE, BITS)
            if BITS == 4:  # noqa: PLR2004
                up_scale = tl.load(up_scales + following * BLOCK_N)
        x_sums = _group_sums(x_sums_of, m, first + turn + 1, KEYS)
    if BITS == 8:  # noqa: PLR2004
        sums *= tl.load(scales).to(tl.float32)[:, None]
        if GATED:
            up_sums *= tl.load(up_scales).to(tl.float32)[:, None]
    if squares is not None:
        factors = norm_factors(parts, epsilon, KEYS)[None, :]
        sums *= factors
        up_sums *= factors
    combine(
        tl.trans(sums),
        tl.trans(up_sums),
        bias,
        out,
        ahead,
        partials,
        arrivals,
        part * tl.num_programs(1) + tile,
        split,
        m,
        tile * BLOCK_N + n,
        rows,
        OUTPUTS,
        BLOCK_M,
        BLOCK_N,
        SPLITS,
        GATED,
        ADD,
    )


@triton.jit
def _group_sums(marks, m, group, COLUMNS: tl.constexpr):
    """Return the sums of x in a group, [M]: of two blocks. Without marks, or beyond them, they are zeros."""
    sums = tl.zeros(m.shape, dtype=tl.float32)
    if marks is not None:
        blocks: tl.constexpr = (COLUMNS + _BLOCK - 1) // _BLOCK
        first = load_marks(marks, m, 2 * group, COLUMNS, _BLOCK)
        second = load_marks(marks, m, 2 * group + 1, COLUMNS, _BLOCK)
        sums = tl.where(2 * group < blocks, first, 0.0) + tl.where(2 * group + 1 < blocks, second, 0.0)
    return sums


@triton.jit
def _add_group(sums, place, scales, offset, x_part, x_sums, LATE: tl.constexpr, BITS: tl.constexpr):
    """Add a group's products: with weights of 4 bits or, without their scales, numbers of 8.

    `LATE`: with few rows, numbers of 4 bits are multiplied as they are, and the sums of x take their offset
    back. With many, they get their scales and zeros first: that takes longer, but not for each row.
    """
    weights = _weights(place, scales, offset, x_part.dtype, LATE, BITS, sums.shape[0])
    if LATE:
        scale, zero = _scale_and_zero(scales[:, None])
        zero -= (8 + (128 if x_part.dtype == tl.bfloat16 else 1024)) * scale
        sums = sums + tl.dot(weights, x_part) * scale + x_sums[None, :] * zero
    else:
        sums = tl.dot(weights, x_part, sums)
    return sums


@triton.jit
def _scale_and_zero(both):
    """Return the two bfloat16 of a number as float32: the first is in its low half."""
    return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _weights(
    place, scales, offset, dtype: tl.constexpr, RAW: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr
):
    """Return a tile as [ROWS, 128] of `dtype`: weights of 4 bits, their q with its offset (raw), or int8.

    `scales`: [ROWS], bfloat16 scale and, in the high half, zero. `offset`: that of `_OFFSETS`. Since the
    compiler does not know it, it stays in a register, and `(words & mask) | offset` is one instruction.
    """
    blocks: tl.constexpr = BITS // 2
    words = tl.load(place + tl.arange(0, ROWS * 8 * blocks)).to(tl.uint32, bitcast=True)
    words = tl.reshape(words, (blocks, ROWS // 16, 8, 4, 2, 2))
    # From `_in_order` back to rows and columns; with these, each thread has what it needs already.
    words = tl.reshape(tl.permute(words, (1, 4, 2, 0, 5, 3)), (ROWS, 8 * blocks))
    offset = offset.to(tl.uint32)
    if BITS == 4:  # noqa: PLR2004
        a = _quarter(words, scales, offset, dtype, RAW)
        b = _quarter(words >> 4, scales, offset, dtype, RAW)
        c = _quarter(words >> 8, scales, offset, dtype, RAW)
        d = _quarter(words >> 12, scales, offset, dtype, RAW)
        parts = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 3, 4, 1, 2))
    else:
        halves = tl.join(_half(words, offset, dtype), _half(words >> 8, offset, dtype))
        parts = tl.permute(halves, (0, 3, 1, 2))
    return tl.reshape(parts, (ROWS, 128))


@triton.jit
def _quarter(words, scales, offset, dtype: tl.constexpr, RAW: tl.constexpr):
    """Return the weights of q in bits 0 to 3 and 16 to 19, (q - 8) * scale + zero; raw, q with its offset."""
    weights = _neighbours((words & 0x000F000F) | offset, dtype)
    if not RAW:
        middle: tl.constexpr = 8 + (128 if dtype == tl.bfloat16 else 1024)
        weights -= tl.full(weights.shape, middle, tl.float32).to(dtype)
        if dtype == tl.bfloat16:
            scale = scales.to(tl.uint16).to(tl.bfloat16, bitcast=True)[:, None, None]
            zero = (scales >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)[:, None, None]
            # One rounding, and two weights an instruction.
            weights = tl.fma(
                weights, tl.broadcast_to(scale, weights.shape), tl.broadcast_to(zero, weights.shape)
            )
        else:
            scale, zero = _scale_and_zero(scales[:, None, None])
            weights = (weights.to(tl.float32) * scale + zero).to(dtype)
    return weights


@triton.jit
def _half(words, offset, dtype: tl.constexpr):
    """Return the int8 in bits 0 to 7 and 16 to 23: the last seven bits, less 128 where bit 7 is set."""
    sign = _neighbours((words & 0x00800080) | offset, dtype)
    return _neighbours((words & 0x007F007F) | offset, dtype) - sign


@triton.jit
def _neighbours(words, dtype: tl.constexpr):
    """Return the two numbers of `dtype` in each word: [n, words, 2]."""
    low = words.to(tl.uint16).to(dtype, bitcast=True)
    return tl.join(low, (words >> 16).to(tl.uint16).to(dtype, bitcast=True))


@triton.jit(do_not_specialize=["rows", "offset"])
def _expand(weight, scales, out, rows, offset, KEYS: tl.constexpr, BITS: tl.constexpr):
    tile = tl.program_id(0)
    group = tl.program_id(1)
    groups: tl.constexpr = (KEYS + 127) // 128
    dtype: tl.constexpr = out.dtype.element_ty
    n = tl.arange(0, 64)
    number = tile.to(tl.int64) * groups + group
    place = weight + number * (256 * BITS)
    if BITS == 4:  # noqa: PLR2004
        weights = _weights(
            place, tl.load(scales + number * 64 + n), offset, dtype, RAW=False, BITS=BITS, ROWS=64
        )
    else:
        weights = _weights(place, n, offset, dtype, RAW=False, BITS=BITS, ROWS=64).to(tl.float32)
        weights *= tl.load(scales + tile * 64 + n).to(tl.float32)[:, None]
    row = tile * 64 + n
    k = group * 128 + tl.arange(0, 128)
    here = out + row.to(tl.int64)[:, None] * KEYS + k[None, :]
    tl.store(here, weights.to(dtype), mask=(row < rows)[:, None] & (k < KEYS)[None, :])
