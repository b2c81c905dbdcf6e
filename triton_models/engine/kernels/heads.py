"""Heads in the tiles of attention kernels, whose sides are powers of two, and ALiBi's biases of scores."""

import triton
import triton.language as tl


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
