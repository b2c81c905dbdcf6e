from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.triton.channel import Channel
from gateway.triton.control import Control, ModelMetadata, RepositoryEntry, TensorMetadata
from gateway.triton.status import Fault, TritonError
from tests.gateway.triton.fake_triton import FakeModel


@pytest.fixture
async def control(triton: Any) -> AsyncIterator[Control]:
    channel = Channel(triton.address)
    yield Control(channel)
    await channel.close()


async def test_a_server_says_if_it_is_live(control: Control, triton: Any) -> None:
    assert await control.live()
    triton.live = False
    assert not await control.live()


async def test_a_model_is_ready_or_not(control: Control, triton: Any) -> None:
    assert await control.model_ready("m-stream")
    assert not await control.model_ready("other")


async def test_the_repository_is_listed_with_states(control: Control, triton: Any) -> None:
    triton.models["old-stream"] = FakeModel(state="UNAVAILABLE")
    assert await control.repository() == [
        RepositoryEntry(name="m-stream", state="READY", reason=""),
        RepositoryEntry(name="old-stream", state="UNAVAILABLE", reason="unloaded"),
    ]


async def test_metadata_and_config_are_read(control: Control) -> None:
    string = TensorMetadata(datatype="BYTES", shape=(-1, 1))
    assert await control.metadata("m-stream") == ModelMetadata(
        inputs=dict.fromkeys(("prompt", "history", "sampling"), string),
        outputs=dict.fromkeys(("response", "meta"), string),
    )
    assert (await control.config("m-stream")).backend == "python"


async def test_asking_about_an_unknown_model_is_an_error(control: Control) -> None:
    for question in (control.metadata, control.config):
        with pytest.raises(TritonError) as raised:
            await question("other")
        assert raised.value.fault is Fault.NOT_READY
