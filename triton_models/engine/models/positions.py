"""How models know positions: rotary frequencies, stretched for longer contexts in several ways, and ALiBi."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_models.engine.models import Alibi, Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpolation:
    """Position interpolation (Chen et al., arXiv 2306.15595): all positions are divided."""

    factor: float

    def scale(self, frequencies: Tensor, base: float) -> Tensor:  # noqa: ARG002 - others need it
        """Return the frequencies, [pairs], as this changes them."""
        return frequencies / self.factor


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN (Peng et al., arXiv 2309.00071): slow pairs are stretched, and attention sharpened (`Rope`)."""

    factor: float
    original: float
    """The original context, in tokens."""
    fast: float = 32.0
    """Pairs that turn more often than this in the original context are kept."""
    slow: float = 1.0
    """Pairs that turn less often than this are stretched."""
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
    """How much of a head is rotated, and how fast."""

    share: float = 1.0
    """Of the head's numbers, the first that form pairs which are rotated."""
    base: float
    scaling: Interpolation | Llama3 | Yarn | None = None
    amplitude: float = 1.0
    """What sines and cosines are multiplied by, which sharpens attention."""

    def pairs(self, head_dim: int) -> int:
        """Return the number of pairs of a head of this width."""
        return int(head_dim * self.share) // 2


def rotary_table(rope: Rope, head_dim: int, positions: int, device: torch.device) -> Rotary:
    """Return the tables of the first `positions` positions: [positions, pairs]."""
    pairs = rope.pairs(head_dim)
    exponents = torch.arange(pairs, dtype=torch.float32, device=device) / pairs
    frequencies = 1.0 / rope.base**exponents
    if rope.scaling is not None:
        frequencies = rope.scaling.scale(frequencies, rope.base)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), frequencies)
    return Rotary(angles.cos() * rope.amplitude, angles.sin() * rope.amplitude)


def alibi(heads: int, device: torch.device) -> Alibi:
    """Return a slope for each head, as the published code of ALiBi and BLOOM has them.

    With a power of two of heads, that is a geometric sequence that ends in 2 ** -8. Other numbers have the
    next smaller power's, then every other one of twice as many heads.
    """
    power = 1 << (heads.bit_length() - 1)
    first = 2.0 ** (-8 / power)
    between = math.sqrt(first)
    slopes = [first**number for number in range(1, power + 1)]
    slopes += [between**number for number in range(1, 2 * (heads - power), 2)]
    return Alibi(torch.tensor(slopes, dtype=torch.float32, device=device))
