import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_models.engine import random_numbers
from triton_models.engine.kernels.drawing import first_over, uniform


@triton.jit
def _uniforms(seeds, counters, numbers, COUNT: tl.constexpr):
    here = tl.arange(0, COUNT)
    tl.store(numbers + here, uniform(tl.load(seeds + here), tl.load(counters + here)))


@triton.jit
def _first_over(weights, target, found, COUNT: tl.constexpr):
    here = tl.arange(0, COUNT)
    tl.store(found, first_over(tl.load(weights + here), tl.load(target), here))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_random_numbers_are_the_plain_ones_bit_for_bit(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (1024,), generator=generator).to(device)
    seeds[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    counters = torch.randint(0, 2**31 - 1, (1024,), generator=generator).to(device)
    counters[:8] = torch.tensor([0, 1, 2, 3, 0, 1, 2, 2**31 - 1])
    numbers = torch.empty(1024, dtype=torch.float64, device=device)

    _uniforms[1,](seeds, counters.to(dtype), numbers, COUNT=1024)

    assert torch.equal(numbers, random_numbers.uniform(seeds, counters))


def find_first_over(weights: Tensor, target: float) -> int:
    found = torch.empty(1, dtype=torch.int32, device=weights.device)
    targets = torch.tensor([target], dtype=torch.float64, device=weights.device)
    _first_over[1,](weights, targets, found, COUNT=len(weights))
    return int(found)


@pytest.mark.parametrize(
    ("target", "expected"), [(-1e-9, 1), (0.0, 1), (0.25, 1), (0.5, 4), (0.74, 4), (0.75, 6), (2.0, 6)]
)
def test_first_over_passes_ids_of_no_weight(target: float, expected: int, device: torch.device) -> None:
    weights = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.25, 0.0, 0.25, 0.0], device=device)
    assert find_first_over(weights, target) == expected
