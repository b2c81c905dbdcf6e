"""Compares sampling by kernels with the plain sampler: whether they draw the same tokens, and their times."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.products import Shape
from bench.gpu.timing import microseconds
from triton_models.engine.kernels.sampling import choose
from triton_models.engine.kernels.truncation import Truncation
from triton_models.engine.sampler import SamplerInputs, sample

LIMITS: dict[str, tuple[int, float, float]] = {
    "all tokens": (0, 1.0, 0.0),
    "top_p 0.8": (0, 0.8, 0.0),
    "top_k 50": (50, 1.0, 0.0),
    "top_k 50, top_p 0.8": (50, 0.8, 0.0),
    "min_p 0.05": (0, 1.0, 0.05),
}
"""top_k, top_p and min_p of every row."""

_SPREAD = 2.5
"""Standard deviation of the normal logits; a nucleus of 0.8 then holds thousands of tokens, many more than a
trained model's."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Random logits, and the sampling parameters of each row."""

    logits: Tensor
    temperatures: Tensor
    seeds: Tensor
    counters: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    truncated: Tensor

    @classmethod
    def make(cls, shape: Shape, rows: int, limits: str, dtype: torch.dtype) -> "Rows":
        """Return rows that all have the limits called `limits`."""
        device = shape.device
        top_k, top_p, min_p = LIMITS[limits]
        limited = (top_k, top_p, min_p) != LIMITS["all tokens"]
        logits = torch.empty((rows, shape.vocabulary), device=device).normal_().mul_(_SPREAD)
        return cls(
            logits=logits.to(shape.dtype).to(dtype),
            temperatures=torch.full((rows,), 0.9, device=device),
            seeds=torch.arange(rows, device=device),
            counters=torch.full((rows,), 7, dtype=torch.int64, device=device),
            top_k=torch.full((rows,), top_k, dtype=torch.int64, device=device),
            top_p=torch.full((rows,), top_p, dtype=torch.float64, device=device),
            min_p=torch.full((rows,), min_p, dtype=torch.float64, device=device),
            truncated=torch.arange(rows if limited else 0, device=device),
        )

    def choose(self) -> Tensor:
        """Return the status from the kernels."""
        limits = Truncation(rows=self.truncated, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
        return choose(
            self.logits,
            temperatures=self.temperatures,
            seeds=self.seeds,
            counters=self.counters,
            truncation=limits if len(self.truncated) else None,
        )

    def sample(self) -> Tensor:
        """Return the status from the plain sampler."""
        inputs = SamplerInputs.unconstrained(
            temperatures=self.temperatures,
            seeds=self.seeds,
            counters=self.counters,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            random=True,
            truncated=self.truncated,
        )
        return sample(self.logits.clone(), inputs).status

    def differing(self) -> int:
        """Return the number of rows whose token differs from the plain sampler's."""
        return int((self.choose()[0] != self.sample()[0]).sum())

    def time(self, device: torch.device, *, plain: bool) -> float:
        """Return the microseconds that one call takes."""
        call = self.sample if plain else self.choose

        def launch() -> None:
            call()

        return microseconds([launch], device)
