"""From logits to tokens: each row by its own rules.

In order: log-probabilities of the raw logits; penalties (repetition, frequency, presence); biases; bans and
masks; temperature; min_p, top_k, top_p; the draw. Divergence 12 says where vLLM's order differs.

No row's result depends on another's: each operation works along the vocabulary only. All but the last stage
run on the device that holds the logits and never wait for it: rows are chosen by indices from the host, never
by boolean masks, whose number of rows the host would have to fetch first, and the requests tell which
features a step uses. The last stage is a `Chooser`: kernels on a GPU, NumPy and torch on a CPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from triton_models.engine.draw import Limits, draw, row_keys
from triton_models.engine.sampling import GREEDY_BELOW
from triton_models.engine.sequence import Sequence
from triton_models.engine.slots import (
    GuessedRows,
    PenalisedRows,
    PenaltyTable,
    SlotTable,
    Staged,
    Staging,
    slot_of,
)

MASK_BITS = 32


class PlainRules(Enum):
    """What is heeded of plain requests (`SamplingParams.plain`), beside temperatures and seeds."""

    NOTHING_MORE = "nothing more"
    TRUNCATION = "truncation"
    TRUNCATION_AND_MASKS = "truncation and masks"


def plain_rules(sampling: list[Sequence]) -> PlainRules | None:
    """Return what must be heeded of the rows of a step; None if one of them is not plain."""
    rules = PlainRules.NOTHING_MORE
    for sequence in sampling:
        params = sequence.request.sampling
        if not params.plain:
            return None
        if sequence.masked:
            rules = PlainRules.TRUNCATION_AND_MASKS
        elif params.truncated and not params.greedy and rules is PlainRules.NOTHING_MORE:
            rules = PlainRules.TRUNCATION
    return rules


@dataclass(slots=True, kw_only=True)
class SamplerInputs:
    """The rules of S rows, as tensors on the logits' device. Row numbers are int64, and index the S rows.

    `temperatures`: [S] float32, greedy below `GREEDY_BELOW`. `seeds`, `counters`: [S] int64, for random
    numbers. `top_k`: [S] int64; `top_p`, `min_p`: [S] float64; see `draw.kept`. `random`: whether any row is
    not greedy; `truncated`: whether any of these has a top_k, top_p or min_p. The rest is None where no row
    has it: `penalties`; `bias`, the rows, ids and values ([B] float64) that are added to single logits;
    `banned`, the rows and ids of single logits that are removed; `masks`, the rows with a set of allowed
    tokens, and the sets as [M, ceil(vocab / 32)] int32; `logprob_rows`, the rows whose log-probabilities are
    reported, with those of the `top_logprobs` most likely tokens each.
    """

    temperatures: Tensor
    seeds: Tensor
    counters: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    random: bool = True
    truncated: bool = False
    penalties: PenalisedRows | None = None
    bias: tuple[Tensor, Tensor, Tensor] | None = None
    banned: tuple[Tensor, Tensor] | None = None
    masks: tuple[Tensor, Tensor] | None = None
    logprob_rows: Tensor | None = None
    top_logprobs: int = 0

    @property
    def constrained(self) -> bool:
        """Whether any row's logits are changed before a token is chosen."""
        return any(each is not None for each in (self.penalties, self.bias, self.banned, self.masks))

    @property
    def removes(self) -> bool:
        """Whether tokens are removed from any row."""
        return self.banned is not None or self.masks is not None


@dataclass(frozen=True, slots=True)
class SamplerOutputs:
    """`status`: [3, S] int64 of token ids, whether the logits were finite, whether any token was allowed.

    `logprobs`: [P, 1 + top] float32, the sampled token's first; `top_ids`: [P, top] int64; None without rows.
    """

    status: Tensor
    logprobs: Tensor | None
    top_ids: Tensor | None


