"""How a device computes: which make of each heavy operation is used, chosen once."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_models.engine.attention import PlainOperations
from triton_models.engine.kv_cache import KVCache
from triton_models.engine.layout import StepLayout
from triton_models.engine.operations import Operations
from triton_models.engine.sampler import SamplerInputs, SamplerOutputs, sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The makes that fit a device."""

    operations: Callable[[KVCache, StepLayout], Operations]
    sample: Callable[[Tensor, SamplerInputs], SamplerOutputs]
    clears_blocks: bool
    """Whether a block must be zeroed as it is handed out: its attention computes with what it then masks."""
    graphs: bool
    """Whether decode steps are captured as CUDA graphs."""
    overlap: bool
    """Whether the next step is scheduled while the device computes this one."""
    reason: str
    """Why these, for the log."""


PLAIN = Backend(
    operations=PlainOperations,
    sample=sample,
    clears_blocks=True,
    graphs=False,
    overlap=False,
    reason="plain torch operations",
)


def choose_backend(device: torch.device, dtype: torch.dtype) -> Backend:  # noqa: ARG001 - until kernels are chosen
    """Choose what is fast and runs on `device`."""
    return PLAIN
