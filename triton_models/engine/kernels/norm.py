"""RMSNorm in one pass over the rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS_PER_WARP = 512


def norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of each row (Zhang and Sennrich, 2019), computed in float32.

    A row's result depends on that row alone. Compiled once for each dtype and width.

    Args:
        hidden: [T, H], contiguous, float32, float16 or bfloat16.
        weight: [H] float32.
        eps: added to the mean square.

    Returns:
        [T, H] in the dtype of `hidden`.
    """
    rows, width = hidden.shape
    normed = torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    warps = max(1, min(16, block // _NUMBERS_PER_WARP))
    _norm[(rows,)](hidden, weight, normed, eps, WIDTH=width, BLOCK=block, num_warps=warps)
    return normed


@triton.jit
def _norm(hidden, weight, normed, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    here = tl.program_id(0).to(tl.int64) * WIDTH + columns
    row = tl.load(hidden + here, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(row * row) / WIDTH + eps)
    scaled = row * scale * factors
    tl.store(normed + here, scaled.to(normed.dtype.element_ty), mask=inside)
