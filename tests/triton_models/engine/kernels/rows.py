"""Rows to sample, for the kernels and for the plain sampler, and what the definitions say of them."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from triton_models.engine.draw import exponentials, row_keys
from triton_models.engine.kernels.sampling import choose
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


def columns(rows: list[Row], device: torch.device) -> SamplerInputs:
    return SamplerInputs(
        temperatures=torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device),
        seeds=torch.tensor([row.seed for row in rows], device=device),
        counters=torch.tensor([row.counter for row in rows], device=device),
        top_k=torch.tensor([row.top_k for row in rows], device=device),
        top_p=torch.tensor([row.top_p for row in rows], dtype=torch.float64, device=device),
        min_p=torch.tensor([row.min_p for row in rows], dtype=torch.float64, device=device),
        random=any(row.temperature > 0 for row in rows),
        truncated=any(row.truncated for row in rows),
    )


def chosen(logits: Tensor, rows: list[Row]) -> Tensor:
    """Return the status of the kernels."""
    return choose(logits, columns(rows, logits.device))


def plainly(logits: Tensor, rows: list[Row]) -> Tensor:
    """Return the status of the sampler for CPUs."""
    return sample(logits.clone(), columns(rows, logits.device)).status


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


def drawn(logits: list[float], row: Row) -> int:
    """Return the kept token that wins the race, computed in float64."""
    (key,) = row_keys(np.array([row.seed]), np.array([row.counter]))
    probabilities = kept(logits, row)
    numbers = exponentials(key, np.array(list(probabilities), dtype=np.uint32)).astype(np.float64)
    return list(probabilities)[(np.array(list(probabilities.values())) / numbers).argmax()]
