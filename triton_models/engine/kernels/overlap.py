"""Kernels that start while the one in front of them still runs: programmatic dependent launch.

A kernel launched so (`launch_pdl=True`, compute capability 9.0 on) starts as soon as every program of the one
in front has called `release_next` or ended, and there is room. It waits for the other's end, and its stores,
in `wait_for_previous`. Every overlapped kernel calls that before it touches anything but weights; so whoever
waits has waited for all that came before, however many kernels run at once.
"""

import triton
import triton.language as tl


@triton.jit
def release_next():
    """Let the next kernel start; it gets what room is left."""
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Wait until the kernel in front has ended."""
    tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_to_cache(pointers, size):
    """Ask for `size` bytes behind each pointer to be brought to the second-level cache, and go on.

    Sizes and addresses are multiples of 16.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
