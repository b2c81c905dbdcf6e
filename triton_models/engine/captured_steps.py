"""An engine's steps as CUDA graphs: steps with decodes only, and steps with prompts and decodes."""

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from triton_models.engine.device_step import DeviceStep
from triton_models.engine.graphs import CapturePool, SizedGraphs
from triton_models.engine.layout import StepLayout
from triton_models.engine.slots import SlotTable
from triton_models.engine.step_inputs import StepInputs

log = logging.getLogger(__name__)

LARGEST_PROMPTS = 4096
"""Rows of the largest captured step with prompts: in larger ones, the device takes longer than the host
anyway, so a graph would not save time."""

_CHUNKS = 64
"""A captured step has room for the tiles of this many chunks, however its rows are divided among them."""

MostTiles = Callable[[int, int], int]
"""See `StepOperations.most_tiles`."""


def decode_sizes(largest: int) -> list[int]:
    """Return the batch sizes that get a graph; a step of any other size is padded to the next.

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


class CapturedDecodes:
    """Steps with decodes only, in two graphs each: the forward pass, and the sampling.

    The second graph is only used if every request is plain (`SamplingParams.plain`).
    """

    def __init__(self, step: DeviceStep, slots: SlotTable, *, longest: int) -> None:
        self._step = step
        self._longest = longest
        largest, device = slots.spare, slots.tables.device
        self._slots = torch.full((largest,), slots.spare, dtype=torch.int64, device=device)
        self._logits = torch.empty(0)
        self._status = torch.empty((3, largest), dtype=torch.int64, device=device)
        self._forward = SizedGraphs(decode_sizes(largest))
        self._finish = SizedGraphs(decode_sizes(largest))

    def padding(self, decodes: int) -> int:
        """Return how many rows of the spare slot pad a step of `decodes` decodes."""
        return (self._forward.size_for(decodes) or decodes) - decodes

    def rehearse(self) -> int:
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
        logits = self._step.decode(self._slots[:size], self._longest)
        if not self._logits.numel():
            self._logits = torch.empty_like(logits)
        self._logits[:size].copy_(logits)

    def sample(self, size: int) -> None:
        """Do the work of `finish` on the current contents of the tensors."""
        self._status[:, :size].copy_(self._step.finish(self._slots[:size], self._logits[:size]))


class CapturedPrompts:
    """Steps with prompts, up to the hidden states from which the logits of a few rows are computed."""

    def __init__(
        self, step: DeviceStep, slots: SlotTable, *, longest: int, largest: int, most_tiles: MostTiles
    ) -> None:
        self._step = step
        self._most_tiles = most_tiles
        self._longest = longest
        self._tables = slots.tables
        sizes = prompt_sizes(largest)
        most, device = sizes[-1], slots.tables.device
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

    def rehearse(self) -> int:
        """Run the work of the largest size once; return how many graphs there will be."""
        self.compute(self._graphs.largest)
        return len(self._graphs)

    def capture(self, pool: CapturePool) -> None:
        """Capture every size."""
        self._graphs.capture(self.compute, pool)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Return the hidden states, [T, width], of a step padded to a captured size T.

        The next call overwrites the result.
        """
        size, decodes, tiles = len(inputs.tokens), len(inputs.decode_lengths), len(inputs.tiles)
        self._tokens[:size].copy_(inputs.tokens)
        self._slots[:size].copy_(inputs.slots)
        self._positions[:size].copy_(inputs.positions)
        self._lengths.zero_()
        self._lengths[:decodes].copy_(inputs.decode_lengths)
        self._tiles.zero_()
        self._tiles[:tiles].copy_(inputs.tiles)
        self._graphs.replay(size)
        return self._hidden[:size]

    def compute(self, size: int) -> None:
        """Do the work of `forward` on the current contents of the tensors."""
        layout = StepLayout(
            tables=self._tables,
            slots=self._slots[:size],
            positions=self._positions[:size],
            decode_lengths=self._lengths[:size],
            longest_decode=self._longest,
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

    def __init__(
        self, step: DeviceStep, slots: SlotTable, *, longest: int, largest: int, most_tiles: MostTiles
    ) -> None:
        self.decodes = CapturedDecodes(step, slots, longest=longest)
        self.prompts = CapturedPrompts(step, slots, longest=longest, largest=largest, most_tiles=most_tiles)

    def rehearse(self) -> int:
        """Run the largest step of each kind once; return how many graphs there will be."""
        return self.prompts.rehearse() + self.decodes.rehearse()

    def capture(self) -> None:
        """Compile and capture everything."""
        began = time.monotonic()
        pool = CapturePool()
        self.prompts.capture(pool)
        self.decodes.capture(pool)
        log.info("captured the steps in %.1f s", time.monotonic() - began)
