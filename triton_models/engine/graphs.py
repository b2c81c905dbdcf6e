"""Decode steps as CUDA graphs: a step's hundreds of launches become one."""

import logging
import time
from bisect import bisect_left
from typing import Protocol

import torch
from torch import Tensor

from triton_models.engine.slots import SlotTable

log = logging.getLogger(__name__)


class DecodeForward(Protocol):
    """Computes a step of decodes; everything it reads but `slots` has its place on the device."""

    def __call__(self, decodes: Tensor, longest_decode: int) -> Tensor:
        """Return [D, vocabulary] logits of `decodes`, [D] int64 slots."""
        ...


def graph_sizes(largest: int) -> list[int]:
    """Return the batch sizes that get a graph: a step of any other size is padded to the next.

    Closer together where a row costs more of the step's time.
    """
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, largest, 32)]
    return [*(size for size in sizes if size < largest), largest]


class DecodeGraphs:
    """One graph for each of some batch sizes, in one memory pool; they are replayed one after the other."""

    def __init__(self, forward: DecodeForward, slots: SlotTable, *, longest: int) -> None:
        self._forward = forward
        self._longest = longest
        self._spare = slots.spare
        self._sizes = graph_sizes(slots.spare)
        self._slots = torch.full(
            (self._sizes[-1],), self._spare, dtype=torch.int64, device=slots.tables.device
        )
        self._logits = torch.empty(0)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def padding(self, decodes: int) -> int:
        """Return how many rows of the spare slot fill a step of so many decodes up to a graph's size."""
        place = bisect_left(self._sizes, decodes)
        return self._sizes[place] - decodes if place < len(self._sizes) else 0

    def holds(self, decodes: int) -> bool:
        """Return whether a step of so many decodes, padding included, was captured."""
        return decodes in self._graphs

    def capture(self) -> None:
        """Compile and capture every size, the largest first: the smaller ones find room in its memory."""
        began = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            slots = self._slots[:size]
            # Compiles kernels and lets libraries set themselves up, neither of which a capture may do.
            logits = self._forward(slots, self._longest)
            if not self._graphs:
                self._logits = torch.empty_like(logits)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._logits[:size].copy_(self._forward(slots, self._longest))
            self._graphs[size] = graph
        torch.cuda.synchronize()
        log.info("captured %d decode graphs in %.1f s", len(self._graphs), time.monotonic() - began)

    def replay(self, slots: Tensor) -> Tensor:
        """Return the logits of `slots`, [D] int64 for a captured D; the next replay overwrites them."""
        size = len(slots)
        self._slots[:size].copy_(slots)
        self._graphs[size].replay()
        return self._logits[:size]