def stage_sampling(
    staging: Staging, sampling: list[Sequence], followed: Mapping[int, tuple[int, int]]
) -> None:
    """Stage what a step's rows need in addition to what their slots hold; for most rows, nothing.

    `sampling`, `followed`: as in `Step`.
    """
    penalised: list[int] = []
    places_before: list[int] = []
    guesses_before: list[int] = []
    bias_rows: list[int] = []
    bias_ids: list[int] = []
    bias_values: list[float] = []
    banned_rows: list[int] = []
    banned_ids: list[int] = []
    masked: list[int] = []
    logprobs: list[int] = []
    for row, sequence in enumerate(sampling):
        params = sequence.request.sampling
        if sequence.masked:
            masked.append(row)
        if params.plain:
            continue
        ahead, _ = followed.get(row, (0, 0))
        if params.penalised:
            places_before += [len(penalised)] * ahead
            guesses_before += [followed[each][1] for each in range(row - ahead + 1, row + 1)]
            penalised.append(row)
        bias_rows += [row] * len(params.logit_bias)
        bias_ids += params.logit_bias
        bias_values += params.logit_bias.values()
        if sequence.length + ahead - len(sequence.request.prompt_ids) < params.min_tokens:
            banned_rows += [row] * len(params.stop_token_ids)
            banned_ids += params.stop_token_ids
        if params.logprobs is not None:
            logprobs.append(row)
    staging.integers("sampling_slots", [slot_of(sequence) for sequence in sampling])
    places = [followed.get(row, (0, -1)) for row in range(len(sampling))] if followed else []
    staging.integers("ahead", [ahead for ahead, _ in places])
    staging.integers("guesses", [guess for _, guess in places])
    staging.integers("penalised_rows", penalised)
    staging.integers("guesses_before", places_before + guesses_before)
    staging.integers("biased", bias_rows + bias_ids)
    staging.floats("bias_values", bias_values)
    staging.integers("banned", banned_rows + banned_ids)
    staging.integers("masked_rows", masked)
    staging.integers("logprob_rows", logprobs)


def sampler_inputs(
    staged: Staged,
    slots: SlotTable,
    penalties: PenaltyTable,
    masks: tuple[Tensor, Tensor] | None,
    sampling: list[Sequence],
) -> SamplerInputs:
    """Build a step's sampler inputs from what was uploaded and what the slots hold; `masks`: as there."""
    rows, penalised, logprobs = staged.sampling_slots, staged.penalised_rows, staged.logprob_rows
    params = [each.request.sampling for each in sampling]
    inputs = plain_inputs(slots, rows)
    if staged.ahead.numel():
        inputs.counters = inputs.counters + staged.ahead
    inputs.random = any(not each.greedy for each in params)
    inputs.truncated = any(each.truncated and not each.greedy for each in params)
    if penalised.numel():
        guessed = GuessedRows(staged.ahead, staged.guesses, staged.guesses_before)
        inputs.penalties = PenalisedRows(
            penalties, penalised, rows[penalised], guessed if staged.ahead.numel() else None
        )
    if staged.biased.numel():
        inputs.bias = *staged.biased.view(2, -1), staged.bias_values
    if staged.banned.numel():
        inputs.banned = tuple(staged.banned.view(2, -1))
    inputs.masks = masks
    if logprobs.numel():
        inputs.logprob_rows = logprobs
        inputs.top_logprobs = max(each.logprobs or 0 for each in params)
    return inputs


def plain_inputs(slots: SlotTable, rows: Tensor) -> SamplerInputs:
    """Return the sampler's inputs for `rows`, [S] int64 slots of plain requests (`SamplingParams.plain`)."""
    (_, counters, seeds, top_k), (temperatures, top_p, min_p) = slots.rules(rows)
    return SamplerInputs(
        temperatures=temperatures.float(),
        seeds=seeds,
        counters=counters,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )


Chooser = Callable[[Tensor, SamplerInputs], Tensor]
"""Chooses tokens from logits after penalties, biases and masks: temperature, truncation and the draw remain.

Takes [S, vocab] logits of any float dtype, which it may change, and returns a `SamplerOutputs.status`.
"""


