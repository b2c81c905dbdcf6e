"""Rotary frequencies, and the ways in which models stretch them to longer contexts."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_models.engine.models import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpolation:
    """Position interpolation (Chen et al., arXiv 2306.15595): all positions are divided."""

    factor: float

    def scale(self, frequencies: Tensor, base: float) -> Tensor:  # noqa: ARG002 - others need it
        """Return the frequencies, [pairs], as this changes them."""
        return frequencies / self.factor

    @property
    def amplitude(self) -> float:
        """What sines and cosines are multiplied by."""
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3:
    """Llama 3.1's: long waves are stretched, short ones kept, and those between are in part."""

    factor: float
    low: float
    """Waves of which fewer than this fit into the original context are stretched."""
    high: float
    """Waves of which more than this fit are kept."""
    original: float
    """The original context, in tokens."""

    def scale(self, frequencies: Tensor, base: float) -> Tensor:  # noqa: ARG002 - others need it
        """Return the frequencies, [pairs], as this changes them."""
        fitting = self.original * frequencies / (2 * math.pi)
        kept = ((fitting - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)

    @property
    def amplitude(self) -> float:
        """What sines and cosines are multiplied by."""
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN (Peng et al., arXiv 2309.00071): slow pairs are stretched, and attention is sharpened."""

    factor: float
    original: float
    """The original context, in tokens."""
    fast: float = 32.0
    """Pairs that turn more often than this in the original context are kept."""
    slow: float = 1.0
    """Pairs that turn less often than this are stretched."""
    amplitude: float
    """What sines and cosines are multiplied by."""
    truncate: bool = True
    """The limits between which pairs are stretched in part are whole numbers."""

    def scale(self, frequencies: Tensor, base: float) -> Tensor:
        """Return the frequencies, [pairs], as this changes them."""
        pairs = len(frequencies)
        low, high = self._pair(self.fast, pairs, base), self._pair(self.slow, pairs, base)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        numbers = torch.arange(pairs, dtype=torch.float32, device=frequencies.device)
        stretched = ((numbers - low) / (high - low or 0.001)).clamp(0, 1)
        return frequencies * (stretched / self.factor + 1 - stretched)

    def _pair(self, turns: float, pairs: int, base: float) -> float:
        """Return the number of the pair that turns so often in the original context."""
        return pairs * math.log(self.original / (turns * 2 * math.pi)) / math.log(base)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Which pairs of a head are rotated, and how fast."""

    pairs: int
    base: float
    scaling: Interpolation | Llama3 | Yarn | None = None


def rotary_table(rope: Rope, positions: int, device: torch.device) -> Rotary:
    """Return the tables of the first `positions` positions: [positions, pairs]."""
    exponents = torch.arange(rope.pairs, dtype=torch.float32, device=device) / rope.pairs
    frequencies = 1.0 / rope.base**exponents
    amplitude = 1.0
    if rope.scaling is not None:
        frequencies, amplitude = rope.scaling.scale(frequencies, rope.base), rope.scaling.amplitude
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), frequencies)
    return Rotary(angles.cos() * amplitude, angles.sin() * amplitude)
