"""Runs a scheduled step on the device: sequences become tensors, and tensors tokens."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_models.engine.backend import Backend
from triton_models.engine.batch import Batch
from triton_models.engine.graphs import DecodeGraphs
from triton_models.engine.kv_cache import KVCache
from triton_models.engine.layout import ChunkRows, StepLayout
from triton_models.engine.model import CausalModel
from triton_models.engine.penalties import PenaltyTable, stage_penalties
from triton_models.engine.sampler import MASK_BITS, SamplerOutputs
from triton_models.engine.sampling_rows import plain_inputs, sampler_inputs, stage_sampling
from triton_models.engine.sequence import Sequence, TokenLogprobs
from triton_models.engine.settings import Capacity, EngineSettings
from triton_models.engine.slots import SlotTable, slot_of, stage_blocks, stage_sequences
from triton_models.engine.staging import Staging
from triton_models.errors import TokenMaskError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sequence's next token, or why it has none."""

    sequence: Sequence
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    spoilt: bool = False
    """The model's output is not finite, so what it left in the KV cache is not to be trusted either."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device may still be computing. `sampling`: the sequences that it samples for."""

    sampling: list[Sequence]
    outputs: SamplerOutputs | None
    mask_errors: dict[str, str]
    done: torch.cuda.Event | None
    """None: it is done."""


