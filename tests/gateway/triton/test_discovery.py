"""What a backend finds in the repository of its Triton, where the configuration names no models."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.triton.backends import Backend
from gateway.triton.client import Client, EntryState
from gateway.triton.errors import Fault, TritonError
from gateway.triton.options import HealthPolicy, PoolOptions
from gateway.triton.replicas import ReplicaState
from tests.gateway.triton.fake_triton import FakeModel, until


class Found:
    """A backend, and how often it has read the repository."""

    def __init__(self) -> None:
        self.looks = 0
        self.backend: Backend | None = None

    @property
    def models(self) -> list[str]:
        assert self.backend is not None
        return list(self.backend.replicas)


@pytest.fixture
async def found(triton: Any, fast: HealthPolicy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Found]:
    found, read = Found(), Client.repository

    async def repository(self: Client) -> dict[str, EntryState]:
        states = await read(self)
        found.looks += 1
        return states

    monkeypatch.setattr(Client, "repository", repository)
    options = PoolOptions(health=fast)
    found.backend = Backend(triton.address, options)
    yield found
    await found.backend.close(Fault.CLOSED, "the test is over")


async def looks(found: Found, count: int = 2) -> None:
    """Wait until so many looks were begun and ended."""
    enough = found.looks + count + 1
    await until(lambda: found.looks >= enough)


async def test_entries_of_our_contract_are_found_once(triton: Any, found: Found) -> None:
    triton.models["other"] = FakeModel(inputs=("request",))
    await looks(found, 3)
    assert found.models == ["m"]
    triton.models["n"] = FakeModel()
    await looks(found)
    assert found.models == ["m", "n"]


async def test_an_entry_that_is_not_loaded_is_not_found_until_it_is(triton: Any, found: Found) -> None:
    triton.models["n"] = FakeModel(state="LOADING")
    await looks(found)
    assert found.models == ["m"]
    triton.models["n"].state = "READY"
    await looks(found)
    assert found.models == ["m", "n"]


async def test_an_entry_of_another_contract_is_named_once_in_the_log_with_its_inputs(
    triton: Any, found: Found, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        triton.models["foreign"] = FakeModel(inputs=("text_input", "image"))
        await looks(found, 3)
    told = [record.getMessage() for record in caplog.records if "foreign" in record.getMessage()]
    assert len(told) == 1
    assert "image, text_input" in told[0]
    assert found.models == ["m"]


async def test_an_entry_that_cannot_be_read_hides_no_other(
    triton: Any, found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Client.metadata
    broken = True

    async def metadata(self: Client, entry: str) -> Any:
        if entry == "a" and broken:
            raise TritonError(Fault.UNKNOWN, "it is broken")
        return await read(self, entry)

    monkeypatch.setattr(Client, "metadata", metadata)
    triton.models |= {"a": FakeModel(), "n": FakeModel()}
    await looks(found)
    assert found.models == ["m", "n"]
    broken = False
    await looks(found)
    assert found.models == ["m", "n", "a"]


async def test_an_entry_that_comes_back_as_ours_is_found(triton: Any, found: Found) -> None:
    triton.models["n"] = FakeModel(inputs=("text_input",))
    await looks(found)
    del triton.models["n"]
    await looks(found)
    triton.models["n"] = FakeModel()
    await looks(found)
    assert found.models == ["m", "n"]


async def test_a_triton_that_is_away_is_asked_again(
    triton: Any, found: Found, caplog: pytest.LogCaptureFixture
) -> None:
    await looks(found)
    with caplog.at_level(logging.WARNING):
        await triton.stop()
        await until(lambda: "models cannot be listed" in caplog.text)
        await triton.start()
        await looks(found)
    assert caplog.text.count("models cannot be listed") == 1


async def test_what_is_deleted_from_the_disk_is_forgotten_once_it_serves_no_more(
    triton: Any, found: Found
) -> None:
    triton.models["n"] = FakeModel()
    await looks(found)
    assert found.backend is not None
    replica = found.backend.replicas["n"]
    await until(lambda: replica.state is ReplicaState.READY)
    with replica.in_use():
        del triton.models["n"]
        await until(lambda: replica.state is not ReplicaState.READY)
        await looks(found)
        assert found.models == ["m", "n"]
    await until(lambda: found.models == ["m"], within_s=10)
    await until(lambda: watches() == [f"watch m on {triton.address}"])


def watches() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("watch ")]
