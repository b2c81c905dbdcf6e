import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_models.engine.step_times import StepTimes

TIMES = StepTimes((256, 512, 768, 896, 1024), (0.005, 0.010, 0.0130, 0.0150, 0.0185))
"""A row takes 19.5, 19.5, 16.9, 16.7 and 18.1 us."""


def test_prompts_that_are_left_anyway_are_cut_where_a_row_takes_least() -> None:
    assert TIMES.best(8, 1024, rest=True) == 896


def test_a_prompt_that_would_end_is_cut_where_the_decodes_gain_more_than_it_loses() -> None:
    assert TIMES.best(100, 1000, rest=False) == 896
    assert TIMES.best(3, 1000, rest=False) == 1000, "3 of them would gain 3.5 ms each, and it would lose 15"
    assert TIMES.best(0, 1000, rest=False) == 1000


def test_half_of_the_prompts_are_computed_at_least() -> None:
    times = StepTimes((384, 448), (0.005, 0.010))
    assert times.best(383, 448, rest=True) == 448, "not one token of 65"
    assert times.best(320, 448, rest=True) == 384


def test_what_a_decode_takes_beside_its_row_is_taken_by_each_step() -> None:
    times = StepTimes((512, 1024), (0.0050, 0.0104))
    assert times.best(0, 1024, rest=True) == 512
    assert times.best(400, 1024, rest=True) == 1024


def test_rows_that_are_hardly_faster_are_as_good() -> None:
    assert StepTimes((512, 1024), (0.0050, 0.0101)).best(0, 1024, rest=True) == 1024


@pytest.mark.parametrize("times", [StepTimes(), StepTimes((256,), (0.005,))])
def test_a_step_larger_than_any_measured_stays(times: StepTimes) -> None:
    assert times.best(8, 300, rest=True) == 300


@given(st.data())
def test_decodes_are_in_every_step_and_half_of_the_prompts(data: st.DataObject) -> None:
    sizes = sorted(data.draw(st.sets(st.integers(1, 300), min_size=1)))
    seconds = data.draw(st.lists(st.floats(1e-4, 0.1), min_size=len(sizes), max_size=len(sizes)))
    most = data.draw(st.integers(1, 320))
    decodes = data.draw(st.integers(0, most))
    best = StepTimes(tuple(sizes), tuple(seconds)).best(decodes, most, rest=data.draw(st.booleans()))
    assert decodes + (most - decodes) / 2 <= best <= most
    assert best in {most, *sizes}
