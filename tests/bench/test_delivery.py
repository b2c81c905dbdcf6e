from bench.__main__ import BUILT_IN
from bench.delivery import measure


def test_every_token_is_delivered() -> None:
    (row,) = measure(BUILT_IN, (3,), new_tokens=5)
    assert (row.streams, row.tokens) == (3, 15)
    assert row.responses > 3  # the last of each, and frames of one step or several
