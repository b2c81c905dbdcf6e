"""From logits to tokens: each row by its own rules, on the device that holds the logits.

In order: log-probabilities of the raw logits; penalties (repetition, frequency, presence); biases; bans and
masks; temperature; min_p, top_k, top_p; the draw. Divergence 12 says where vLLM's order differs.

No row's result depends on another's: each operation works along the vocabulary only. None waits for the
device: rows are chosen by indices from the host, never by boolean masks, whose number of rows the host would
have to fetch first, and the requests tell which features a step uses. The operations that remain
(`index_put_`, `where`, `topk`, `cumsum`, `searchsorted` and the like) only launch kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_models.engine.penalties import PenalisedRows
from triton_models.engine.random_numbers import uniform
from triton_models.engine.sampling import GREEDY_BELOW
from triton_models.engine.truncation import truncate

MASK_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInputs:
    """The rules of S rows, as tensors. Row numbers are int64, and index the S rows.

    `temperatures`: [S] float32, greedy below `GREEDY_BELOW`. `seeds`, `counters`: [S] int64, for random
    numbers. `random`: whether any row is not greedy. `truncated`: rows whose top_k ([S] int64, 0 keeps
    all), top_p or min_p ([S] float64) remove tokens. `penalties`: the rows with penalties; None if there are
    none. `bias_*`: what is added to single logits ([B] float64). `banned_*`: single logits that are removed.
    `masked_rows`, `mask_words`: rows with a set of allowed tokens, as [M] and [M, ceil(vocab / 32)] int32.
    `logprob_rows`: rows whose log-probabilities are reported, with those of the `top_logprobs` most likely
    tokens each.
    """

    temperatures: Tensor
    seeds: Tensor
    counters: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    random: bool
    truncated: Tensor
    penalties: PenalisedRows | None
    bias_rows: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    banned_rows: Tensor
    banned_ids: Tensor
    masked_rows: Tensor
    mask_words: Tensor | None
    logprob_rows: Tensor
    top_logprobs: int

    @classmethod
    def unconstrained(
        cls,
        *,
        temperatures: Tensor,
        seeds: Tensor,
        counters: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        random: bool,
        truncated: Tensor,
    ) -> "SamplerInputs":
        """Return the rules of rows whose logits stay as they are, without log-probabilities."""
        none = truncated[:0]
        return cls(
            temperatures=temperatures,
            seeds=seeds,
            counters=counters,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            random=random,
            truncated=truncated,
            penalties=None,
            bias_rows=none,
            bias_ids=none,
            bias_values=none,
            banned_rows=none,
            banned_ids=none,
            masked_rows=none,
            mask_words=None,
            logprob_rows=none,
            top_logprobs=0,
        )

    @property
    def constrained(self) -> bool:
        """Whether any row's logits are changed before a token is chosen."""
        return (
            self.penalties is not None
            or self.bias_rows.numel() > 0
            or self.banned_rows.numel() > 0
            or self.mask_words is not None
        )


@dataclass(frozen=True, slots=True)
class SamplerOutputs:
    """`status`: [3, S] int64 of token ids, whether the logits were finite, whether any token was allowed.

    `logprobs`: [P, 1 + top] float32, the sampled token's first; `top_ids`: [P, top] int64; None without rows.
    """

    status: Tensor
    logprobs: Tensor | None
    top_ids: Tensor | None

    def to_host(self) -> "SamplerOutputs":
        """Start copying to pinned host memory; whoever reads the copies waits for the device first."""
        return SamplerOutputs(
            self.status.to("cpu", non_blocking=True),
            None if self.logprobs is None else self.logprobs.to("cpu", non_blocking=True),
            None if self.top_ids is None else self.top_ids.to("cpu", non_blocking=True),
        )


Chooser = Callable[[Tensor, SamplerInputs], Tensor]
"""Chooses tokens from logits after penalties, biases and masks: temperature, truncation and the draw remain.

Takes [S, vocab] logits of any float dtype, which it may change, and returns a `SamplerOutputs.status`.
"""


def choose(logits: Tensor, inputs: SamplerInputs) -> Tensor:
    """Choose in plain torch; a `Chooser`."""
    logits = logits.float()
    finite = torch.isfinite(logits).all(dim=-1)
    best, tokens = logits.max(dim=-1)
    if inputs.random:
        tokens = torch.where(inputs.temperatures < GREEDY_BELOW, tokens, _draw(logits, inputs))
    return torch.stack([tokens, finite.long(), (best > -torch.inf).long()])


def sample(logits: Tensor, inputs: SamplerInputs, choose: Chooser = choose) -> SamplerOutputs:
    """Choose a token per row.

    Args:
        logits: [S, vocab] of any float dtype; may be changed in place.
        inputs: the rows' rules.
        choose: the last stage, of which a device may have a faster implementation.

    Returns:
        What was chosen. If a row's logits are not finite, or no token is allowed, its token is meaningless.
    """
    wants_logprobs = inputs.logprob_rows.numel() > 0
    # The raw distribution: taken before anything below changes the logits.
    raw = logits[inputs.logprob_rows].float().log_softmax(dim=-1) if wants_logprobs else None
    if inputs.constrained:
        logits = logits.float()
        finite = torch.isfinite(logits).all(dim=-1)
        _apply_constraints(logits, inputs)
        status = choose(logits, inputs)
        status[1] = finite  # Removed tokens have logits of -inf on purpose.
    else:
        status = choose(logits, inputs)
    if raw is None:
        return SamplerOutputs(status, None, None)
    top, top_ids = raw.topk(inputs.top_logprobs, dim=-1)
    sampled = raw.gather(1, status[0, inputs.logprob_rows, None])
    return SamplerOutputs(status, torch.cat([sampled, top], dim=1), top_ids)


def _apply_constraints(logits: Tensor, inputs: SamplerInputs) -> None:
    """Apply penalties, add biases, and remove tokens that are banned or not allowed, in place."""
    if inputs.penalties is not None:
        inputs.penalties.apply(logits)
    if inputs.bias_rows.numel():
        logits.index_put_((inputs.bias_rows, inputs.bias_ids), inputs.bias_values.float(), accumulate=True)
    if inputs.banned_rows.numel():
        logits[inputs.banned_rows, inputs.banned_ids] = -torch.inf
    if inputs.mask_words is not None:
        bits = torch.arange(MASK_BITS, dtype=torch.int32, device=logits.device)
        allowed = ((inputs.mask_words[..., None] >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
        logits[inputs.masked_rows] = logits[inputs.masked_rows].masked_fill(~allowed, -torch.inf)


def _draw(logits: Tensor, inputs: SamplerInputs) -> Tensor:
    """Draw from [S, vocab] logits; returns [S] ids, which are meaningless for greedy rows.

    Inverting the cumulative distribution in vocabulary order needs no sorting, and with sums in float64 the
    choice is the same however a device orders its additions.
    """
    # With the largest logit shifted to 0, no temperature can make an exponential overflow.
    temperatures = inputs.temperatures.clamp(min=GREEDY_BELOW)[:, None]
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures
    if inputs.truncated.numel():
        rows = inputs.truncated
        scaled[rows] = truncate(scaled[rows], inputs.top_k[rows], inputs.top_p[rows], inputs.min_p[rows])
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    targets = uniform(inputs.seeds, inputs.counters)[:, None] * cumulative[:, -1:]
    # The first id whose sum exceeds the target: never one of probability 0, which leaves the sum as it was.
    drawn = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    return drawn.clamp_(max=logits.shape[1] - 1)  # A row of NaN finds none; its token is not used.
