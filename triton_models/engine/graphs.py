"""An engine's steps as CUDA graphs: hundreds of launches become one.

A step of any size is padded to the next size that has a graph. There are steps with decodes only, and steps
with prompts and decodes.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from triton_models.engine.backend import Backend, StepOperations
from triton_models.engine.models import CausalModel, StepLayout
from triton_models.engine.sampling_rows import plain_inputs
from triton_models.engine.slots import SlotTable

log = logging.getLogger(__name__)

LARGEST_PROMPTS = 4096
"""Rows of the largest captured step with prompts: in larger ones, the device takes longer than the host
anyway, so a graph would not save time."""

_CHUNKS = 64
"""A captured step has room for the tiles of this many chunks, however its rows are divided among them."""


class DeviceStep:
    """The parts of a step that do the same work whatever its tokens, and so can be captured.

    Besides their arguments, they use only tensors at fixed device addresses.
    """

    def __init__(
        self,
        model: CausalModel,
        backend: Backend,
        operations: StepOperations,
        slots: SlotTable,
        *,
        longest: int,
    ) -> None:
        self._model = model
        self._sample = backend.sample
        self._operations = operations
        self.slots = slots
        self.longest = longest
        """Most tokens that a sequence may have: captured steps must suit any."""

    def forward(self, tokens: Tensor, layout: StepLayout) -> Tensor:
        """Return the hidden states of all rows of a step, [T, width], for `logits`."""
        self._operations.begin(layout)
        return self._model.forward(tokens, self._operations)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [S, vocabulary]; `hidden`: a copy of some rows of `forward`'s result, overwritten."""
        return self._model.logits(hidden, self._operations)

    def decode(self, slots: Tensor, longest: int) -> Tensor:
        """Return the logits [D, vocabulary] of the decodes in `slots`, [D] int64."""
        positions = self.slots.lengths[slots]
        layout = StepLayout(
            tables=self.slots.tables,
            slots=slots.int(),
            positions=positions,
            decode_lengths=(positions + 1).int(),
            longest_decode=longest,
        )
        return self.logits(self.forward(self.slots.tokens[slots], layout))

    def finish(self, slots: Tensor, logits: Tensor) -> Tensor:
        """Sample for plain decodes, record the tokens in their slots, and return the status [3, D]."""
        status = self._sample(logits, plain_inputs(self.slots, slots)).status
        self.slots.advance(slots, slots, status[0])
        return status


def decode_sizes(largest: int) -> list[int]:
    """Return the batch sizes that get a graph for steps with decodes only.

    Small sizes are closer together, because there each padding row is a larger share of the step's time.
    """
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, largest, 32)]
    return [*(size for size in sizes if size < largest), largest]


def prompt_sizes(largest: int) -> list[int]:
    """Return the numbers of rows that get a graph for steps with prompts.

    From 256 rows on, the next size is at most a sixteenth larger: a library's products take longer by whole
    tiles, so that a few rows of padding can cost a fifth of the step (bench/LOG.md). The largest is that of a
    full step, so that a busy engine's steps are captured.
    """
    sizes = [*range(16, 512, 16), *range(512, 1024, 32), *range(1024, 2048, 64)]
    sizes += range(2048, LARGEST_PROMPTS, 128)
    largest = min(largest, LARGEST_PROMPTS)
    return [*(size for size in sizes if size < largest), largest]


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


class CapturedDecodes:
    """Steps with decodes only, in two graphs each: the forward pass, and the sampling.

    The second graph is only used if every request is plain (`SamplingParams.plain`).
    """

    def __init__(self, step: DeviceStep) -> None:
        self._step = step
        largest, device = step.slots.spare, step.slots.tables.device
        self._slots = torch.full((largest,), step.slots.spare, dtype=torch.int64, device=device)
        self._logits = torch.empty(0)
        self._status = torch.empty((3, largest), dtype=torch.int64, device=device)
        self._forward = SizedGraphs(decode_sizes(largest))
        self._finish = SizedGraphs(decode_sizes(largest))

    def padding(self, decodes: int) -> int:
        """Return how many rows of the spare slot pad a step of `decodes` decodes."""
        return (self._forward.size_for(decodes) or decodes) - decodes

    def run_largest(self) -> int:
        """Run the work of the largest size once; return how many graphs there will be."""
        self.compute(self._forward.largest)
        self.sample(self._finish.largest)
        return len(self._forward) + len(self._finish)

    def capture(self, pool: CapturePool) -> None:
        """Capture every size."""
        self._forward.capture(self.compute, pool)
        self._finish.capture(self.sample, pool)

    def forward(self, slots: Tensor) -> Tensor:
        """Return the logits of `slots`, [D] int64 including padding; the next call overwrites the result."""
        size = len(slots)
        self._slots[:size].copy_(slots)
        self._forward.replay(size)
        return self._logits[:size]

    def finish(self, size: int) -> Tensor:
        """Sample for the slots of the last `forward`; return their status, which the next call overwrites."""
        self._finish.replay(size)
        return self._status[:, :size]

    def compute(self, size: int) -> None:
        """Do the work of `forward` on the current contents of the tensors."""
        logits = self._step.decode(self._slots[:size], self._step.longest)
        if not self._logits.numel():
            self._logits = torch.empty_like(logits)
        self._logits[:size].copy_(logits)

    def sample(self, size: int) -> None:
        """Do the work of `finish` on the current contents of the tensors."""
        self._status[:, :size].copy_(self._step.finish(self._slots[:size], self._logits[:size]))


