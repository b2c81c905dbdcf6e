"""Rows to sample, for the kernels and for the plain sampler, and what the definitions say of them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_models.engine.kernels.sampling import choose
from triton_models.engine.kernels.truncation import Truncation
from triton_models.engine.sampler import SamplerInputs, sample


@dataclass(frozen=True, kw_only=True)
class Row:
    temperature: float = 0.0
    seed: int = 0
    counter: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def truncated(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class Columns:
    """What the rows ask for, as tensors over all of them."""

    temperatures: Tensor
    seeds: Tensor
    counters: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    truncated: Tensor


def columns(rows: list[Row], device: torch.device) -> Columns:
    return Columns(
        temperatures=torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device),
        seeds=torch.tensor([row.seed for row in rows], device=device),
        counters=torch.tensor([row.counter for row in rows], device=device),
        top_k=torch.tensor([row.top_k for row in rows], device=device),
        top_p=torch.tensor([row.top_p for row in rows], dtype=torch.float64, device=device),
        min_p=torch.tensor([row.min_p for row in rows], dtype=torch.float64, device=device),
        truncated=torch.tensor(
            [number for number, row in enumerate(rows) if row.truncated], dtype=torch.int64, device=device
        ),
    )


def chosen(logits: Tensor, rows: list[Row], *, padding: int = 0) -> Tensor:
    """Return the status of the kernels; `padding`: entries of the truncated rows' list that mean nothing."""
    asked = columns(rows, logits.device)
    listed = torch.cat([asked.truncated, asked.truncated.new_full((padding,), -1)])
    truncation = Truncation(rows=listed, top_k=asked.top_k, top_p=asked.top_p, min_p=asked.min_p)
    return choose(
        logits,
        temperatures=asked.temperatures,
        seeds=asked.seeds,
        counters=asked.counters,
        truncation=truncation if len(listed) else None,
    )


def plainly(logits: Tensor, rows: list[Row]) -> Tensor:
    """Return the status of the plain sampler."""
    asked = columns(rows, logits.device)
    inputs = SamplerInputs.unconstrained(
        temperatures=asked.temperatures,
        seeds=asked.seeds,
        counters=asked.counters,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        random=any(row.temperature > 0 for row in rows),
        truncated=asked.truncated,
    )
    return sample(logits.clone(), inputs).status


def kept(logits: list[float], row: Row) -> dict[int, float]:
    """Return the tokens that may be drawn with their probabilities, by the definitions."""
    largest = max(logits)
    weights = [math.exp((value - largest) / row.temperature) for value in logits]
    order = sorted(range(len(weights)), key=lambda token: (-logits[token], token))
    order = [token for token in order if weights[token] >= row.min_p]
    order = order[: row.top_k or None]
    whole = sum(weights[token] for token in order)
    nucleus = {}
    before = 0.0
    for token in order:
        if row.top_p < 1 and before >= row.top_p * whole:
            break
        nucleus[token] = weights[token]
        before += weights[token]
    return {token: weight / before for token, weight in nucleus.items()}


def drawn(logits: list[float], row: Row, number: float) -> int:
    """Return the kept token that a random number in [0, 1) falls on, in vocabulary order."""
    before = 0.0
    probabilities = sorted(kept(logits, row).items())
    for token, probability in probabilities:
        before += probability
        if probability > 0 and before > number:
            return token
    return probabilities[-1][0]
