"""Backends: which implementation of each expensive operation a device uses, chosen once."""

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
"""Ampere: the first generation whose matrix units support bfloat16."""


class StepOperations(Protocol):
    """Creates the `Operations` of each step of a model, and keeps the state that they share."""

    def __call__(self, layout: StepLayout) -> Operations:
        """Return the operations of one step."""
        ...

    def tiles(self, chunks: Sequence[ChunkRows]) -> list[tuple[int, int, int, int]]:
        """Divide chunks into the tiles that attention works on, for `StepLayout.tiles`; [] if it has none."""
        ...

    def most_tiles(self, rows: int, chunks: int) -> int:
        """Return the most `tiles` that `rows` rows need, however divided among up to `chunks` chunks."""
        ...

    def reset(self) -> None:
        """Discard shared state that a failed step may have left behind."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The implementations that suit a device."""

    operations: Callable[[CausalModel, KVCache, int], StepOperations]
    """Called with the model, its KV cache and the largest number of decodes in a step."""
    sample: Callable[[Tensor, SamplerInputs], SamplerOutputs]
    clears_blocks: bool
    """Whether a block must be zeroed when it is allocated: attention also computes with masked positions."""
    graphs: bool
    """Whether steps are captured as CUDA graphs."""
    overlap: bool
    """Whether the next step is scheduled while the device computes this one."""
    reason: str
    """Why these were chosen, for the log."""
    pack: Callable[[Tensor], Tensor] | None = None
    """Converts a weight matrix to the layout that `operations` expect; None: that of the checkpoint."""

    def prepare(self, model: CausalModel) -> None:
        """Convert the weight matrices of `model` with `pack`, if there is one; repeating it does nothing."""
        if self.pack is not None:
            model.pack(self.pack)


class UncutSteps:
    """`StepOperations` of an implementation that needs only the cache and the layout: it has no tiles."""

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
    """Choose the fastest backend that runs on `device`."""
    if device.type == "cpu":
        # Imported here because it imports this module, as does the kernel backend below.
        from triton_models.engine.processor_backend import processor_backend  # noqa: PLC0415

        return processor_backend(dtype)
    if device.type != "cuda":
        return PLAIN
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return replace(PLAIN, reason=f"plain torch operations: {device} has compute capability {capability}")
    if find_spec("triton") is None:
        return replace(PLAIN, reason="plain torch operations: the package triton is missing")
    # Needs the package triton, which not every build of torch installs, and nobody needs without a GPU.
    from triton_models.engine.kernel_backend import kernel_backend  # noqa: PLC0415

    return kernel_backend(dtype)
