"""Decode steps as CUDA graphs: a step's hundreds of launches become one."""

import logging
import time
from bisect import bisect_left
from typing import Protocol

import torch
from torch import Tensor

from triton_models.engine.slots import SlotTable

log = logging.getLogger(__name__)


class DecodeStep(Protocol):
    """The two halves of a decode step; all that they read but their arguments has its place on the device."""

    def forward(self, decodes: Tensor, longest_decode: int) -> Tensor:
        """Return [D, vocabulary] logits of `decodes`, [D] int64 slots."""
        ...

    def finish(self, decodes: Tensor, logits: Tensor) -> Tensor:
        """Sample for `decodes`, none of which asks for anything special, and note it in their slots.

        Returns:
            [3, D] int64, as `SamplerOutputs.status`.
        """
        ...


def graph_sizes(largest: int) -> list[int]:
    """Return the batch sizes that get a graph: a step of any other size is padded to the next.

    Closer together where a row costs more of the step's time.
    """
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, largest, 32)]
    return [*(size for size in sizes if size < largest), largest]


class DecodeGraphs:
    """Graphs for some batch sizes, in one memory pool; they are replayed one after the other.

    Two for each size: rows that ask for something special are sampled between the forward pass and the next
    step by other means.
    """

    def __init__(self, step: DecodeStep, slots: SlotTable, *, longest: int) -> None:
        self._step = step
        self._longest = longest
        self._sizes = graph_sizes(slots.spare)
        shape, device = (self._sizes[-1],), slots.tables.device
        self._slots = torch.full(shape, slots.spare, dtype=torch.int64, device=device)
        self._logits = torch.empty(0)
        self._status = torch.empty((3, *shape), dtype=torch.int64, device=device)
        self._forward: dict[int, torch.cuda.CUDAGraph] = {}
        self._finish: dict[int, torch.cuda.CUDAGraph] = {}

    def padding(self, decodes: int) -> int:
        """Return how many rows of the spare slot fill a step of so many decodes up to a graph's size."""
        return self._sizes[bisect_left(self._sizes, decodes)] - decodes

    def capture(self) -> None:
        """Compile and capture every size, the largest first: the smaller ones find room in its memory."""
        began = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            # Compiles kernels and lets libraries set themselves up, neither of which a capture may do.
            slots = self._slots[:size]
            logits = self._step.forward(slots, self._longest)
            if not self._forward:
                self._logits = torch.empty_like(logits)
            self._step.finish(slots, logits)
            torch.cuda.synchronize()
            self._forward[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._forward[size], pool=pool):
                self._logits[:size].copy_(self._step.forward(slots, self._longest))
            self._finish[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._finish[size], pool=pool):
                self._status[:, :size].copy_(self._step.finish(slots, self._logits[:size]))
        torch.cuda.synchronize()
        log.info(
            "captured the decode steps of %d sizes in %.1f s", len(self._sizes), time.monotonic() - began
        )

    def forward(self, slots: Tensor) -> Tensor:
        """Return the logits of `slots`, [D] int64 with padding; the next call overwrites them."""
        size = len(slots)
        self._slots[:size].copy_(slots)
        self._forward[size].replay()
        return self._logits[:size]

    def finish(self, size: int) -> Tensor:
        """Sample for the slots of the last `forward`; returns their status, overwritten by the next."""
        self._finish[size].replay()
        return self._status[:, :size]