class Runner:
    """Owns the model, its KV cache and the slots.

    `launch` returns as soon as the device has its work, and a step may be launched before the one before it
    was collected: the device computes them in order, and finds the newest tokens in its own tables. What
    the host knows goes there in one copy.
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
        self._graphs = (
            DecodeGraphs(self, self._slots, longest=capacity.max_context) if backend.graphs else None
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile and capture everything that steps will use, whatever they hold."""
        if self._graphs is not None:
            self._graphs.capture()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Have the device compute a step."""
        staging = Staging()
        sampling = [chunk.sequence for chunk in batch.chunks if chunk.samples]
        self._stage(staging, batch)
        stage_sampling(staging, sampling)
        masks, mask_errors = self._fill_masks(sampling)
        views = staging.upload(self._model.device)
        self._slots.load(views)
        self._penalties.load(views)
        if self._backend.clears_blocks and batch.new_blocks:
            self._cache.clear(views["new_blocks"])
        slots = views["decode_slots"]
        if self._graphs is None or batch.prefills:
            longest = max((chunk.end for chunk in batch.decodes), default=0)
            logits = self.forward(slots, longest, _prompts(batch, views))
        else:
            logits = self._graphs.forward(slots)
        outputs = None
        if self._graphs is not None and not batch.prefills and all(map(_is_plain, sampling)):
            outputs = SamplerOutputs(self._graphs.finish(len(slots)), None, None)
        elif sampling:
            inputs = sampler_inputs(views, self._slots, self._penalties, masks, sampling)
            outputs = self._backend.sample(logits[: len(sampling)], inputs)
            self._slots.advance(slots[: len(batch.decodes)], views["sampling_slots"], outputs.status[0])
            if inputs.penalties is not None:
                inputs.penalties.count(outputs.status[0])
        return self._send_back(sampling, outputs, mask_errors)

    def collect(self, launched: Launched) -> list[Sampled]:
        """Wait for a step; returns a result for every chunk that samples, in order."""
        if launched.done is not None:
            launched.done.synchronize()
        if launched.outputs is None:
            return []
        return _results(launched.sampling, launched.outputs, launched.mask_errors)

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget what a failed step may have left."""
        self._cache.reset()

    def _stage(self, staging: Staging, batch: Batch) -> None:
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
        if self._graphs is not None and not batch.prefills:
            slots += [self._slots.spare] * self._graphs.padding(len(slots))
        staging.integers("decode_slots", slots)
        _stage_prompts(staging, batch)

    def forward(self, decodes: Tensor, longest_decode: int, prompts: "_Prompts | None" = None) -> Tensor:
        """Compute a step; returns the logits of what samples: the decodes ([D] int64 slots), then prompts."""
        tokens, positions = self._slots.tokens[decodes], self._slots.lengths[decodes]
        slots, rows = decodes, torch.arange(len(decodes), device=decodes.device)
        chunks: tuple[ChunkRows, ...] = ()
        if prompts is not None:
            tokens = torch.cat([tokens, prompts.tokens])
            positions = torch.cat([positions, prompts.positions])
            slots = torch.cat([slots, prompts.slots])
            rows = torch.cat([rows, prompts.rows])
            chunks = prompts.chunks
        layout = StepLayout(
            tables=self._slots.tables,
            slots=slots.int(),
            positions=positions,
            decodes=len(decodes),
            longest_decode=longest_decode,
            chunks=chunks,
        )
        return self._model.forward(tokens, self._operations(layout), rows)

    def finish(self, decodes: Tensor, logits: Tensor) -> Tensor:
        """Sample for plain rows, [D] int64 slots; returns their status, [3, D]."""
        status = self._backend.sample(logits, plain_inputs(self._slots, decodes)).status
        self._slots.advance(decodes, decodes, status[0])
        return status

    def _fill_masks(self, sampling: list[Sequence]) -> tuple[Tensor | None, dict[str, str]]:
        """Ask every token mask; returns their words on the device, and errors by request."""
        errors: dict[str, str] = {}
        masked = [each for each in sampling if each.request.sampling.mask is not None]
        if not masked:
            return None, errors
        words = torch.zeros((len(masked), -(-self._model.vocab_size // MASK_BITS)), dtype=torch.int32)
        for row, sequence in zip(words, masked, strict=True):
            mask = sequence.request.sampling.mask
            try:
                if mask is not None:
                    mask.fill(row)
            except TokenMaskError as error:
                errors[sequence.request.request_id] = str(error)
        return words.to(self._model.device), errors

    def _send_back(
        self, sampling: list[Sequence], outputs: SamplerOutputs | None, mask_errors: dict[str, str]
    ) -> Launched:
        """Start what was sampled on its way to the host."""
        done = None
        if self._model.device.type == "cuda":
            outputs = None if outputs is None else outputs.to_host()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return Launched(sampling, outputs, mask_errors, done)


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The prompt tokens of a step, P in all, on the device; their rows come behind the decodes'."""

    slots: Tensor
    tokens: Tensor
    positions: Tensor
    rows: Tensor
    """[S] int64: the rows of the step that sample."""
    chunks: tuple[ChunkRows, ...]


def _is_plain(sequence: Sequence) -> bool:
    return sequence.request.sampling.plain


def _stage_prompts(staging: Staging, batch: Batch) -> None:
    slots: list[int] = []
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    for chunk in batch.prefills:
        sequence = chunk.sequence
        slots += [slot_of(sequence)] * chunk.count
        tokens += sequence.tokens[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        if chunk.samples:
            rows.append(len(batch.decodes) + len(tokens) - 1)
    staging.integers("prompt_slots", slots)
    staging.integers("prompt_tokens", tokens)
    staging.integers("prompt_positions", positions)
    staging.integers("prompt_rows", rows)


def _prompts(batch: Batch, views: dict[str, Tensor]) -> _Prompts:
    chunks = []
    row = len(batch.decodes)
    for chunk in batch.prefills:
        chunks.append(ChunkRows(slot_of(chunk.sequence), row, row + chunk.count, chunk.start))
        row += chunk.count
    return _Prompts(
        slots=views["prompt_slots"],
        tokens=views["prompt_tokens"],
        positions=views["prompt_positions"],
        rows=views["prompt_rows"],
        chunks=tuple(chunks),
    )


def _results(sampling: list[Sequence], outputs: SamplerOutputs, mask_errors: dict[str, str]) -> list[Sampled]:
    tokens, finite, allowed = outputs.status.tolist()
    logprobs = _logprobs(sampling, tokens, outputs)
    results = []
    for row, sequence in enumerate(sampling):
        error = mask_errors.get(sequence.request.request_id)
        if error is None and not finite[row]:
            error = "the model's output is not finite"
        if error is None and not allowed[row]:
            error = "no token is allowed here"
        results.append(Sampled(sequence, tokens[row], logprobs.get(row), error, spoilt=not finite[row]))
    return results


def _logprobs(
    sampling: list[Sequence], tokens: list[int], outputs: SamplerOutputs
) -> dict[int, TokenLogprobs]:
    """Return the log-probabilities of the rows that asked for them."""
    if outputs.logprobs is None or outputs.top_ids is None:
        return {}
    rows = [row for row, each in enumerate(sampling) if each.request.sampling.logprobs is not None]
    found = {}
    for row, values, ids in zip(rows, outputs.logprobs.tolist(), outputs.top_ids.tolist(), strict=True):
        wanted = sampling[row].request.sampling.logprobs or 0
        found[row] = TokenLogprobs(
            id=tokens[row],
            logprob=values[0],
            top=tuple(zip(ids[:wanted], values[1 : wanted + 1], strict=True)),
        )
    return found
