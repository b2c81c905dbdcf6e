"""SwiGLU's gate (Shazeer, "GLU Variants Improve Transformer", 2020)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_WARPS = 4


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(first half) * second half of each row.

    silu is rounded to the dtype before the product, as in the plain forward pass.

    Compiled once for each dtype and width.

    Args:
        gate_up: [T, 2 * F], contiguous, float32, float16 or bfloat16.

    Returns:
        [T, F] in the same dtype.
    """
    rows, both = gate_up.shape
    width = both // 2
    gated = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[rows, triton.cdiv(width, _BLOCK)](gate_up, gated, WIDTH=width, BLOCK=_BLOCK, num_warps=_WARPS)
    return gated


@triton.jit
def silu_times(gate, up):
    """Return silu(gate) * up; silu and the product are rounded to the dtype that both have."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(up.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(up.dtype)


@triton.jit
def _swiglu(gate_up, gated, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    here = gate_up + row * (2 * WIDTH) + columns
    gate = tl.load(here, mask=inside, other=0.0)
    up = tl.load(here + WIDTH, mask=inside, other=0.0)
    tl.store(gated + row * WIDTH + columns, silu_times(gate, up), mask=inside)
