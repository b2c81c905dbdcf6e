"""An engine's steps as CUDA graphs: hundreds of launches become one.

A step of any size is padded to the next size that has a graph. There are steps with decodes only, and steps
with prompts and decodes.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triton_models.engine.backend import Backend, StepOperations
from triton_models.engine.models import CausalModel, ChunkRows, StepLayout, Tile
from triton_models.engine.sampler import MASK_BITS, PlainRules, plain_inputs
from triton_models.engine.slots import SlotTable
from triton_models.engine.step_times import StepTimes

log = logging.getLogger(__name__)

LARGEST_PROMPTS = 4096
"""Rows of the largest captured step with prompts: in larger ones, the device takes longer than the host
anyway, so a graph would not save time."""

_TIMED = 3
"""How often a step is measured; the shortest time counts."""

_CHUNKS = 64
"""A captured step has room for the tiles of this many chunks, however its rows are divided among them."""

_TILE = len(Tile._fields)


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
        """Most tokens that a sequence may have."""

    def forward(self, tokens: Tensor, layout: StepLayout) -> Tensor:
        """Return the hidden states of all rows of a step, [T, width], for `logits`."""
        self._operations.begin(layout)
        return self._model.forward(tokens, self._operations)

    def prompts(
        self,
        rows: Tensor,
        tiles: Tensor,
        *,
        many_keys: bool,
        decodes: int,
        longest: int,
        chunks: tuple[ChunkRows, ...] = (),
    ) -> Tensor:
        """Return the hidden states of a step with prompts, [T, width], for `logits`.

        Args:
            rows: [3, T] int64, see `Staged.rows`.
            tiles: [N, 7] int64, see `Staged.tiles`.
            many_keys: as in `StepLayout`, which has the chunks, too.
            decodes: only among so many first rows are decodes.
            longest: most tokens of one of these, the new one included.
            chunks: of the step.
        """
        slots, tokens, positions = rows
        told, lengths = tokens >= 0, self.slots.lengths[slots]
        layout = StepLayout(
            tables=self.slots.tables,
            slots=slots.int(),
            positions=torch.where(told, positions, lengths),
            decode_lengths=torch.where(told, 0, lengths + 1)[:decodes].int(),
            longest_decode=longest,
            chunks=chunks,
            tiles=tiles.int(),
            many_keys=many_keys,
        )
        return self.forward(torch.where(told, tokens, self.slots.tokens[slots]), layout)

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

    def finish(self, slots: Tensor, logits: Tensor, rules: PlainRules, words: Tensor) -> Tensor:
        """Sample for plain decodes, record the tokens in their slots, and return the status [3, D].

        `words`: their masks, [D, ceil(vocabulary / 32)] int32, if `rules` has any.
        """
        inputs = plain_inputs(self.slots, slots)
        inputs.truncated = rules is not PlainRules.NOTHING_MORE
        if rules is PlainRules.TRUNCATION_AND_MASKS:
            inputs.masks = torch.arange(len(slots), device=slots.device), words
        status = self._sample(logits, inputs).status
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


class SizedGraphs:
    """Captures the same work at several sizes: `work(size)` for each.

    The work reads tensors at fixed addresses, and its result is copied to one, `results`. Whatever else a
    graph allocates comes from one pool, so graphs must be replayed one after the other.

    Args:
        sizes: what gets a graph.
        work: returns a tensor that is `size` long in dimension `dim`. It must not refer to these graphs, or
            only the garbage collector would free their memory.
        dim: the dimension of the results that has the size.
    """

    def __init__(self, sizes: Iterable[int], work: Callable[[int], Tensor], *, dim: int = 0) -> None:
        self._sizes = sorted(sizes)
        self._work = work
        self._dim = dim
        self._results: Tensor | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def size_for(self, count: int) -> int | None:
        """Return the smallest size that holds `count`; None if `count` exceeds the largest."""
        place = bisect_left(self._sizes, count)
        return self._sizes[place] if place < len(self._sizes) else None

    def results(self, size: int) -> Tensor:
        """Return what the work last done at this size came to; any later one overwrites it."""
        if self._results is None:
            raise RuntimeError("nothing was computed yet")
        return self._results.narrow(self._dim, 0, size)

    def run_largest(self) -> int:
        """Do the work of the largest size once; returns the number of sizes."""
        self.compute(self._sizes[-1])
        return len(self._sizes)

    def capture(self, memory: Any, stream: torch.cuda.Stream) -> None:
        """Compile and capture each size, the largest first, so that smaller graphs reuse its memory."""
        for size in reversed(self._sizes):
            # Compiles kernels and initialises libraries, neither of which may happen during a capture.
            self.compute(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory, stream=stream):
                self.compute(size)
            self._graphs[size] = graph

    def replay(self, size: int) -> Tensor:
        """Do the captured work on the current contents of its tensors; returns `results(size)`."""
        self._graphs[size].replay()
        return self.results(size)

    def times(self, largest: int) -> StepTimes:
        """Measure what the work takes at each size up to `largest`."""
        sizes = [size for size in self._sizes if size <= largest]
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

        def seconds(size: int) -> float:
            begin.record()
            self.replay(size)
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1000

        return StepTimes(tuple(sizes), tuple(min(seconds(size) for _ in range(_TIMED)) for size in sizes))

    def compute(self, size: int) -> None:
        """Do the work; the first time at the largest size, which is how large `results` becomes."""
        result = self._work(size)
        if self._results is None:
            self._results = torch.empty_like(result)
        self.results(size).copy_(result)


class PromptsSize(NamedTuple):
    """How many rows and tiles a captured step with prompts has, those of padding included."""

    rows: int
    tiles: int


class CapturedSteps:
    """Steps with decodes only, in two graphs (forward pass and sampling); and the forward pass with prompts.

    A graph that samples is only used if every request is plain (`SamplingParams.plain`). Steps with prompts
    are captured up to the hidden states, from which the logits of a few rows are computed. Those of few rows
    are captured twice: for few keys and for many.

    Args:
        step: does the work.
        vocabulary: number of tokens.
        largest: rows of the largest step with prompts.
        operations: whose tiles these have.
    """

    def __init__(
        self, step: DeviceStep, *, vocabulary: int, largest: int, operations: StepOperations
    ) -> None:
        tables, spare = step.slots.tables, step.slots.spare
        device = tables.device

        def tiles_in(rows: int, *, many_keys: bool) -> int:
            return operations.most_tiles(rows, _CHUNKS, many_keys=many_keys)

        decode_slots = torch.full((spare,), spare, dtype=torch.int64, device=device)
        decode = SizedGraphs(decode_sizes(spare), lambda size: step.decode(decode_slots[:size], step.longest))
        self._tiles_in = tiles_in
        self._decode_slots = decode_slots
        self._decode = decode

        words = torch.full((spare, -(-vocabulary // MASK_BITS)), -1, dtype=torch.int32, device=device)

        def finish(rules: PlainRules, size: int) -> Tensor:
            return step.finish(decode_slots[:size], decode.results(size), rules, words[:size])

        self._words = words
        self._finish = {
            rules: SizedGraphs(decode_sizes(spare), partial(finish, rules), dim=1) for rules in PlainRules
        }

        sizes = prompt_sizes(largest)
        rows = torch.tensor([spare, 0, -1], device=device).repeat_interleave(sizes[-1])
        # Smaller steps may have more of them, since theirs are smaller, too, or parts.
        most = max(tiles_in(size, many_keys=many_keys) for size in sizes for many_keys in (False, True))
        tiles = torch.zeros(_TILE * most, dtype=torch.int64, device=device)

        def prompts(many_keys: bool, size: int) -> Tensor:  # noqa: FBT001 - what two kinds of graphs differ in
            padded_tiles = tiles[: _TILE * tiles_in(size, many_keys=many_keys)].view(-1, _TILE)
            padded_rows = rows[: 3 * size].view(3, size)
            return step.prompts(
                padded_rows, padded_tiles, many_keys=many_keys, decodes=min(size, spare), longest=step.longest
            )

        self._rows, self._tiles = rows, tiles
        few = [size for size in sizes if size <= operations.many_keys_rows]
        self._prompts = {
            many_keys: SizedGraphs(each, partial(prompts, many_keys))
            for many_keys, each in ((False, sizes), (True, few))
            if each
        }

    def run_largest(self) -> int:
        """Run the largest step of each kind once; return how many graphs there will be."""
        return sum(graphs.run_largest() for graphs in self._all())

    def capture(self) -> None:
        """Compile and capture everything."""
        started = time.monotonic()
        # The graphs are replayed one after the other, and share a stream because memory is reused within one
        # only. Not torch's own for captures: that is of the device of this process's first capture.
        memory, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for graphs in self._all():
            graphs.capture(memory, stream)
        log.info("captured the steps in %.1f s", time.monotonic() - started)

    def times(self, largest: int) -> StepTimes:
        """Measure the steps with prompts, of up to `largest` rows, which here are all padding."""
        return self._prompts[False].times(largest)

    def _all(self) -> list[SizedGraphs]:
        return [*self._prompts.values(), self._decode, *self._finish.values()]

    def padding(self, decodes: int) -> int:
        """Return how many rows of the spare slot pad a step of `decodes` decodes."""
        return (self._decode.size_for(decodes) or decodes) - decodes

    def size_for(self, rows: int, tiles: int, *, many_keys: bool) -> PromptsSize | None:
        """Return the size of the smallest step with prompts that has room for these; None: there is none."""
        graphs = self._prompts.get(many_keys)
        size = graphs.size_for(rows) if graphs else None
        if size is None or tiles > (room := self._tiles_in(size, many_keys=many_keys)):
            return None
        return PromptsSize(size, room)

    def decode(self, slots: Tensor) -> Tensor:
        """Return the logits of `slots`, [D] int64 including padding; the next call overwrites the result."""
        self._decode_slots[: len(slots)].copy_(slots)
        return self._decode.replay(len(slots))

    def finish(self, size: int, rules: PlainRules, masks: tuple[Tensor, Tensor] | None) -> Tensor:
        """Sample for the slots of the last `decode`; return their status, which the next call overwrites.

        `masks`: as in `SamplerInputs`; None: there are none.
        """
        if masks is not None:
            rows, words = masks
            self._words[:size].fill_(-1)
            self._words[rows] = words
        return self._finish[rules].replay(size)

    def prompts(self, rows: Tensor, tiles: Tensor, *, many_keys: bool) -> Tensor:
        """Return the hidden states, [T, width], of a step with prompts, padded to a captured size T.

        The next call overwrites the result.

        Args:
            rows: [3 * T] int64, see `Staged.rows`.
            tiles: [7 * N] int64, see `Staged.tiles`; as many as the size has.
            many_keys: the size's.
        """
        self._rows[: len(rows)].copy_(rows)
        self._tiles[: len(tiles)].copy_(tiles)
        return self._prompts[many_keys].replay(len(rows) // 3)
