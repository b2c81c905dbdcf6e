from bench.__main__ import BUILT_IN
from bench.engine_host import measure


def test_every_step_of_decodes_is_measured() -> None:
    (row,) = measure(BUILT_IN, (3,), new_tokens=20)
    assert (row.sequences, row.steps) == (3, 19)  # the first token comes with the prompts
    assert row.microseconds > 0
