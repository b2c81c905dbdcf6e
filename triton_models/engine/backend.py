"""Backends: which implementation of each expensive operation a device uses, chosen once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Final, Protocol

import torch
from torch import Tensor

from triton_models.engine.blocks import KVCache
from triton_models.engine.drafts import DraftLimits
from triton_models.engine.linear import Linear, pack, why_not_packed
from triton_models.engine.models import CausalModel, ChunkRows, Operations, StepLayout, Tile
from triton_models.engine.ops_cpu import (
    NotCompiledError,
    compile_linear,
    compiled,
    cpu_operations,
    cpu_sample,
)
from triton_models.engine.ops_torch import TorchOperations
from triton_models.engine.sampler import SamplerInputs, SamplerOutputs, sample
from triton_models.engine.settings import BLOCK_TOKENS

_CPU_DRAFTS = DraftLimits(wait_s=0.0004, wait_more_s=0.00002)
"""Measured on two cores (bench/LOG.md), as a GPU's were on an H200."""
_HOPPER = (9, 0)
HOPPER_BLOCK_TOKENS: Final = 64
"""Its attention of prompts copies so many keys of 16 bits at once (`kernels.attention_prefill`)."""
_LEAST_CAPABILITY = (8, 0)
"""Ampere: the first generation whose matrix units support bfloat16."""


class StepOperations(Operations, Protocol):
    """The `Operations` of a model's steps, one after the other.

    What needs no attention, such as a model's `logits`, needs no `begin`.
    """

    @property
    def clears_blocks(self) -> bool:
        """Whether a block must be zeroed when it is allocated: attention reads masked positions, too."""
        ...

    def begin(self, layout: StepLayout) -> None:
        """Prepare for the attention of another step; the step before is forgotten."""
        ...

    def tiles(self, chunks: Sequence[ChunkRows]) -> tuple[list[Tile], bool]:
        """Divide chunks into the tiles that attention works on; return `StepLayout.tiles` and `many_keys`.

        There are none without chunks, and where attention has no tiles.
        """
        ...

    @property
    def many_keys_rows(self) -> int:
        """Most rows of a step that may have `StepLayout.many_keys`."""
        ...

    def most_tiles(self, rows: int, chunks: int, *, many_keys: bool) -> int:
        """Return the most `tiles` that `rows` rows need, however divided among up to `chunks` chunks."""
        ...

    def reset(self) -> None:
        """Discard state that a failed step may have left behind."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The implementations that suit a device."""

    operations: Callable[[CausalModel, KVCache, int], StepOperations]
    """Called with the model, its KV cache and the largest number of decodes in a step."""
    sample: Callable[[Tensor, SamplerInputs], SamplerOutputs]
    graphs: bool
    """Whether steps are captured as CUDA graphs."""
    overlap: bool
    """Whether the next step is scheduled while the device computes this one."""
    drafts: DraftLimits
    """What guesses may cost."""
    reason: str
    """Why these were chosen, for the log."""
    convert: Callable[[Linear], Linear] | None = None
    """Gives a matrix the form that suits the device; converting it again changes nothing. None: it stays."""
    reads_16_bits: bool = False
    """Whether products in float32 also take converted matrices of 16 bits."""
    block_size: int = BLOCK_TOKENS
    """Tokens of a KV block that suit attention."""


PLAIN = Backend(
    operations=TorchOperations,
    sample=sample,
    graphs=False,
    overlap=False,
    drafts=DraftLimits(),
    reason="plain torch operations",
)
"""For any device."""


def choose_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Choose the fastest backend that runs on `device`."""
    if device.type == "cpu":
        return _cpu_backend(dtype)
    if device.type != "cuda":
        return PLAIN
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return replace(PLAIN, reason=f"plain torch operations: {device} has compute capability {capability}")
    if find_spec("triton") is None:
        return replace(PLAIN, reason="plain torch operations: the package triton is missing")
    backend = cuda_backend(dtype)
    if capability == _HOPPER and dtype.itemsize == 2:  # noqa: PLR2004 - bytes
        return replace(backend, block_size=HOPPER_BLOCK_TOKENS)
    return backend


def _cpu_backend(dtype: torch.dtype) -> Backend:
    """Return the backend for a CPU: operations compiled for it in float32, or torch's and packed matrices."""
    why = ""
    if dtype is torch.float32:
        try:
            compiled()
        except NotCompiledError as error:
            why = f" ({error})"
        else:
            return replace(
                PLAIN,
                operations=cpu_operations,
                sample=cpu_sample,
                convert=compile_linear,
                reads_16_bits=True,
                drafts=_CPU_DRAFTS,
                reason=f"operations compiled for this CPU, {dtype}",
            )
    obstacle = why_not_packed(dtype)
    matrices = "packed matrices" if obstacle is None else f"matrices as they are ({obstacle})"
    reason = f"torch operations for the CPU{why}, {matrices}, {dtype}"
    return replace(PLAIN, reason=reason, drafts=_CPU_DRAFTS, convert=pack if obstacle is None else None)


def cuda_backend(dtype: torch.dtype) -> Backend:
    """Return the backend for a GPU: our own kernels, captured steps, host and device working in parallel."""
    # These need the package triton, which not every build of torch installs, and nobody needs without a GPU.
    from triton_models.engine.kernels.masks import forbid  # noqa: PLC0415
    from triton_models.engine.kernels.penalties import penalise  # noqa: PLC0415
    from triton_models.engine.kernels.sampling import choose  # noqa: PLC0415
    from triton_models.engine.kernels.tiles import tiled  # noqa: PLC0415
    from triton_models.engine.ops_cuda import CudaOperations  # noqa: PLC0415

    return Backend(
        operations=CudaOperations,
        sample=lambda logits, inputs: sample(logits, inputs, choose, penalise, forbid),
        graphs=True,
        overlap=True,
        drafts=DraftLimits(
            rows=256, wait_s=0.0007, wait_more_s=0.00002, mask_s=0.00008, step_s=0.0036, row_s=0.00003
        ),
        reason=f"own kernels, CUDA graphs and overlapped steps, {dtype}",
        convert=tiled,
    )
