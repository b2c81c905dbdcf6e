import gc
import logging
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from gateway.http.record import RequestRecord
from gateway.http.run import RunningRequest
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
def restored_logging() -> Iterator[None]:
    """The root logger is as it was, behind the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def living() -> Iterator[Callable[..., int]]:
    """Counts objects of the given types beyond those before the test; nothing is collected meanwhile."""
    gc.collect()
    gc.disable()
    kinds = (RequestRecord, RunningRequest)
    before = {id(each): each for each in gc.get_objects() if type(each) in kinds}

    def count(*given: type) -> int:
        return sum(type(each) in given and id(each) not in before for each in gc.get_objects())

    yield count
    gc.enable()


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
