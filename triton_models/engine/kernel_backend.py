"""The backend for CUDA: our own kernels, captured steps, and host and device working in parallel."""

import torch
from torch import Tensor

from triton_models.engine.backend import Backend
from triton_models.engine.kernel_operations import KernelSteps
from triton_models.engine.kernels.sampling import choose
from triton_models.engine.sampler import SamplerInputs, SamplerOutputs, sample


def kernel_backend(dtype: torch.dtype) -> Backend:
    """Return the backend for a GPU that runs the kernels."""
    return Backend(
        operations=KernelSteps,
        sample=_sample,
        clears_blocks=False,
        graphs=True,
        overlap=True,
        reason=f"own kernels, CUDA graphs and overlapped steps, {dtype}",
    )


def _sample(logits: Tensor, inputs: SamplerInputs) -> SamplerOutputs:
    return sample(logits, inputs, choose)
