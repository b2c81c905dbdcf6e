"""Runs a scheduled step on the device: turns sequences into tensors, and tensors into tokens."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from itertools import chain
from typing import Concatenate, ParamSpec, TypeVar

import torch

from triton_models.engine.backend import Backend
from triton_models.engine.blocks import KVCache
from triton_models.engine.graphs import LARGEST_PROMPTS, CapturedSteps, DeviceStep
from triton_models.engine.logits import compute_logits, with_logits
from triton_models.engine.masks import fill_masks
from triton_models.engine.models import CausalModel, ChunkRows, StepLayout, Tile
from triton_models.engine.sampler import SamplerOutputs, plain_rules, sampler_inputs, stage_sampling
from triton_models.engine.scoring import prompt_chunks, score, stage_scores, with_scores
from triton_models.engine.settings import EngineSettings
from triton_models.engine.slots import (
    PenaltyTable,
    SlotTable,
    Staged,
    Staging,
    download,
    slot_of,
    stage_penalties,
    stage_slots,
    upload,
)
from triton_models.engine.step import Sampled, Step, rows_that_sample, sampled_tokens
from triton_models.engine.step_times import StepTimes

log = logging.getLogger(__name__)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU this thread's current device within the `with` block; a CPU needs nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _on_device(
    method: Callable[Concatenate["Runner", _Arguments], _Result],
) -> Callable[Concatenate["Runner", _Arguments], _Result]:
    """Let a method of the runner compute without gradients, and on the model's device."""

    @wraps(method)
    def on_device(runner: "Runner", /, *args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        with torch.inference_mode(), current(runner._model.device):  # noqa: SLF001 - it is a method
            return method(runner, *args, **options)

    return on_device


class Runner:
    """Owns the model, its KV cache and the slots.

    A step is begun, sampled and collected, in this order and in the order of scheduling. `begin` and `sample`
    return as soon as the work is queued on the device, and a step may be launched before the previous one was
    collected: the device computes them in order, and finds the newest tokens in its own tables. A step's data
    is uploaded in one copy; only token masks need a second one. They are filled in `sample`, so a step whose
    masks depend on the previous step's tokens can be begun before those are known.

    The cache has one block until `allocate`, which is enough for `run_largest`. `context`: most tokens of one
    sequence.

    Its methods may run on any thread, one at a time: each makes the model's device the current one, for
    kernels, graphs and events.
    """

    def __init__(
        self, model: CausalModel, backend: Backend, settings: EngineSettings, *, context: int
    ) -> None:
        size = settings.block_size or backend.block_size
        self._model = model
        self._backend = backend
        self._cache = KVCache(
            model.kv_shape, blocks=1, block_size=size, dtype=model.dtype, device=model.device
        )
        self._slots = SlotTable(settings.max_running, -(-context // size), model.device)
        self._penalties = PenaltyTable(settings.max_running, model.vocab_size, model.device)
        log.info(
            "counts for penalties: %.1f MB, %d sequences by %d tokens",
            self._penalties.seen.nbytes / 1e6,
            *self._penalties.seen.shape,
        )
        with current(model.device):  # they may try what they have
            self._operations = backend.operations(model, self._cache, settings.max_running)
        # No reference to this runner: dropping it must free device memory without the garbage collector.
        self._step = DeviceStep(model, backend, self._operations, self._slots, longest=context)
        self._captured: CapturedSteps | None = None
        self._largest = min(settings.largest_step, LARGEST_PROMPTS)
        if backend.graphs:
            self._captured = CapturedSteps(
                self._step, vocabulary=model.vocab_size, largest=self._largest, operations=self._operations
            )

    @_on_device
    def run_largest(self) -> int:
        """Run the largest steps that are captured, or would be; returns how many graphs there will be.

        All rows are the spare slot's, so nothing is written but the padding block.
        """
        if self._captured is not None:
            return self._captured.run_largest()
        rows, longest, spare = self._largest, self._step.longest, self._slots.spare
        chunks = tuple(
            ChunkRows(spare, start, min(start + longest, rows), 0) for start in range(0, rows, longest)
        )
        tiles, many_keys = self._operations.tiles(chunks)
        tokens = torch.zeros(rows, dtype=torch.int64, device=self._model.device)
        layout = StepLayout(
            tables=self._slots.tables,
            slots=torch.full_like(tokens, spare, dtype=torch.int32),
            positions=torch.arange(rows, device=tokens.device) % longest,
            decode_lengths=tokens[:0].int(),
            longest_decode=0,
            chunks=chunks,
            tiles=tokens.new_tensor(tiles).view(-1, len(Tile._fields)).int(),
            many_keys=many_keys,
        )
        self._step.logits(self._step.forward(tokens, layout)[:spare].clone())
        return 0

    def allocate(self, blocks: int, *, context: int) -> None:
        """Make the cache `blocks` blocks large, for sequences of up to `context` tokens. Before `capture`."""
        self._cache.allocate(blocks)
        self._step.longest = context

    @_on_device
    def capture(self, timed: int) -> StepTimes:
        """Compile and capture everything that any step will use.

        Returns the times of steps with prompts, of up to `timed` rows; none where nothing is captured.
        """
        if self._captured is None:
            return StepTimes()
        self._captured.capture()
        return self._captured.times(timed)

    @_on_device
    def reset(self) -> None:
        """Discard what a failed step may have left."""
        self._cache.reset()
        self._operations.reset()

    @_on_device
    def begin(self, step: Step) -> None:
        """Have the device compute a step up to its logits; `sample` it before the next one is begun."""
        step.sampling, step.followed = rows_that_sample(step.chunks)
        chunks = chunk_rows(step)
        scored = prompt_chunks(step, chunks, logits=False)
        staging = Staging()
        captured, many_keys = self._stage(staging, step, chunks)
        stage_slots(staging, step.decodes, step.drafts, step.prefills, self._cache.block_size)
        stage_penalties(staging, step.prefills)
        stage_sampling(staging, step.sampling, step.followed)
        stage_scores(staging, scored)
        staged = Staged(**staging.upload(self._model.device))
        self._slots.load(staged)
        self._penalties.load(staged)
        if staged.copies.numel():
            self._cache.copy(*staged.copies.view(2, -1))
        if staged.new_blocks.numel():
            self._cache.clear(staged.new_blocks)
        longest = max((chunk.end for chunk in step.decodes), default=0)
        if step.told:
            if captured:
                hidden = captured.prompts(staged.rows, staged.tiles, many_keys=many_keys)
            else:
                hidden = self._step.prompts(
                    staged.rows.view(3, -1),
                    staged.tiles.view(-1, len(Tile._fields)),
                    many_keys=many_keys,
                    decodes=len(step.decodes),
                    longest=longest,
                    chunks=chunks,
                )
            if scored:
                step.scores = score(scored, staged, hidden, self._step.logits)
            if wanted := prompt_chunks(step, chunks, logits=True):
                step.prompt_logits = compute_logits(wanted, hidden, self._step.logits)
            # The logits' weights are many: do not read them if no row needs them.
            step.logits = self._step.logits(hidden[staged.picked]) if step.sampling else hidden.new_empty(0)
        else:
            slots = staged.decode_slots
            step.logits = captured.decode(slots) if captured else self._step.decode(slots, longest)
            step.captured = plain_rules(step.sampling) if captured else None
        step.staged = staged

    @_on_device
    def sample(self, step: Step) -> None:
        """Have the device sample a step's tokens; its masks must have been told all tokens before."""
        sampling, staged, logits = step.sampling, step.staged, step.logits
        if staged is None or logits is None:
            raise RuntimeError("only a step that was begun can be sampled, and once")
        device = self._model.device
        words, step.mask_faults = fill_masks(
            sampling, step.followed, self._model.vocab_size, pin=device.type == "cuda"
        )
        masks = None if words is None else (staged.masked_rows, upload(words, device))
        outputs = None
        if step.captured and self._captured is not None:
            status = self._captured.finish(len(staged.decode_slots), step.captured, masks)
            outputs = SamplerOutputs(status, None, None)
        elif sampling:
            rules = sampler_inputs(staged, self._slots, self._penalties, masks, sampling)
            outputs = self._backend.sample(logits[: len(sampling)], rules)
            tokens = outputs.status[0]
            self._slots.advance(staged.decode_slots[: len(step.decodes)], staged.sampling_slots, tokens)
            if rules.penalties is not None:
                rules.penalties.count(outputs.status)
        step.staged = step.logits = None
        step.outputs = outputs
        if device.type == "cuda":
            # Only the copies are begun here: `collect` waits for them.
            step.outputs = outputs and download(outputs)
            step.scores = step.scores and download(step.scores)
            step.prompt_logits = step.prompt_logits and download(step.prompt_logits)
            step.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            step.done.record()

    def collect(self, step: Step) -> list[Sampled]:
        """Wait for a step; returns results of the chunks that sample, in order, then of those only scored."""
        if step.done is not None:
            step.done.synchronize()
        results: list[Sampled] = []
        if step.outputs is not None:
            results = sampled_tokens(step, step.outputs)
        if step.scores is not None:
            results = with_scores(results, step.scores)
        return results if step.prompt_logits is None else with_logits(results, step.prompt_logits)

    def _stage(
        self, staging: Staging, step: Step, chunks: tuple[ChunkRows, ...]
    ) -> tuple[CapturedSteps | None, bool]:
        """Stage what the forward pass computes.

        Returns the captured steps if one of them fits this step, and `StepLayout.many_keys`.
        """
        slots = [slot_of(chunk.sequence) for chunk in step.decodes]
        tiles, many_keys = self._operations.tiles(chunks)
        captured, padding = self._captured, 0
        if captured is not None and chunks:
            rows = chunks[-1].end
            if size := captured.size_for(rows, len(tiles), many_keys=many_keys):
                padding = size.rows - rows
                tiles += [Tile(0, 0, 0, 0)] * (size.tiles - len(tiles))
            else:
                captured = None
        elif captured is not None:
            slots += [self._slots.spare] * captured.padding(len(slots))
        staging.integers("decode_slots", slots)
        staging.integers("tiles", chain.from_iterable(tiles))
        staging.integers("new_blocks", step.new_blocks if self._operations.clears_blocks else [])
        staging.integers("copies", [block for column in zip(*step.copies, strict=True) for block in column])
        stage_prompts(staging, step, padding=padding, spare=self._slots.spare)
        return captured, many_keys


def chunk_rows(step: Step) -> tuple[ChunkRows, ...]:
    """Return which rows of a step hold the chunks whose tokens the host tells."""
    chunks = []
    row = len(step.decodes)
    for chunk in step.told:
        chunks.append(ChunkRows(slot_of(chunk.sequence), row, row + chunk.count, chunk.start))
        row += chunk.count
    return tuple(chunks)


def stage_prompts(staging: Staging, step: Step, *, padding: int, spare: int) -> None:
    """Stage the rows of a step with prompts or drafts, then padding of the slot `spare`; also who samples."""
    slots = [slot_of(chunk.sequence) for chunk in step.decodes if step.told]
    tokens, positions, picked = [-1] * len(slots), [0] * len(slots), list(range(len(slots)))
    for chunk in step.told:
        slots += [slot_of(chunk.sequence)] * chunk.count
        tokens += chunk.tokens
        positions += range(chunk.start, chunk.end)
        if chunk.samples:
            picked += range(len(slots) - len(chunk.guesses) - 1, len(slots))
    slots += [spare] * padding
    tokens += [0] * padding
    positions += [-1] * padding
    staging.integers("rows", slots + tokens + positions)
    staging.integers("picked", picked)
