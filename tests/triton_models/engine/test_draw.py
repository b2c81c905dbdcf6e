"""One row's draw: the random numbers, the race between tokens, and which of them take part."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.triton_models.engine.sampler_rows import chi_square_holds
from triton_models.engine import draw as draw_module
from triton_models.engine.draw import Limits, draw, exponentials, kept, row_keys

WRAP = 2**64
GAMMA = 0x9E3779B97F4A7C15


def mix(state: int) -> int:
    """SplitMix64 in Python's integers."""
    state = (state + GAMMA) % WRAP
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % WRAP
    state = (state ^ state >> 27) * 0x94D049BB133111EB % WRAP
    return state ^ state >> 31


def test_the_reference_is_splitmix64() -> None:
    # The published first outputs for seed 1234567.
    assert [mix(1234567), mix(1234567 + GAMMA)] == [6457827717110365317, 3203168211198807973]


def keys(count: int, seed: int = 0) -> NDArray[Any]:
    """Keys of consecutive positions of one seed."""
    return row_keys(np.full(count, seed), np.arange(count))


def uniforms(keys: NDArray[Any], ids: NDArray[Any]) -> NDArray[Any]:
    """The u in (0, 1) of which exponential numbers are made: [keys, ids]."""
    ids = ids.astype(np.uint32)
    return -np.expm1(-np.stack([exponentials(key, ids) for key in keys]).astype(np.float64))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("position", [0, 1, 77, 2**20])
def test_a_rows_key_is_splitmix64_of_seed_and_position(seed: int, position: int) -> None:
    expected = mix((mix(seed % WRAP) + position * GAMMA) % WRAP)
    ((low, high),) = row_keys(np.array([seed]), np.array([position])).tolist()
    assert low + (high << 32) == expected


def test_the_number_of_an_id_depends_on_the_key_and_the_id_alone() -> None:
    first, second = keys(2)
    ids = np.arange(1000, dtype=np.uint32)
    whole = exponentials(first, ids)
    assert np.array_equal(exponentials(first, ids[[7, 900, 3]]), whole[[7, 900, 3]])
    assert np.count_nonzero(whole == exponentials(second, ids)) == 0


def key_for(number: int) -> NDArray[Any]:
    """A key with which id 0 has a given 32-bit hash: with 0 as its low half, the first half of it stays 0."""
    back = number ^ (number >> 16)
    return np.array([0, back * pow(draw_module.ID_MULTIPLIERS[1], -1, 2**32) % 2**32], dtype=np.uint32)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, 2.0**-33),
        (1, 1.5 * 2.0**-32),
        (2**12, 2.0**-20),
        (2**31, math.log(2)),
        (2**32 - 1, 24 * math.log(2)),
    ],
)
def test_the_smallest_numbers_are_precise_and_the_largest_is_finite(number: int, expected: float) -> None:
    (found,) = exponentials(key_for(number), np.zeros(1, dtype=np.uint32))
    assert found == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("seed", [0, 1, 12345, -7])
def test_numbers_are_even_over_ids_at_consecutive_positions_and_seeds(seed: int) -> None:
    ids = np.arange(65_024)
    consecutive = row_keys(np.array([seed, seed, seed, seed + 1, seed + 2]), np.array([0, 1, 2, 0, 0]))
    for row in uniforms(consecutive, ids):
        # Over the whole range, and among the small numbers, of which the winners are.
        for share in (1.0, 2.0**-6):
            counts, _ = np.histogram(row, bins=50, range=(0, share))
            assert chi_square_holds(counts.tolist(), [1 / 50] * 50)


def test_neighbours_are_independent() -> None:
    """Of ids, of positions and of seeds, next to each other and further apart."""
    count = 300
    ids = np.arange(2000)
    positions = uniforms(keys(count, seed=5), ids) - 0.5
    seeds = uniforms(row_keys(np.arange(count), np.full(count, 9)), ids) - 0.5
    # Five standard deviations of the mean of that many products, each with a variance of 1/144.
    most = 5 / 12 / math.sqrt(count * len(ids) / 2)
    for table in (positions, seeds):
        for lag in (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 1024):
            assert abs((table[:, lag:] * table[:, :-lag]).mean()) < most * math.sqrt(2)
        for lag in (1, 2, 8, 64):
            assert abs((table[lag:] * table[:-lag]).mean()) < most
            assert abs((table[lag:, 1:] * table[:-lag, :-1]).mean()) < most


def test_small_numbers_of_neighbouring_ids_do_not_come_together() -> None:
    """The race is between the smallest numbers: two ids must be small together as often as chance has it."""
    share = 1 / 64
    small = uniforms(keys(1000, seed=3), np.arange(4096)) < share
    for lag in (1, 2, 4, 256, 2048):
        together = np.count_nonzero(small[:, lag:] & small[:, :-lag])
        expected = 1000 * (4096 - lag) * share**2
        assert abs(together - expected) < 5 * math.sqrt(expected)


