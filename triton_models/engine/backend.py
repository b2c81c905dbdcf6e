"""How a device computes: which make of each heavy operation is used, chosen once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from triton_models.engine.attention import PlainOperations
from triton_models.engine.kv_cache import KVCache
from triton_models.engine.layout import ChunkRows, StepLayout
from triton_models.engine.model import CausalModel
from triton_models.engine.operations import Operations
from triton_models.engine.sampler import SamplerInputs, SamplerOutputs, sample

_LEAST_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 in its matrix units."""


class StepOperations(Protocol):
    """Makes the operations of a model's steps, and keeps what these share."""

    def __call__(self, layout: StepLayout) -> Operations:
        """Return the operations of one step."""
        ...

    def tiles(self, chunks: Sequence[ChunkRows]) -> list[tuple[int, int, int, int]]:
        """Cut chunks into what its attention works on, for `StepLayout.tiles`; or []."""
        ...

    def most_tiles(self, rows: int, chunks: int) -> int:
        """Return how many `tiles` the rows of up to `chunks` chunks come to at most, however shared out."""
        ...

    def reset(self) -> None:
        """Forget what a step that failed may have left."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The makes that fit a device."""

    operations: Callable[[CausalModel, KVCache, int], StepOperations]
    """Takes the model, its cache and the largest number of decodes in a step."""
    sample: Callable[[Tensor, SamplerInputs], SamplerOutputs]
    clears_blocks: bool
    """Whether a block must be zeroed as it is handed out: its attention computes with what it then masks."""
    graphs: bool
    """Whether steps are captured as CUDA graphs."""
    overlap: bool
    """Whether the next step is scheduled while the device computes this one."""
    reason: str
    """Why these, for the log."""
    pack: Callable[[Tensor], Tensor] | None = None
    """Lays a matrix out for the products of `operations`; None: it stays as the checkpoint has it."""

    def prepare(self, model: CausalModel) -> None:
        """Lay the matrices of `model` out, if they are to be; again does nothing."""
        if self.pack is not None:
            model.pack(self.pack)


class UncutSteps:
    """`StepOperations` of a make that needs no more than the cache and the step's layout."""

    def __init__(self, make: Callable[[KVCache, StepLayout], Operations], cache: KVCache) -> None:
        self._make = make
        self._cache = cache

    def __call__(self, layout: StepLayout) -> Operations:
        """See `StepOperations`."""
        return self._make(self._cache, layout)

    def tiles(self, chunks: Sequence[ChunkRows]) -> list[tuple[int, int, int, int]]:  # noqa: ARG002 - uncut
        """See `StepOperations`."""
        return []

    def most_tiles(self, rows: int, chunks: int) -> int:  # noqa: ARG002 - uncut
        """See `StepOperations`."""
        return 0

    def reset(self) -> None:
        """See `StepOperations`."""


PLAIN = Backend(
    operations=lambda _model, cache, _rows: UncutSteps(PlainOperations, cache),
    sample=sample,
    clears_blocks=True,
    graphs=False,
    overlap=False,
    reason="plain torch operations",
)


def choose_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Choose what is fast and runs on `device`."""
    if device.type == "cpu":
        # It builds on what is defined here, as does the next one.
        from triton_models.engine.processor_backend import processor_backend  # noqa: PLC0415

        return processor_backend(dtype)
    if device.type != "cuda":
        return PLAIN
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return replace(PLAIN, reason=f"plain torch operations: {device} has compute capability {capability}")
    if find_spec("triton") is None:
        return replace(PLAIN, reason="plain torch operations: the package triton is missing")
    # Not every build of torch brings that compiler, and without a GPU nobody needs it.
    from triton_models.engine.kernel_backend import kernel_backend  # noqa: PLC0415

    return kernel_backend(dtype)