def choose(logits: Tensor, inputs: SamplerInputs) -> Tensor:
    """Choose on the CPU, row by row, looking only at the few tokens that matter in most rows; a `Chooser`.

    Operators over all rows at once would spend their time in temporary memory, and sort whole rows although a
    trained model leaves a hundred tokens to choose from. Logits of another device are copied to the host.
    """
    rows = logits.float().cpu().numpy()
    tokens = rows.argmax(axis=-1)
    finite = np.isfinite(rows).all(axis=-1)
    peaks = rows[np.arange(len(rows)), tokens]
    if inputs.random:
        keys = row_keys(inputs.seeds.cpu().numpy(), inputs.counters.cpu().numpy())
        temperatures = inputs.temperatures.cpu().numpy()
        limits = (inputs.top_k.tolist(), inputs.top_p.tolist(), inputs.min_p.tolist())
        # Differences of huge logits, divided by a tiny temperature, become -inf.
        with np.errstate(over="ignore"):
            for row in np.flatnonzero((temperatures >= GREEDY_BELOW) & np.isfinite(peaks)):
                # With the largest logit shifted to 0, no temperature can make an exponential overflow.
                scaled = rows[row] - peaks[row]
                scaled *= np.float32(1) / temperatures[row]
                tokens[row] = draw(scaled, Limits(*(each[row] for each in limits)), keys[row])
    status = np.stack([tokens, finite, peaks > -np.inf]).astype(np.int64, copy=False)
    return torch.from_numpy(status).to(logits.device)


Penaliser = Callable[[PenalisedRows, Tensor], None]
"""Applies penalties to [S, vocab] float32 logits in place."""


def forbid(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Take the tokens that masks do not allow away, in place; a `Forbidder`."""
    bits = torch.arange(MASK_BITS, dtype=torch.int32, device=logits.device)
    allowed = ((words[..., None] >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


Forbidder = Callable[[Tensor, Tensor, Tensor], None]
"""Takes [S, vocab] float32 logits, which it changes, and the rows and sets of `SamplerInputs.masks`."""


def sample(
    logits: Tensor,
    inputs: SamplerInputs,
    choose: Chooser = choose,
    penalise: Penaliser = PenalisedRows.apply,
    forbid: Forbidder = forbid,
) -> SamplerOutputs:
    """Choose a token per row.

    Args:
        logits: [S, vocab] of any float dtype; may be changed in place.
        inputs: the rows' rules.
        choose: the last stage, of which a device may have a faster implementation.
        penalise: the same of the penalties.
        forbid: the same of the masks.

    Returns:
        What was chosen. If a row's logits are not finite, or no token is allowed, its token is meaningless.
    """
    reported = inputs.logprob_rows
    # The raw distribution: taken before anything below changes the logits.
    raw = None if reported is None else logits[reported].float().log_softmax(dim=-1)
    if inputs.constrained:
        logits = logits.float()
        # Removed tokens have logits of -inf on purpose; nothing else makes a finite logit infinite.
        finite = torch.isfinite(logits).all(dim=-1) if inputs.removes else None
        _apply_constraints(logits, inputs, penalise, forbid)
        status = choose(logits, inputs)
        if finite is not None:
            status[1] = finite
    else:
        status = choose(logits, inputs)
    if raw is None:
        return SamplerOutputs(status, None, None)
    top, top_ids = raw.topk(inputs.top_logprobs, dim=-1)
    sampled = raw.gather(1, status[0, reported, None])
    return SamplerOutputs(status, torch.cat([sampled, top], dim=1), top_ids)


def _apply_constraints(logits: Tensor, inputs: SamplerInputs, penalise: Penaliser, forbid: Forbidder) -> None:
    """Apply penalties, add biases, and remove tokens that are banned or not allowed, in place."""
    if inputs.penalties is not None:
        penalise(inputs.penalties, logits)
    if inputs.bias is not None:
        rows, ids, values = inputs.bias
        logits.index_put_((rows, ids), values.float(), accumulate=True)
    if inputs.banned is not None:
        logits[inputs.banned] = -torch.inf
    if inputs.masks is not None:
        forbid(logits, *inputs.masks)
