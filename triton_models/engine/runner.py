"""Runs a scheduled step on the device: turns sequences into tensors, and tensors into tokens."""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_models.engine.backend import Backend
from triton_models.engine.batch import Batch
from triton_models.engine.captured_steps import CapturedSteps
from triton_models.engine.device_step import DeviceStep
from triton_models.engine.kv_cache import KVCache
from triton_models.engine.layout import ChunkRows, StepLayout
from triton_models.engine.masks import MaskFault, fill_masks
from triton_models.engine.model import CausalModel
from triton_models.engine.penalties import PenaltyTable, stage_penalties
from triton_models.engine.results import Sampled, sampled_tokens
from triton_models.engine.sampler import SamplerOutputs, sampler_inputs, stage_sampling
from triton_models.engine.scoring import (
    ScoredChunk,
    Scores,
    score,
    scored_chunks,
    stage_scores,
    with_scores,
)
from triton_models.engine.sequence import Sequence
from triton_models.engine.settings import Capacity, EngineSettings
from triton_models.engine.slots import SlotTable, slot_of, stage_blocks, stage_sequences
from triton_models.engine.staging import Staging, upload
from triton_models.engine.step_inputs import StepInputs, chunk_rows, stage_prompts, step_inputs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that has its forward pass on the device, but not its sampling.

    `sampling`: the sequences that it samples for; `views`: what was uploaded for it; `logits`: [S,
    vocabulary] of their rows, and of padding rows behind them, valid until the next step is begun.
    """

    sampling: list[Sequence]
    decodes: int
    views: dict[str, Tensor]
    logits: Tensor
    captured: CapturedSteps | None
    """If they have the sampling of this step, too."""
    scores: Scores | None
    """Log-probabilities of prompts, if any are requested."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device may still be computing. `sampling`: the sequences that it samples for."""

    sampling: list[Sequence]
    outputs: SamplerOutputs | None
    mask_errors: dict[str, MaskFault]
    scores: Scores | None
    done: torch.cuda.Event | None
    """None: the step has finished."""


