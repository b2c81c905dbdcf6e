"""Runs a scheduled step on the device: sequences become tensors, and tensors tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_models.engine.attention import PagedAttention, PrefillChunk, StepLayout
from triton_models.engine.batch import Batch, Chunk
from triton_models.engine.block_manager import PADDING_BLOCK
from triton_models.engine.kv_cache import KVCache
from triton_models.engine.model import CausalModel
from triton_models.engine.sampler import MASK_BITS, SamplerInputs, SamplerOutputs, sample
from triton_models.engine.sequence import Sequence, TokenLogprobs
from triton_models.engine.staging import Staging
from triton_models.errors import TokenMaskError


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sequence's next token, or why it has none."""

    sequence: Sequence
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Runner:
    """Owns the model and its KV cache. A step's indices and parameters go to the device in one copy."""

    def __init__(self, model: CausalModel, cache: KVCache) -> None:
        self._model = model
        self._cache = cache

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[Sampled]:
        """Compute a step; returns a result for every chunk that samples, in order."""
        staging = Staging()
        chunks = batch.chunks
        _stage_layout(staging, batch, chunks, self._cache.block_size)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        _stage_sampling(staging, sampling)
        masks, mask_errors = self._fill_masks(sampling)
        views = staging.upload(self._model.device)
        if batch.new_blocks:
            self._cache.clear(views["new_blocks"])
        attention = PagedAttention(self._cache, _layout(views, batch))
        logits = self._model.forward(views["tokens"], views["positions"], attention, views["rows"])
        if not sampling:
            return []
        outputs = sample(logits, _sampler_inputs(views, masks, sampling))
        return _results(sampling, outputs, mask_errors)

    def reset(self) -> None:
        """Forget what a failed step may have left."""
        with torch.inference_mode():
            self._cache.reset()

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


def _stage_layout(staging: Staging, batch: Batch, chunks: list[Chunk], block_size: int) -> None:
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    for chunk in chunks:
        sequence = chunk.sequence
        tokens += sequence.tokens[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        slots += _slots(sequence.blocks, chunk.start, chunk.end, block_size)
        if chunk.samples:
            rows.append(len(tokens) - 1)
    staging.integers("tokens", tokens)
    staging.integers("positions", positions)
    staging.integers("slots", slots)
    staging.integers("rows", rows)
    staging.integers("new_blocks", batch.new_blocks)
    staging.integers("decode_blocks", _padded_tables(batch.decodes))
    staging.integers("decode_lengths", [chunk.end for chunk in batch.decodes])
    for number, chunk in enumerate(batch.prefills):
        staging.integers(f"chunk_blocks:{number}", chunk.sequence.blocks[: -(-chunk.end // block_size)])


def _slots(blocks: list[int], start: int, end: int, block_size: int) -> Iterable[int]:
    for position in range(start, end):
        yield blocks[position // block_size] * block_size + position % block_size


def _padded_tables(decodes: list[Chunk]) -> list[int]:
    width = max((len(chunk.sequence.blocks) for chunk in decodes), default=0)
    table: list[int] = []
    for chunk in decodes:
        blocks = chunk.sequence.blocks
        table += blocks
        table += [PADDING_BLOCK] * (width - len(blocks))
    return table


def _layout(views: dict[str, Tensor], batch: Batch) -> StepLayout:
    chunks = []
    row = len(batch.decodes)
    for number, chunk in enumerate(batch.prefills):
        chunks.append(PrefillChunk(row, row + chunk.count, chunk.start, views[f"chunk_blocks:{number}"]))
        row += chunk.count
    return StepLayout(
        slots=views["slots"],
        decode_blocks=views["decode_blocks"].view(len(batch.decodes), -1)
        if batch.decodes
        else views["decode_blocks"],
        decode_lengths=views["decode_lengths"],
        chunks=tuple(chunks),
    )


def _stage_sampling(staging: Staging, sampling: list[Sequence]) -> None:
    params = [each.request.sampling for each in sampling]
    random = [row for row, each in enumerate(params) if not each.greedy]
    truncated = [place for place, row in enumerate(random) if params[row].truncated]
    cut = [params[random[place]] for place in truncated]
    bias = [(row, id_, value) for row, each in enumerate(params) for id_, value in each.logit_bias.items()]
    banned = [
        (row, id_)
        for row, (sequence, each) in enumerate(zip(sampling, params, strict=True))
        if sequence.generated < each.min_tokens
        for id_ in each.stop_token_ids
    ]
    staging.integers("random_rows", random)
    staging.integers("seeds", [sampling[row].seed for row in random])
    staging.integers("counters", [sampling[row].generated for row in random])
    staging.floats("temperatures", [params[row].temperature for row in random])
    staging.integers("truncated", truncated)
    staging.integers("top_k", [each.top_k for each in cut])
    staging.floats("top_p", [each.top_p for each in cut])
    staging.integers("bias_rows", [row for row, _, _ in bias])
    staging.integers("bias_ids", [id_ for _, id_, _ in bias])
    staging.floats("bias_values", [value for _, _, value in bias])
    staging.integers("banned_rows", [row for row, _ in banned])
    staging.integers("banned_ids", [id_ for _, id_ in banned])
    staging.integers("masked_rows", [row for row, each in enumerate(params) if each.mask is not None])
    staging.integers("logprob_rows", [row for row, each in enumerate(params) if each.logprobs is not None])


def _sampler_inputs(
    views: dict[str, Tensor], mask_words: Tensor | None, sampling: list[Sequence]
) -> SamplerInputs:
    return SamplerInputs(
        random_rows=views["random_rows"],
        seeds=views["seeds"],
        counters=views["counters"],
        temperatures=views["temperatures"],
        truncated=views["truncated"],
        top_k=views["top_k"],
        top_p=views["top_p"],
        bias_rows=views["bias_rows"],
        bias_ids=views["bias_ids"],
        bias_values=views["bias_values"],
        banned_rows=views["banned_rows"],
        banned_ids=views["banned_ids"],
        masked_rows=views["masked_rows"],
        mask_words=mask_words,
        logprob_rows=views["logprob_rows"],
        top_logprobs=max((each.request.sampling.logprobs or 0 for each in sampling), default=0),
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
        results.append(Sampled(sequence, tokens[row], logprobs.get(row), error))
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
