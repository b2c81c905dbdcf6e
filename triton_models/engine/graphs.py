"""CUDA graphs of one piece of work at several sizes: its hundreds of launches become one."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

import torch

PoolHandle = Any
"""What `torch.cuda.graph_pool_handle` gives; torch has no public name for its type."""


class SizedGraphs:
    """Captures `work(size)` for each of some sizes, and does not keep the work itself.

    The work reads and writes tensors that keep their places; what a graph allocates beside them comes from
    one pool, for graphs that are replayed one after the other.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._sizes = sorted(sizes)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __len__(self) -> int:
        """Return the number of sizes."""
        return len(self._sizes)

    @property
    def largest(self) -> int:
        """The largest size."""
        return self._sizes[-1]

    def size_for(self, count: int) -> int | None:
        """Return the smallest size that holds `count`; None if it is over the largest."""
        place = bisect_left(self._sizes, count)
        return self._sizes[place] if place < len(self._sizes) else None

    def capture(self, work: Callable[[int], None], pool: PoolHandle) -> None:
        """Compile and capture, the largest first: the smaller ones find room in its memory."""
        for size in reversed(self._sizes):
            # Compiles kernels and lets libraries set themselves up, neither of which a capture may do.
            work(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                work(size)
            self._graphs[size] = graph

    def replay(self, size: int) -> None:
        """Do the work again, with what the tensors hold now."""
        self._graphs[size].replay()
