"""Launches that begin before the one in front has ended: the device prepares them meanwhile.

CUDA calls it programmatic dependent launch, and has it from Hopper on (CUDA C++ Programming Guide,
"Programmatic Dependent Launch and Synchronization"). It is worth 1 % of a step of few rows, whose kernels are
short, 3 % more with weights of 8 bits, and nothing of other steps (bench/LOG.md).
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


@triton.jit
def let_next_begin():
    """Have the next launch begin now instead of when this one ends, and wait for its inputs then.

    For a launch of few programs. Beside many, the next one's would be crowded on the first multiprocessors to
    have room.
    """
    if _WAITS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(places):
    """Have the cache lines, of 128 bytes, that hold these places brought into the device's cache.

    While a program waits for a short launch in front, the memory is idle. Only a little has the time to come;
    more would be in the way of what is read in order (bench/LOG.md).
    """
    if _WAITS:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            args=[places.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
