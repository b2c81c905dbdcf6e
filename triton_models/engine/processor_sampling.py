"""The last stage of sampling on a CPU: row by row, looking only at the few tokens that matter in most rows.

Operators over all rows at once spend their time in temporary memory, and sort whole rows although a trained
model leaves a hundred tokens to choose from.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from triton_models.engine.random_numbers import uniform
from triton_models.engine.sampler import SamplerInputs
from triton_models.engine.sampling import GREEDY_BELOW

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

_SHORT = 8
"""A top_k of at most 1/8 of the vocabulary is found by selection; for a larger one the row is sorted."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """One row's limits; see `truncation.truncate`."""

    top_k: int
    top_p: float
    min_p: float


def choose(logits: Tensor, inputs: SamplerInputs) -> Tensor:
    """Choose as `sampler.choose` does; a `Chooser`."""
    logits = logits.float()
    rows = logits.numpy()
    best = rows.argmax(axis=-1)
    finite = np.isfinite(rows).all(axis=-1)
    highest = logits.gather(1, torch.from_numpy(best)[:, None])
    if inputs.random:
        _draw_rows(logits, highest, inputs, best)
    status = np.stack([best, finite, highest.numpy()[:, 0] > -np.inf])
    return torch.from_numpy(status.astype(np.int64, copy=False))


def _draw_rows(logits: Tensor, highest: Tensor, inputs: SamplerInputs, tokens: Ids) -> None:
    """Replace the most likely token by a drawn one in rows that are not greedy."""
    # With the largest logit shifted to 0, no temperature can make an exponential overflow.
    scaled = (logits - highest).div_(inputs.temperatures.clamp(min=GREEDY_BELOW)[:, None])
    weights = scaled.exp().numpy()
    truncations = _truncations(inputs)
    numbers = uniform(inputs.seeds, inputs.counters).tolist()
    temperatures, tops = inputs.temperatures.tolist(), highest[:, 0].tolist()
    for row, number in enumerate(numbers):
        if temperatures[row] >= GREEDY_BELOW and math.isfinite(tops[row]):
            tokens[row] = _draw(scaled[row].numpy(), weights[row], truncations.get(row), number)


def _truncations(inputs: SamplerInputs) -> dict[int, Truncation]:
    rows = inputs.truncated.tolist()
    rules = (each[inputs.truncated].tolist() for each in (inputs.top_k, inputs.top_p, inputs.min_p))
    return {row: Truncation(*values) for row, *values in zip(rows, *rules, strict=True)}


def _draw(scaled: Row, weights: Row, truncation: Truncation | None, number: float) -> int:
    """Draw by inverting the cumulative distribution, in vocabulary order; sums are float64."""
    if truncation is None:
        return _place(weights, number)
    ids = kept(scaled, weights, truncation)
    return int(ids[_place(weights[ids], number)])


def _place(weights: Row, number: float) -> int:
    # NumPy's cumulative sum takes five times as long as torch's.
    cumulative = torch.from_numpy(weights).cumsum(0, dtype=torch.float64).numpy()
    # The first id whose sum exceeds the target: never one of weight zero, which leaves the sum unchanged.
    place = int(cumulative.searchsorted(number * cumulative[-1], side="right"))
    return min(place, len(weights) - 1)


def kept(scaled: Row, weights: Row, rules: Truncation) -> Ids:
    """Return the ids that remain after min_p, then top_k, then top_p, in ascending order.

    Args:
        scaled: [vocabulary] logits divided by the temperature, the largest 0.
        weights: [vocabulary] their exponentials.
        rules: the limits.
    """
    if rules.min_p:
        # The largest is 0, so exponentials are probabilities relative to the largest one.
        likely = np.flatnonzero(scaled >= np.float32(math.log(rules.min_p)))
        rest = Truncation(rules.top_k, rules.top_p, min_p=0.0)
        return likely[kept(scaled[likely], weights[likely], rest)]
    if rules.top_p == 1 and not 0 < rules.top_k < len(scaled):
        return np.arange(len(scaled))
    ordered = _head(scaled, weights, rules)
    count = len(ordered)
    if rules.top_p < 1:
        cumulative = torch.from_numpy(ordered).exp().cumsum(0, dtype=torch.float64).numpy()
        whole = cumulative[-1] if 0 < rules.top_k < len(scaled) else _sum(weights)
        # One more than the number of tokens whose sum falls short of the target.
        count = min(count, int(cumulative.searchsorted(rules.top_p * whole)) + 1)
    threshold = ordered[count - 1]
    ids = np.flatnonzero(scaled >= threshold)
    if len(ids) > count:  # of equal ones, the first are kept
        equal = scaled[ids] == threshold
        ids = ids[~equal | (equal.cumsum() <= count - (len(ids) - np.count_nonzero(equal)))]
    return ids


def _head(scaled: Row, weights: Row, rules: Truncation) -> Row:
    """Return the logits that may remain, in descending order."""
    length = len(scaled)
    if not 0 < rules.top_k < length:
        # All tokens that weigh less than this together weigh less than half of what top_p leaves out.
        least = (1 - rules.top_p) * _sum(weights) / length / 2
        return np.sort(scaled[weights >= least])[::-1].copy()
    if rules.top_k * _SHORT <= length:
        return torch.from_numpy(scaled).topk(rules.top_k).values.numpy()
    return np.sort(scaled)[: -rules.top_k - 1 : -1].copy()


def _sum(weights: Row) -> float:
    return float(weights.sum(dtype=np.float64))