class Runner:
    """Owns the model, its KV cache and the slots.

    `begin` and `sample` return as soon as the work is queued on the device, and a step may be launched before
    the previous one was collected: the device computes them in order, and finds the newest tokens in its own
    tables. A step's data is uploaded in one copy; only token masks need a second one. They are asked in
    `sample`, so a step whose masks depend on the previous step's tokens can be begun before those are known.

    Its methods may run on any thread, one at a time: each makes the model's device the current one, for
    kernels, graphs and events.
    """

    def __init__(
        self, model: CausalModel, backend: Backend, settings: EngineSettings, capacity: Capacity
    ) -> None:
        size = settings.block_size
        self._model = model
        self._backend = backend
        self._cache = KVCache(
            model.kv_shape,
            blocks=capacity.kv_blocks,
            block_size=size,
            dtype=model.dtype,
            device=model.device,
        )
        self._slots = SlotTable(settings.max_running, -(-capacity.max_context // size), model.device)
        self._penalties = PenaltyTable(settings.max_running, model.vocab_size, model.device)
        log.info(
            "counts for penalties: %.1f MB, %d sequences by %d tokens",
            self._penalties.size_bytes / 1e6,
            *self._penalties.seen.shape,
        )
        self._operations = backend.operations(model, self._cache, settings.max_running)
        # No reference to this runner: dropping it must free device memory without the garbage collector.
        self._step = DeviceStep(model, backend, self._operations, self._slots)
        self._captured = (
            CapturedSteps(
                self._step,
                self._slots,
                longest=capacity.max_context,
                largest=settings.largest_step,
                most_tiles=self._operations.most_tiles,
            )
            if backend.graphs
            else None
        )

    @torch.inference_mode()
    def rehearse(self) -> int:
        """Run the largest of the steps to be captured; returns how many graphs there will be."""
        if self._captured is None:
            return 0
        with current(self._model.device):
            return self._captured.rehearse()

    @torch.inference_mode()
    def capture(self) -> None:
        """Compile and capture everything that any step will use."""
        if self._captured is not None:
            with current(self._model.device):
                self._captured.capture()

    @torch.inference_mode()
    def begin(self, batch: Batch) -> Begun:
        """Have the device compute a step up to its logits; `sample` it before the next one is begun."""
        with current(self._model.device):
            return self._begin(batch)

    @torch.inference_mode()
    def sample(self, begun: Begun) -> Launched:
        """Have the device sample a step's tokens; its masks must have been told all tokens before."""
        with current(self._model.device):
            return self._sample(begun)

    def _begin(self, batch: Batch) -> Begun:
        staging = Staging()
        sampling = [chunk.sequence for chunk in batch.chunks if chunk.samples]
        chunks = chunk_rows(batch)
        captured = self._stage(staging, batch, chunks)
        stage_sampling(staging, sampling)
        scored = scored_chunks(batch, chunks)
        if scored:
            stage_scores(staging, scored)
        views = staging.upload(self._model.device)
        self._slots.load(views)
        self._penalties.load(views)
        if self._backend.clears_blocks and batch.new_blocks:
            self._cache.clear(views["new_blocks"])
        slots = views["decode_slots"]
        longest = max((chunk.end for chunk in batch.decodes), default=0)
        scores = None
        if batch.prefills:
            inputs = step_inputs(views, self._slots)
            layout, hidden = self._compute_prompts(inputs, chunks, longest, captured)
            scores = self._score(scored, views, hidden, layout)
            # The logits' weights are many: do not read them if no row needs them.
            logits = self._step.logits(hidden[inputs.rows], layout) if sampling else hidden.new_empty(0)
        else:
            logits = captured.decodes.forward(slots) if captured else self._step.decode(slots, longest)
        if batch.prefills or not all(map(_is_plain, sampling)):
            captured = None
        return Begun(sampling, len(batch.decodes), views, logits, captured, scores)

    def _sample(self, begun: Begun) -> Launched:
        sampling, views = begun.sampling, begun.views
        slots = views["decode_slots"]
        masks, mask_errors = self._fill_masks(sampling)
        outputs = None
        if begun.captured is not None:
            outputs = SamplerOutputs(begun.captured.decodes.finish(len(slots)), None, None)
        elif sampling:
            rules = sampler_inputs(views, self._slots, self._penalties, masks, sampling)
            outputs = self._backend.sample(begun.logits[: len(sampling)], rules)
            self._slots.advance(slots[: begun.decodes], views["sampling_slots"], outputs.status[0])
            if rules.penalties is not None:
                rules.penalties.count(outputs.status[0])
        return self._send_back(sampling, outputs, mask_errors, begun.scores)

    def collect(self, launched: Launched) -> list[Sampled]:
        """Wait for a step; returns results of the chunks that sample, in order, then of those only scored."""
        if launched.done is not None:
            launched.done.synchronize()
        results: list[Sampled] = []
        if launched.outputs is not None:
            results = sampled_tokens(launched.sampling, launched.outputs, launched.mask_errors)
        return results if launched.scores is None else with_scores(results, launched.scores)

    @torch.inference_mode()
    def reset(self) -> None:
        """Discard what a failed step may have left."""
        with current(self._model.device):
            self._cache.reset()
            self._operations.reset()

    def _stage(self, staging: Staging, batch: Batch, chunks: tuple[ChunkRows, ...]) -> CapturedSteps | None:
        """Stage everything but the sampling; returns the captured steps if one of them fits this step."""
        size = self._cache.block_size
        entries = [
            (slot_of(chunk.sequence), chunk.start // size, chunk.sequence.blocks[chunk.start // size])
            for chunk in batch.decodes
            if chunk.start % size == 0
        ]
        for chunk in batch.prefills:
            sequence = chunk.sequence
            entries += [(slot_of(sequence), column, block) for column, block in enumerate(sequence.blocks)]
        stage_sequences(staging, [(chunk.sequence, chunk.end) for chunk in batch.prefills])
        stage_blocks(staging, entries)
        begun = [chunk.sequence for chunk in batch.prefills if chunk.samples]
        stage_penalties(staging, [each for each in begun if each.request.sampling.penalised])
        staging.integers("new_blocks", batch.new_blocks if self._backend.clears_blocks else [])
        slots = [slot_of(chunk.sequence) for chunk in batch.decodes]
        tiles = self._operations.tiles(chunks)
        rows = chunks[-1].end if chunks else len(slots)
        captured, padding = self._captured, 0
        if captured is not None and chunks:
            fitting = captured.prompts.size_for(rows, len(tiles))
            captured, padding = (captured, fitting - rows) if fitting else (None, 0)
        elif captured is not None:
            slots += [self._slots.spare] * captured.decodes.padding(rows)
        staging.integers("decode_slots", slots)
        stage_prompts(staging, batch, tiles, padding=padding, spare=self._slots.spare)
        return captured

    def _compute_prompts(
        self,
        inputs: StepInputs,
        chunks: tuple[ChunkRows, ...],
        longest_decode: int,
        captured: CapturedSteps | None,
    ) -> tuple[StepLayout, Tensor]:
        """Compute a step with prompts; returns its layout, and its hidden states."""
        layout = StepLayout(
            tables=self._slots.tables,
            slots=inputs.slots,
            positions=inputs.positions,
            decode_lengths=inputs.decode_lengths,
            longest_decode=longest_decode,
            chunks=chunks,
            tiles=inputs.tiles,
        )
        hidden = captured.prompts.forward(inputs) if captured else self._step.forward(inputs.tokens, layout)
        return layout, hidden

    def _score(
        self, scored: list[ScoredChunk], views: dict[str, Tensor], hidden: Tensor, layout: StepLayout
    ) -> Scores | None:
        """Return log-probabilities of the prompts' tokens, if any are requested."""
        if not scored:
            return None
        return score(scored, views, hidden, lambda rows: self._step.logits(rows, layout))

    def _fill_masks(self, sampling: list[Sequence]) -> tuple[Tensor | None, dict[str, MaskFault]]:
        """Fill every token mask; returns their words on the device, and errors by request."""
        words, errors = fill_masks([each for each in sampling if each.masked], self._model.vocab_size)
        return None if words is None else upload(words, self._model.device), errors

    def _send_back(
        self,
        sampling: list[Sequence],
        outputs: SamplerOutputs | None,
        mask_errors: dict[str, MaskFault],
        scores: Scores | None,
    ) -> Launched:
        """Start copying the results to the host."""
        done = None
        if self._model.device.type == "cuda":
            outputs = None if outputs is None else outputs.to_host()
            scores = None if scores is None else scores.to_host()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return Launched(sampling, outputs, mask_errors, scores, done)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU this thread's current device within the `with` block; a CPU needs nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _is_plain(sequence: Sequence) -> bool:
    return sequence.request.sampling.plain
