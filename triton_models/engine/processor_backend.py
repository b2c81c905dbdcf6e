"""The backend for CPUs: few torch operators per step, and prepacked weight matrices."""

import torch

from triton_models.engine.backend import Backend, UncutSteps
from triton_models.engine.packed_weights import pack, why_not_packed
from triton_models.engine.processor_operations import ProcessorOperations
from triton_models.engine.sampler import sample


def processor_backend(dtype: torch.dtype) -> Backend:
    """Return the backend for this CPU."""
    obstacle = why_not_packed(dtype)
    matrices = "packed matrices" if obstacle is None else f"matrices as they are ({obstacle})"
    return Backend(
        operations=lambda _model, cache, _rows: UncutSteps(ProcessorOperations, cache),
        sample=sample,
        clears_blocks=True,
        graphs=False,
        overlap=False,
        reason=f"torch operations for the processor, {matrices}, {dtype}",
        pack=pack if obstacle is None else None,
    )
