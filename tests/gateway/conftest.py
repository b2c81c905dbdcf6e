from collections.abc import AsyncIterator, Iterator

import pytest

from gateway.limits.counters import new_table
from gateway.settings import settings_table
from tests.gateway.triton.fake_triton import FakeTriton


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is set by the environment of the tests."""
    for row in settings_table():
        monkeypatch.delenv(row.env, raising=False)
    monkeypatch.delenv("TRITONGATE_CONFIG", raising=False)


@pytest.fixture
def table() -> Iterator[int]:
    """The memory that the processes of a gateway share."""
    with new_table() as descriptor:
        yield descriptor


@pytest.fixture
async def triton() -> AsyncIterator[FakeTriton]:
    triton = FakeTriton()
    await triton.start()
    yield triton
    await triton.stop()
