import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.triton_models.engine.kernels.rows import Row, chosen, columns, plainly
from triton_models.engine import draw
from triton_models.engine.kernels import sampling
from triton_models.engine.kernels.sampling import exponentials

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VOCABULARY = 700


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut rows of few tokens into blocks as rows of many are."""
    monkeypatch.setattr(sampling, "_BLOCK", 256)


def random(rows: int, *, seed: int = 0, vocabulary: int = VOCABULARY, device: torch.device) -> Tensor:
    return (torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(seed)) * 3).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [40, 256, VOCABULARY])
def test_chooses_what_the_plain_sampler_does(
    dtype: torch.dtype, vocabulary: int, device: torch.device
) -> None:
    logits = random(24, vocabulary=vocabulary, device=device).to(dtype)
    rows = [Row(temperature=0.3 * (number % 8), seed=number, counter=3 * number) for number in range(24)]
    assert torch.equal(chosen(logits, rows), plainly(logits, rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_lowest_of_equal_ids(dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.zeros((3, VOCABULARY), dtype=dtype, device=device)
    logits[0, [690, 300, 301]] = 5
    logits[1, 699] = 1
    assert chosen(logits, [Row(), Row(temperature=9e-6), Row()])[0].tolist() == [300, 699, 0]


def test_tokens_taken_away_are_never_chosen(device: torch.device) -> None:
    logits = random(30, device=device)
    allowed = [3, 255, 256, 650]
    taken = torch.ones(VOCABULARY, dtype=torch.bool, device=device)
    taken[allowed] = False
    logits[:, taken] = -torch.inf
    rows = [Row(temperature=4.0, seed=number) for number in range(30)]

    status = chosen(logits, rows)

    assert set(status[0].tolist()) == set(allowed)
    assert status[0].tolist() == plainly(logits, rows)[0].tolist()
    assert status[2].all()


def test_row_that_allows_nothing_says_so(device: torch.device) -> None:
    logits = random(3, device=device)
    logits[1] = -torch.inf
    for temperature in (0.0, 1.0):
        status = chosen(logits, [Row(temperature=temperature)] * 3)
        assert status[1:].tolist() == [[1, 0, 1], [1, 0, 1]]
        assert 0 <= status[0, 1] < VOCABULARY


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, VOCABULARY - 1])
def test_what_is_not_finite_fails_its_row_alone(poison: float, place: int, device: torch.device) -> None:
    logits = random(4, device=device)
    rows = [Row(), Row(temperature=1.0, seed=1), Row(temperature=1.0, seed=2), Row(temperature=0.7, seed=3)]
    sound = chosen(logits, rows)
    logits[1, place] = poison

    status = chosen(logits, rows)

    assert status[1].tolist() == [1, 0, 1, 1]
    assert status[0, [0, 2, 3]].tolist() == sound[0, [0, 2, 3]].tolist()
    assert 0 <= status[0, 1] < VOCABULARY


def test_row_depends_on_nothing_else(device: torch.device) -> None:
    logits = random(9, device=device)
    rows = [Row(temperature=0.2 * number, seed=number, counter=number) for number in range(9)]
    together = chosen(logits, rows)
    for number, row in enumerate(rows):
        assert torch.equal(chosen(logits[number : number + 1].clone(), [row])[:, 0], together[:, number])


def test_draws_follow_the_distribution(device: torch.device) -> None:
    draws = 20_000 if device.type == "cuda" else 300
    logits = random(1, vocabulary=300, device=device)
    # Most of it in few tokens of different blocks, so that every cell expects enough draws.
    logits[0, [5, 200, 255, 256, 290]] += 8
    row_logits = logits.expand(draws, -1).contiguous()
    tokens = chosen(row_logits, [Row(temperature=1.5, seed=7, counter=number) for number in range(draws)])[0]

    expected = (logits[0].double() / 1.5).softmax(dim=0).cpu() * draws
    counts = torch.bincount(tokens.cpu(), minlength=300).double()
    often = expected >= 5
    cells = ((counts - expected) ** 2 / expected)[often]
    rest = (counts[~often].sum() - expected[~often].sum()) ** 2 / expected[~often].sum()
    freedom = int(often.sum())
    # Five standard deviations over the mean of chi-square with that many degrees of freedom.
    assert float(cells.sum() + rest) < freedom + 5 * math.sqrt(2 * freedom)


def test_hot_and_cold_temperatures_stay_within_the_vocabulary(device: torch.device) -> None:
    logits = random(4, device=device) * 1e4
    rows = [Row(temperature=temperature, seed=5) for temperature in (1e-5, 1e-4, 1e3, 1e6)]
    assert torch.equal(chosen(logits, rows), plainly(logits, rows))


def test_counters_may_be_narrow(device: torch.device) -> None:
    logits = random(8, device=device)
    wide = columns([Row(temperature=1.0, seed=number, counter=number) for number in range(8)], device)
    narrow = replace(wide, counters=wide.counters.int())
    assert torch.equal(sampling.choose(logits, wide), sampling.choose(logits, narrow))


@triton.jit
def _exponentials(seeds, counters, numbers, COUNT: tl.constexpr):
    row = tl.program_id(0)
    here = tl.arange(0, COUNT)
    values = exponentials(tl.load(seeds + row), tl.load(counters + row), here)
    tl.store(numbers + row * COUNT + here, values)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_random_numbers_are_the_same_as_on_a_cpu(dtype: torch.dtype, device: torch.device) -> None:
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 5, 5], device=device)
    counters = torch.tensor([0, 1, 2**31 - 1, 3, 0, 1], device=device)
    count = 2**16
    numbers = torch.empty((len(seeds), count), dtype=torch.float32, device=device)

    _exponentials[len(seeds),](seeds, counters.to(dtype), numbers, COUNT=count)

    keys = draw.row_keys(seeds.cpu().numpy(), counters.cpu().numpy())
    ids = np.arange(count, dtype=np.uint32)
    expected = torch.from_numpy(np.stack([draw.exponentials(key, ids) for key in keys]))
    # Other bits of any number would differ by far more than the rounding of logarithms.
    assert torch.allclose(numbers.cpu(), expected, rtol=3e-6, atol=0)
    assert (numbers > 0).all()
