import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.triton_models.engine.kernels.rows import Row, chosen, drawn, kept, plainly
from triton_models.engine.kernels import sampling, truncation

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VOCABULARY = 600


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut rows of few tokens into blocks as rows of many are."""
    monkeypatch.setattr(sampling, "_BLOCK", 256)
    monkeypatch.setattr(truncation, "_BLOCK", 256)
    monkeypatch.setattr(truncation, "_FEW", 128)


def random(rows: int, dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn((rows, VOCABULARY), generator=generator) * 3).to(device, dtype)


def expected(logits: Tensor, rows: list[Row]) -> list[int]:
    return [drawn(values, row) for values, row in zip(logits.double().tolist(), rows, strict=True)]


LIMITS = [
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 50},
    {"top_k": 127},
    {"top_k": 400},
    {"top_k": 10_000},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.8},
    {"top_p": 0.999999},
    {"min_p": 0.2},
    {"min_p": 1e-4},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 3, "top_p": 0.99},
    {"top_k": 40, "min_p": 0.05},
    {"top_p": 0.9, "min_p": 0.1},
    {"top_p": 0.3, "min_p": 1e-3},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 300, "top_p": 0.7, "min_p": 1e-6},
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_what_the_definitions_say(dtype: torch.dtype, device: torch.device) -> None:
    rows = [
        Row(temperature=0.8 if number % 2 else 2.5, seed=number, **limits)
        for number, limits in enumerate(LIMITS)
    ]
    logits = random(len(rows), dtype, device, seed=4)
    assert chosen(logits, rows)[0].tolist() == expected(logits, rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_are_kept_in_order_of_id(dtype: torch.dtype, device: torch.device) -> None:
    """Halves of small integers: every threshold falls among many equals."""
    rows = [Row(temperature=1.5, seed=number, **limits) for number, limits in enumerate(LIMITS)]
    logits = (random(len(rows), torch.float32, device, seed=5) * 0.5).round().to(dtype) / 2
    assert chosen(logits, rows)[0].tolist() == expected(logits, rows)


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.3}, {"top_k": 7, "top_p": 0.4}])
def test_all_equal(limits: dict[str, float], device: torch.device) -> None:
    logits = torch.full((8, VOCABULARY), -0.0, device=device)
    logits[:, 1::2] = 0.0
    rows = [Row(temperature=1.0, seed=seed, **limits) for seed in range(8)]
    tokens = chosen(logits, rows)[0].tolist()
    assert tokens == expected(logits, rows)
    assert max(tokens) < len(kept(logits[0].tolist(), rows[0]))


def test_least_of_the_likeliest_may_be_zero(device: torch.device) -> None:
    logits = -random(8, torch.float32, device).abs()
    logits[:, 7::50] = 0.0
    logits[:, 9::50] = -0.0
    rows = [Row(temperature=1.0, seed=seed, min_p=1.0) for seed in range(8)]
    tokens = chosen(logits, rows)[0].tolist()
    assert tokens == expected(logits, rows)
    assert {token % 50 for token in tokens} <= {7, 9}


@pytest.mark.parametrize("limits", [{"top_k": 100}, {"top_p": 0.6}, {"top_k": 500, "top_p": 0.9}])
def test_more_equal_tokens_than_are_collected(limits: dict[str, float], device: torch.device) -> None:
    logits = random(8, torch.float32, device).clamp(max=0.5)
    logits[:, ::2] = 0.5  # 300 of 600, and 128 are collected at most
    logits[:, :9] = 1.0
    rows = [Row(temperature=1.0, seed=seed, **limits) for seed in range(8)]
    assert chosen(logits, rows)[0].tolist() == expected(logits, rows)


def test_agrees_with_the_plain_sampler_beside_rows_without_limits(device: torch.device) -> None:
    rows = [
        Row(temperature=1.0, seed=1),
        Row(temperature=1.0, seed=2, top_p=0.8),
        Row(top_k=5),
        Row(temperature=0.6, seed=3, top_k=50, top_p=0.9),
        Row(),
        Row(temperature=1.2, seed=4, top_k=9),
        Row(temperature=0.9, seed=5, min_p=0.02, top_p=0.95),
    ]
    logits = random(len(rows), torch.bfloat16, device, seed=6)
    assert torch.equal(chosen(logits, rows), plainly(logits, rows))


def test_row_depends_on_nothing_else(device: torch.device) -> None:
    rows = [Row(temperature=1.0, seed=seed, top_k=90, top_p=0.7) for seed in range(4)]
    logits = random(4, torch.float32, device)
    sound = chosen(logits, rows)[0].tolist()
    logits[1, 17] = math.nan

    status = chosen(logits, rows)

    assert status[1].tolist() == [1, 0, 1, 1]
    assert [status[0, row].item() for row in (0, 2, 3)] == [sound[row] for row in (0, 2, 3)]
    assert 0 <= status[0, 1] < VOCABULARY
    for number, row in enumerate(rows):
        alone = chosen(logits[number : number + 1].clone(), [row])
        assert alone[0, 0] == status[0, number]


@pytest.mark.parametrize("limits", [{"top_k": 50}, {"top_k": 200}, {"top_p": 0.9}, {"min_p": 0.01}])
def test_tokens_taken_away_stay_away(limits: dict[str, float], device: torch.device) -> None:
    logits = torch.full((6, VOCABULARY), -torch.inf, device=device)
    allowed = [2, 255, 400]
    logits[:, allowed] = torch.tensor([-1.0, 0.5, 0.0], device=device)
    rows = [Row(temperature=3.0, seed=seed, **limits) for seed in range(6)]
    tokens = chosen(logits, rows)[0].tolist()
    assert tokens == expected(logits, rows)
    assert set(tokens) <= set(allowed)


def test_row_that_allows_nothing_ends(device: torch.device) -> None:
    logits = torch.full((1, VOCABULARY), -torch.inf, device=device)
    status = chosen(logits, [Row(temperature=1.0, top_k=4, top_p=0.5, min_p=0.1)])
    assert status[2].item() == 0
    assert 0 <= status[0, 0] < VOCABULARY


def test_draws_follow_the_truncated_distribution(device: torch.device) -> None:
    draws = 20_000 if device.type == "cuda" else 60
    logits = random(1, torch.bfloat16, device, seed=8)
    row = Row(temperature=2.0, seed=3, top_k=8, top_p=0.85, min_p=0.05)
    probabilities = kept(logits[0].double().tolist(), row)
    rows = [replace(row, counter=number) for number in range(draws)]
    tokens = chosen(logits.expand(draws, -1).contiguous(), rows)[0].tolist()

    assert set(tokens) <= set(probabilities)
    statistic = sum(
        (tokens.count(token) - draws * probability) ** 2 / (draws * probability)
        for token, probability in probabilities.items()
    )
    freedom = len(probabilities) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)
