"""Residual sum and RMSNorm in one pass over the rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine.kernels.overlap import release_next, wait_for_previous

_NUMBERS_PER_WARP = 512


def add_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, overlap: bool = False
) -> Tensor:
    """Add `delta` to `hidden` in place, and return the RMSNorm of the sum (Zhang and Sennrich, 2019).

    The sum is rounded to the dtype before it is normed, and the norm computed in float32, as the plain
    forward pass does it. A row's result depends on nothing but the row.

    Compiled once for each dtype, width, and with or without `delta` and `overlap`.

    Args:
        hidden: [T, H], contiguous, float32, float16 or bfloat16.
        delta: like `hidden`; None adds nothing.
        weight: [H] float32.
        eps: added to the mean square.
        overlap: start before the kernel in front has ended; see `overlap`.

    Returns:
        [T, H] in the dtype of `hidden`.
    """
    rows, width = hidden.shape
    normed = torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        hidden,
        delta,
        weight,
        normed,
        eps,
        WIDTH=width,
        BLOCK=block,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=max(1, min(16, block // _NUMBERS_PER_WARP)),
    )
    return normed


@triton.jit
def _add_norm(
    hidden, delta, weight, normed, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    if OVERLAP:
        release_next()
        wait_for_previous()
    here = tl.program_id(0).to(tl.int64) * WIDTH + columns
    row = tl.load(hidden + here, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        row += tl.load(delta + here, mask=inside, other=0.0).to(tl.float32)
        rounded = row.to(hidden.dtype.element_ty)
        tl.store(hidden + here, rounded, mask=inside)
        row = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row) / WIDTH + eps)
    scaled = row * scale * factors
    tl.store(normed + here, scaled.to(normed.dtype.element_ty), mask=inside)
