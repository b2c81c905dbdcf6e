import pytest

from triton_models.embedded.backoff import Backoff


def test_pauses_double_up_to_a_limit_and_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    backoff = Backoff()
    assert [backoff.failed() for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    now += 59
    assert backoff.failed() == 30
    now += 91
    assert backoff.failed() == 0.5