class CapturedPrompts:
    """Steps with prompts, up to the hidden states from which the logits of a few rows are computed.

    `largest`: rows of the largest step; `most_tiles`: as in `StepOperations`.
    """

    def __init__(self, step: DeviceStep, *, largest: int, most_tiles: Callable[[int, int], int]) -> None:
        self._step = step
        self._most_tiles = most_tiles
        sizes = prompt_sizes(largest)
        most, slots = sizes[-1], step.slots
        device = slots.tables.device
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.full((most,), slots.spare, dtype=torch.int32, device=device)
        self._positions = torch.full((most,), -1, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(min(most, slots.spare), dtype=torch.int32, device=device)
        self._tiles = torch.zeros((self._tiles_in(most), 4), dtype=torch.int32, device=device)
        self._hidden = torch.empty(0)
        self._graphs = SizedGraphs(sizes)

    def size_for(self, rows: int, tiles: int) -> int | None:
        """Return the smallest size for `rows`; None if there is none, or it cannot hold that many tiles."""
        size = self._graphs.size_for(rows)
        return size if size is not None and tiles <= self._tiles_in(size) else None

    def run_largest(self) -> int:
        """Run the work of the largest size once; return how many graphs there will be."""
        self.compute(self._graphs.largest)
        return len(self._graphs)

    def capture(self, pool: CapturePool) -> None:
        """Capture every size."""
        self._graphs.capture(self.compute, pool)

    def forward(self, tokens: Tensor, layout: StepLayout) -> Tensor:
        """Return the hidden states, [T, width], of a step with tiles, padded to a captured size T.

        The next call overwrites the result.
        """
        size, decodes = len(tokens), len(layout.decode_lengths)
        self._tokens[:size].copy_(tokens)
        self._slots[:size].copy_(layout.slots)
        self._positions[:size].copy_(layout.positions)
        self._lengths.zero_()
        self._lengths[:decodes].copy_(layout.decode_lengths)
        self._tiles.zero_()
        if layout.tiles is not None:
            self._tiles[: len(layout.tiles)].copy_(layout.tiles)
        self._graphs.replay(size)
        return self._hidden[:size]

    def compute(self, size: int) -> None:
        """Do the work of `forward` on the current contents of the tensors."""
        layout = StepLayout(
            tables=self._step.slots.tables,
            slots=self._slots[:size],
            positions=self._positions[:size],
            decode_lengths=self._lengths[:size],
            longest_decode=self._step.longest,
            tiles=self._tiles[: self._tiles_in(size)],
        )
        hidden = self._step.forward(self._tokens[:size], layout)
        if not self._hidden.numel():
            self._hidden = torch.empty_like(hidden)
        self._hidden[:size].copy_(hidden)

    def _tiles_in(self, rows: int) -> int:
        return self._most_tiles(rows, _CHUNKS)


class CapturedSteps:
    """Both kinds of captured steps, in one memory pool."""

    def __init__(self, step: DeviceStep, *, largest: int, most_tiles: Callable[[int, int], int]) -> None:
        self.decodes = CapturedDecodes(step)
        self.prompts = CapturedPrompts(step, largest=largest, most_tiles=most_tiles)

    def run_largest(self) -> int:
        """Run the largest step of each kind once; return how many graphs there will be."""
        return self.prompts.run_largest() + self.decodes.run_largest()

    def capture(self) -> None:
        """Compile and capture everything."""
        started = time.monotonic()
        pool = CapturePool()
        self.prompts.capture(pool)
        self.decodes.capture(pool)
        log.info("captured the steps in %.1f s", time.monotonic() - started)