def test_every_id_of_a_level_row_wins_equally_often() -> None:
    length, draws = 64, 20_000
    level = np.zeros(length, dtype=np.float32)
    won = Counter(draw(level, Limits(0, 1.0, 0.0), key) for key in keys(draws))
    assert chi_square_holds([won[token] for token in range(length)], [1 / length] * length)


def test_the_tail_has_its_share() -> None:
    """One likely token, and 20,000 others that together have a thousandth of the probability."""
    others, draws = 20_000, 8_000
    scaled = np.full(others + 1, math.log(1e-3 / 0.999 / others), dtype=np.float32)
    scaled[others // 2] = 0.0
    won = Counter(draw(scaled, Limits(0, 1.0, 0.0), key) for key in keys(draws, seed=8))
    in_tail = draws - won[others // 2]
    assert abs(in_tail - draws * 1e-3) < 4 * math.sqrt(draws * 1e-3)
    assert len(won) == in_tail + 1, "another of the others each time"


def test_what_truncation_leaves_is_drawn_as_if_the_rest_were_not_there() -> None:
    """A token keeps its number whatever else takes part: the winner of all, if kept, is the winner."""
    scaled = rows("spread", 1)[0].numpy()
    same = 0
    for key in keys(200):
        free = draw(scaled, Limits(0, 1.0, 0.0), key)
        cut = draw(scaled, Limits(40, 1.0, 0.0), key)
        staying = set(kept(scaled, Limits(40, 1.0, 0.0)).tolist())
        assert cut in staying
        assert cut == free or free not in staying
        same += cut == free
    assert 0 < same < 200


FEW = 80
VOCABULARY = 8 * FEW
"""A top_k of FEW is looked for, of more the row is sorted."""


def rows(kind: str, count: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    values = torch.randn((count, VOCABULARY), generator=generator)
    if kind == "peaked":
        values *= 6
    elif kind == "stepped":  # Crowds of equal values, at every threshold.
        values = (values * 3).round()
    elif kind == "level":
        values.zero_()
    return values - values.amax(dim=-1, keepdim=True)


def by_definition(row: Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The ids that stay, from whole sorted rows in float64."""
    weights = row.double().exp()
    likely = (weights >= min_p).tolist()
    order = [key for key in row.sort(descending=True, stable=True).indices.tolist() if likely[key]]
    kept = order[: top_k or len(order)]
    if top_p == 1:
        return sorted(kept)
    before = torch.cat([torch.zeros(1).double(), weights[kept].cumsum(0)[:-1]])
    taking_part = (before < top_p * weights[kept].sum()).tolist()
    return sorted(key for key, takes_part in zip(kept, taking_part, strict=True) if takes_part)


def staying(scaled: Tensor, limits: Limits) -> list[list[int]]:
    return [kept(row.numpy(), limits).tolist() for row in scaled]


@pytest.mark.parametrize("kind", ["spread", "peaked", "stepped", "level"])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (FEW - 1, 1.0, 0.0),
        (FEW, 1.0, 0.0),
        (FEW, 0.999, 0.0),
        (FEW + 1, 1.0, 0.0),
        (FEW + 1, 0.3, 0.0),
        (VOCABULARY, 0.5, 0.0),
        (2**31 - 1, 1.0, 0.0),
        (0, 1e-9, 0.0),
        (0, 0.3, 0.0),
        (0, 0.9, 0.0),
        (0, 0.999999, 0.0),
        (0, 1.0, 1.0),
        (0, 1.0, 0.05),
        (0, 0.6, 0.02),
        (50, 0.8, 0.01),
    ],
)
def test_what_stays_is_what_the_definition_says(kind: str, top_k: int, top_p: float, min_p: float) -> None:
    scaled = rows(kind)
    wanted = [by_definition(row, top_k, top_p, min_p) for row in scaled]
    assert staying(scaled, Limits(top_k, top_p, min_p)) == wanted


def test_of_most_rows_only_few_logits_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    sort = np.sort

    def counting(values: NDArray[Any]) -> NDArray[Any]:
        lengths.append(len(values))
        return sort(values)

    monkeypatch.setattr(np, "sort", counting)
    peaked = rows("peaked")
    staying(peaked, Limits(top_k=0, top_p=0.8, min_p=0.0))
    assert max(lengths) < FEW
    staying(peaked, Limits(top_k=FEW, top_p=0.8, min_p=0.0))
    staying(peaked, Limits(top_k=0, top_p=1.0, min_p=0.1))
    assert len(lengths) == 4
