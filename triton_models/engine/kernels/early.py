"""Launches that begin before the one in front has ended: the device prepares them meanwhile.

CUDA calls it programmatic dependent launch, and has it from Hopper on (CUDA C++ Programming Guide,
"Programmatic Dependent Launch and Synchronization"). It is worth 1 % of a step of few rows, whose kernels are
short, and nothing of others (bench/LOG.md).
"""

import torch
import triton
import triton.language as tl

_HOPPER = (9, 0)
_FEW_ROWS = 32


def _known() -> bool:
    """Return whether all devices know it, whichever the model is on."""
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))) >= _HOPPER


_KNOWN = _known()
_WAITS: tl.constexpr = tl.constexpr(_KNOWN)


def early(rows: int) -> dict[str, bool]:
    """Return options for the launch of a kernel that begins with `wait_for_inputs`, of so many rows."""
    return {"launch_pdl": True} if _KNOWN and rows <= _FEW_ROWS else {}


@triton.jit
def wait_for_inputs():
    """Wait for the launch in front; every program does, before it reads anything."""
    if _WAITS:
        tl.extra.cuda.gdc_wait()
