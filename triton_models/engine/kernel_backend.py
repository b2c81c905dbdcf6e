"""The backend for CUDA: our own kernels, captured steps, and host and device working in parallel."""

import torch
from torch import Tensor

from triton_models.engine.backend import Backend
from triton_models.engine.kernel_operations import KernelSteps
from triton_models.engine.kernels.sampling import choose
from triton_models.engine.kernels.truncation import Truncation
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
    return sample(logits, inputs, _choose)


def _choose(logits: Tensor, inputs: SamplerInputs) -> Tensor:
    truncation = None
    if inputs.truncated.numel():
        truncation = Truncation(inputs.truncated, inputs.top_k, inputs.top_p, inputs.min_p)
    return choose(
        logits,
        temperatures=inputs.temperatures,
        seeds=inputs.seeds,
        counters=inputs.counters,
        truncation=truncation,
    )
