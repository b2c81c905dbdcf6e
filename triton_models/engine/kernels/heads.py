"""Heads in the tiles of kernels, whose sides are powers of two: loads, rotation, stores; ALiBi's biases."""

import triton
import triton.language as tl
from torch import Tensor

Scales = tuple[Tensor, Tensor, Tensor | None] | tuple[None, None, None]
"""What is left to be done to a product in 8 bits: the rows' scales, [M] float32, the columns', [N] float32,
and the bias, [N], if there is one. Or nothing."""

SCALED: Scales = (None, None, None)
"""Nothing is left."""


def padded(size: int) -> int:
    """Return a size with what fills it up to what `dot` takes: a power of two of at least 16."""
    return max(16, 1 << (size - 1).bit_length())


@triton.jit
def load_heads(cache, places, inside, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, MASKED: tl.constexpr):
    """Return the heads at `places` of a cache, [places, DIMS]: zeros beyond HEAD_DIM.

    If MASKED, also zeros instead of what is not `inside`. Heads that fill their tile are loaded without a
    mask of theirs, which would cost time.
    """
    dims = tl.arange(0, DIMS)[None, :]
    here = cache + places[:, None] + dims
    if DIMS != HEAD_DIM:
        filled = dims < HEAD_DIM
        if MASKED:
            filled = filled & inside[:, None]
        heads = tl.load(here, mask=filled, other=0.0)
    elif MASKED:
        heads = tl.load(here, mask=inside[:, None], other=0.0)
    else:
        heads = tl.load(here)
    return heads


@triton.jit
def load_projected(projected, columns, inside, scales):
    """Return a token's numbers at `columns` of what its layer projected; zeros if not `inside`.

    `scales`: see `Scales`, those of rows from this token on.
    """
    numbers = tl.load(projected + columns, mask=inside, other=0.0)
    if scales[0] is not None:
        wide = numbers.to(tl.float32)
        by = tl.load(scales[1] + columns, mask=inside, other=0.0) * tl.load(scales[0])
        if scales[2] is None:
            wide *= by
        else:
            wide = tl.fma(wide, by, tl.load(scales[2] + columns, mask=inside, other=0.0).to(tl.float32))
        numbers = wide.to(numbers.dtype)
    return numbers


@triton.jit
def load_angles(table, position, PAIRS: tl.constexpr, DIMS: tl.constexpr):
    """Return a position's row of a rotary table, [1, DIMS / 2]: zeros beyond PAIRS."""
    pairs = tl.arange(0, DIMS // 2)
    return tl.load(table + position * PAIRS + pairs, mask=pairs < PAIRS, other=0.0)[None, :]


@triton.jit
def rotate(heads, cosine, sine, PAIRS: tl.constexpr):
    """Return heads, [N, DIMS], of which the first PAIRS interleaved pairs are rotated, in float32.

    `cosine` and `sine`: from `load_angles`. Who calls this is compiled without `enable_fp_fusion`, so that
    each product and sum is rounded separately.
    """
    size: tl.constexpr = heads.shape[0]
    width: tl.constexpr = heads.shape[1]
    even, odd = tl.split(heads.to(tl.float32).reshape(size, width // 2, 2))
    turned_even, turned_odd = even * cosine - odd * sine, odd * cosine + even * sine
    # Not `join`: of operands that it made, the compiler has threads hold other numbers, in more registers.
    is_odd = tl.arange(0, 2)[None, None, :] > 0
    turned = tl.where(is_odd, turned_odd[:, :, None], turned_even[:, :, None]).reshape(size, width)
    # What is not rotated is kept, since a sine of 0 would not cancel an infinite neighbour.
    return tl.where(tl.arange(0, width)[None, :] < 2 * PAIRS, turned.to(heads.dtype), heads)


@triton.jit
def store_new(
    query,
    projected,
    scales,
    cos,
    sin,
    keys,
    values,
    table,
    position,
    ends,
    kv_head,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Return a new token's queries rotated; store its key and value if the program `ends` with this token.

    `projected`, `scales`: of the token, see `load_projected`. `keys`, `values`: the KV head in the cache.
    """
    # All loads come before the first use of any, so that their latencies overlap. The key and the value are
    # two rows, so that one thread has a pair of numbers.
    rows = tl.arange(0, 2)[:, None]
    dims = tl.arange(0, DIMS)[None, :]
    stored = (dims < HEAD_DIM) & ends
    columns = (QUERY_HEADS + kv_head + rows * KV_HEADS) * HEAD_DIM + dims
    new = load_projected(projected, columns, stored, scales)
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    rotated = new
    if cos is not None:
        cosine = load_angles(cos, position, PAIRS, DIMS)
        sine = load_angles(sin, position, PAIRS, DIMS)
        rotated = rotate(new, cosine, sine, PAIRS)
        query = rotate(query, cosine, sine, PAIRS)
    here = (block * BLOCK_SIZE + position % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM) + dims + rows * 0
    tl.store(keys + here, rotated, mask=stored & (rows == 0))
    tl.store(values + here, new, mask=stored & (rows == 1))
    # No other program reads the new token's place, but other threads of this one do.
    tl.debug_barrier()
    return query


@triton.jit
def load_slopes(slopes, heads, real, HEAD_DIM: tl.constexpr):
    """Return the slopes of `heads` for scores that are not scaled yet; None if there are none."""
    scaled = None
    if slopes is not None:
        scaled = tl.load(slopes + heads, mask=real, other=0.0) * HEAD_DIM**0.5
    return scaled


@triton.jit
def lean(scores, slopes, distances):
    """Return scores, [rows, keys], less what the rows' slopes take at these distances, which are negative."""
    if slopes is not None:
        steepness = tl.broadcast_to(slopes[:, None], scores.shape)
        scores = tl.fma(steepness, tl.broadcast_to(distances.to(tl.float32), scores.shape), scores)
    return scores
