import pytest

from gateway.configuration import settings_table


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is set by the environment of the tests."""
    for row in settings_table():
        monkeypatch.delenv(row.env, raising=False)
    monkeypatch.delenv("TRITONGATE_CONFIG", raising=False)
