"""A `model.py` for an entry whose engine breaks when a request has one of two special seeds.

`python -m bench.gpu.provoke` copies this file into a separate repository: it runs in Triton's stub, where the
package `bench` need not exist. On a GPU the faults are real; on the CPU their effects are imitated.
"""

from typing import Any, Final

import torch

from triton_models.engine.runner import Runner
from triton_models.engine.step import Step
from triton_models.serving.model import TritonPythonModel

__all__ = ["TritonPythonModel"]

MEMORY_SEED: Final = 7_700_000_001
"""With this seed, the step that computes the request's prompt finds the device's memory full."""
KERNEL_SEED: Final = 7_700_000_002
"""With this seed, a kernel reads out of range in the step that computes the prompt: CUDA's context is
lost."""

_SMALLEST: Final = 2**20
_DEMANDED: Final = 2**28
"""Both in bytes."""


class _Device:
    """The faults that the device has at present."""

    hoard: list[torch.Tensor] = []  # noqa: RUF012 - the process's one
    full = False
    lost = False


_begin, _reset = Runner.begin, Runner.reset


def _faulty_begin(self: Runner, step: Step) -> None:
    seeds = {chunk.sequence.seed for chunk in step.prefills}
    device = self._model.device
    if MEMORY_SEED in seeds:
        _fill(device)
    if KERNEL_SEED in seeds:
        _read_out_of_range(device)
    if device.type != "cuda":
        if _Device.full:
            raise torch.OutOfMemoryError("provoked: the device's memory is full")
        if _Device.lost:
            raise RuntimeError("provoked: an illegal memory access was encountered")
    _begin(self, step)
    if _Device.full:
        # A small model's step may fit into memory that the allocator had kept.
        torch.empty(_DEMANDED, dtype=torch.uint8, device=device)


def _reset_and_free(self: Runner) -> None:
    """Replaces `Runner.reset`, which follows a failed step: also frees the memory that was taken."""
    _Device.hoard.clear()
    _Device.full = False
    _reset(self)


def _fill(device: torch.device) -> None:
    """Take all free memory, except for pieces that are too small to be useful."""
    _Device.full = True
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    size = torch.cuda.mem_get_info(device)[0]
    while size >= _SMALLEST:
        try:
            _Device.hoard.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2


def _read_out_of_range(device: torch.device) -> None:
    """Let a kernel read far outside a tensor; the host learns of it later, from its next CUDA call."""
    _Device.lost = True
    if device.type == "cuda":
        one: Any = torch.zeros(1, device=device)
        one.index_select(0, torch.tensor([2**30], device=device))


Runner.begin = _faulty_begin  # type: ignore[method-assign]
Runner.reset = _reset_and_free  # type: ignore[method-assign]
