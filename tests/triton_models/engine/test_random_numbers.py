import torch
from hypothesis import given
from hypothesis import strategies as st

from triton_models.engine.random_numbers import uniform

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


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20))
def test_it_is_splitmix64_whatever_the_sign(seed: int, position: int) -> None:
    expected = (mix((mix(seed % WRAP) + position * GAMMA) % WRAP) >> 16) / 2**48
    assert uniform(torch.tensor([seed]), torch.tensor([position])).item() == expected


def test_numbers_are_even_and_independent_of_their_neighbours() -> None:
    seeds = torch.arange(200).repeat_interleave(500)
    numbers = uniform(seeds, torch.arange(500).repeat(200))
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    counts = torch.histc(numbers, bins=50, min=0, max=1)
    expected = len(numbers) / 50
    assert ((counts - expected) ** 2 / expected).sum() < 49 + 5 * (2 * 49) ** 0.5
    table = numbers.view(200, 500) - 0.5
    assert abs((table[:, 1:] * table[:, :-1]).mean() * 12) < 0.02
    assert abs((table[1:] * table[:-1]).mean() * 12) < 0.02
    assert abs((table[1:, :-1] * table[:-1, 1:]).mean() * 12) < 0.02
    assert len(numbers.unique()) == len(numbers)
