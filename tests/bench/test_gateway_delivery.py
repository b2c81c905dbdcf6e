from bench.gateway_delivery import measure


def test_every_token_reaches_its_client() -> None:
    (row,) = measure((3,), new_tokens=4)
    assert (row.streams, row.tokens) == (3, 12)
    assert 0 < row.microseconds < 1e6
