"""Builds the sampler's inputs from sequences; few rows need more than a temperature and a seed."""

from torch import Tensor

from triton_models.engine.penalties import PenalisedRows, PenaltyTable
from triton_models.engine.sampler import SamplerInputs
from triton_models.engine.sequence import Sequence
from triton_models.engine.slots import SlotTable, Staging, slot_of


def stage_sampling(staging: Staging, sampling: list[Sequence]) -> None:
    """Stage what a step's rows need in addition to what their slots hold; for most rows, nothing."""
    truncated: list[int] = []
    penalised: list[int] = []
    bias: list[tuple[int, int, float]] = []
    banned: list[tuple[int, int]] = []
    masked: list[int] = []
    logprobs: list[int] = []
    for row, sequence in enumerate(sampling):
        params = sequence.request.sampling
        if params.plain:
            continue
        if params.truncated and not params.greedy:
            truncated.append(row)
        if params.penalised:
            penalised.append(row)
        bias += [(row, id_, value) for id_, value in params.logit_bias.items()]
        if sequence.length - len(sequence.request.prompt_ids) < params.min_tokens:
            banned += [(row, id_) for id_ in params.stop_token_ids]
        if params.mask is not None:
            masked.append(row)
        if params.logprobs is not None:
            logprobs.append(row)
    staging.integers("sampling_slots", [slot_of(sequence) for sequence in sampling])
    staging.integers("truncated", truncated)
    staging.integers("penalised", penalised)
    staging.integers("bias_rows", [row for row, _, _ in bias])
    staging.integers("bias_ids", [id_ for _, id_, _ in bias])
    staging.floats("bias_values", [value for _, _, value in bias])
    staging.integers("banned_rows", [row for row, _ in banned])
    staging.integers("banned_ids", [id_ for _, id_ in banned])
    staging.integers("masked_rows", masked)
    staging.integers("logprob_rows", logprobs)


def sampler_inputs(
    views: dict[str, Tensor],
    slots: SlotTable,
    penalties: PenaltyTable,
    mask_words: Tensor | None,
    sampling: list[Sequence],
) -> SamplerInputs:
    """Build a step's sampler inputs from what was uploaded and what the slots hold."""
    rows, penalised = views["sampling_slots"], views["penalised"]
    logprobs = views["logprob_rows"].numel() > 0
    return SamplerInputs(
        temperatures=slots.temperatures[rows],
        seeds=slots.seeds[rows],
        counters=slots.drawn[rows],
        top_k=slots.top_k[rows],
        top_p=slots.top_p[rows],
        min_p=slots.min_p[rows],
        random=any(not each.request.sampling.greedy for each in sampling),
        truncated=views["truncated"],
        penalties=PenalisedRows(penalties, penalised, rows[penalised]) if penalised.numel() else None,
        bias_rows=views["bias_rows"],
        bias_ids=views["bias_ids"],
        bias_values=views["bias_values"],
        banned_rows=views["banned_rows"],
        banned_ids=views["banned_ids"],
        masked_rows=views["masked_rows"],
        mask_words=mask_words,
        logprob_rows=views["logprob_rows"],
        top_logprobs=max(each.request.sampling.logprobs or 0 for each in sampling) if logprobs else 0,
    )


def plain_inputs(slots: SlotTable, rows: Tensor) -> SamplerInputs:
    """Return the sampler's inputs for `rows`, [S] int64 slots of plain requests (`SamplingParams.plain`)."""
    return SamplerInputs.unconstrained(
        temperatures=slots.temperatures[rows],
        seeds=slots.seeds[rows],
        counters=slots.drawn[rows],
        top_k=slots.top_k[rows],
        top_p=slots.top_p[rows],
        min_p=slots.min_p[rows],
        random=True,
        truncated=rows[:0],
    )
