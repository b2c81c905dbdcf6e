from bench.gpu.growth import Case, cases


def test_each_setting_is_measured_once_and_the_shared_beginning_against_none() -> None:
    chosen = list(cases((16, 64), (8,), 1500))
    assert chosen == [
        Case("prompt", 16, 128),
        Case("prompt", 64, 128),
        Case("answer", 259, 8),
        Case("cold", 1564, 128),
        Case("shared", 1564, 128, 1500),
    ]
    assert not [case for case in cases((16,), (8,), 0) if case.name in {"cold", "shared"}]
