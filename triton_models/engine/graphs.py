"""CUDA graphs of the same work at several sizes: hundreds of launches become one."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class CapturePool:
    """The memory and the stream of graphs that are replayed one after the other, on the current device.

    They share one stream because memory is reused within a stream only. It is not torch's own stream for
    captures: that belongs to the device that was current at the first capture of this process.
    """

    memory: Any = field(default_factory=torch.cuda.graph_pool_handle)
    """Torch has no public name for its type."""
    stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)


class SizedGraphs:
    """Captures `work(size)` for each of several sizes; does not keep a reference to `work`.

    The work reads and writes tensors at fixed addresses. Whatever else a graph allocates comes from one pool,
    so graphs must be replayed one after the other.
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
        """Return the smallest size that holds `count`; None if `count` exceeds the largest."""
        place = bisect_left(self._sizes, count)
        return self._sizes[place] if place < len(self._sizes) else None

    def capture(self, work: Callable[[int], None], pool: CapturePool) -> None:
        """Compile and capture each size, the largest first, so that smaller graphs reuse its memory."""
        for size in reversed(self._sizes):
            # Compiles kernels and initialises libraries, neither of which may happen during a capture.
            work(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool.memory, stream=pool.stream):
                work(size)
            self._graphs[size] = graph

    def replay(self, size: int) -> None:
        """Run the captured work on the current contents of its tensors."""
        self._graphs[size].replay()
