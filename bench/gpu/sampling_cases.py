"""Sampling by kernels: whether it draws the same tokens as the sampler for CPUs, and its times."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.products import Shape
from bench.gpu.timing import microseconds
from triton_models.engine.kernels.sampling import choose
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
    inputs: SamplerInputs

    @classmethod
    def make(cls, shape: Shape, rows: int, limits: str, dtype: torch.dtype) -> "Rows":
        """Return rows that all have the limits called `limits`."""
        device = shape.device
        top_k, top_p, min_p = LIMITS[limits]
        logits = torch.empty((rows, shape.vocabulary), device=device).normal_().mul_(_SPREAD)
        inputs = SamplerInputs(
            temperatures=torch.full((rows,), 0.9, device=device),
            seeds=torch.arange(rows, device=device),
            counters=torch.full((rows,), 7, dtype=torch.int64, device=device),
            top_k=torch.full((rows,), top_k, dtype=torch.int64, device=device),
            top_p=torch.full((rows,), top_p, dtype=torch.float64, device=device),
            min_p=torch.full((rows,), min_p, dtype=torch.float64, device=device),
            truncated=(top_k, top_p, min_p) != LIMITS["all tokens"],
        )
        return cls(logits.to(shape.dtype).to(dtype), inputs)

    def choose(self) -> Tensor:
        """Return the status from the kernels."""
        return choose(self.logits, self.inputs)

    def sample(self) -> Tensor:
        """Return the status from the sampler for CPUs."""
        return sample(self.logits.clone(), self.inputs).status

    def differing(self) -> int:
        """Return the number of rows whose token differs from that of the sampler for CPUs."""
        return int((self.choose()[0] != self.sample()[0]).sum())

    def time(self, device: torch.device) -> float:
        """Return the microseconds that a call of the kernels takes."""

        def launch() -> None:
            self.choose()

        return microseconds([launch], device)
