"""A stream entry's `model.py` whose engine breaks when a request asks it to, by its seed.

`python -m bench.gpu.provoke` copies this file into a repository of its own: it runs in Triton's stub, where
the package `bench` need not exist. On a GPU the faults are real. On the CPU what they would do is imitated.
"""

from typing import Any, Final

import torch

from triton_models.engine.batch import Batch
from triton_models.engine.runner import Launched, Runner
from triton_models.serving.stream import TritonPythonModel

__all__ = ["TritonPythonModel"]

MEMORY_SEED: Final = 7_700_000_001
"""The step that computes such a request's prompt finds the device's memory full."""
KERNEL_SEED: Final = 7_700_000_002
"""The step that computes such a request's prompt has a kernel read out of range: the context is lost."""

_SMALLEST: Final = 2**20
_DEMANDED: Final = 2**28
"""Bytes."""


class _Device:
    """What was done to the device."""

    hoard: list[torch.Tensor] = []  # noqa: RUF012 - the process's one
    full = False
    lost = False


_launch, _reset = Runner.launch, Runner.reset


def _faulty_launch(self: Runner, batch: Batch) -> Launched:
    seeds = {chunk.sequence.seed for chunk in batch.prefills}
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
    launched = _launch(self, batch)
    if _Device.full:
        # A small model's step may find room in what the allocator still had.
        torch.empty(_DEMANDED, dtype=torch.uint8, device=device)
    return launched


def _reset_and_free(self: Runner) -> None:
    """What follows a failed step: whoever held the memory lets go of it."""
    _Device.hoard.clear()
    _Device.full = False
    _reset(self)


def _fill(device: torch.device) -> None:
    """Take all memory that is left, down to pieces too small to be of use."""
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
    """Have a kernel index far outside a tensor; the host learns of it later, from whatever it asks next."""
    _Device.lost = True
    if device.type == "cuda":
        one: Any = torch.zeros(1, device=device)
        one.index_select(0, torch.tensor([2**30], device=device))


Runner.launch = _faulty_launch  # type: ignore[method-assign]
Runner.reset = _reset_and_free  # type: ignore[method-assign]
