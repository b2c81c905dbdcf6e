import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from gateway.triton.channel import Channel
from gateway.triton.control import Control, EntryState, ModelMetadata, TensorMetadata, load_failure
from gateway.triton.status import Fault, TritonError
from tests.gateway.triton.fake_triton import FakeModel, until


@pytest.fixture
async def control(triton: Any) -> AsyncIterator[Control]:
    channel = Channel(triton.address)
    yield Control(channel)
    await channel.close()


async def test_a_server_says_if_it_is_live(control: Control, triton: Any) -> None:
    assert await control.live()
    triton.live = False
    assert not await control.live()


@pytest.mark.parametrize(
    ("state", "reason", "read"),
    [
        ("READY", "", EntryState.READY),
        ("LOADING", "", EntryState.LOADING),
        ("UNLOADING", "", EntryState.UNLOADING),
        ("UNAVAILABLE", "unloaded", EntryState.UNLOADED),
        ("UNAVAILABLE", "Internal: CheckpointError: /x", EntryState.FAILED),
        ("", "", EntryState.NEVER_LOADED),
    ],
)
async def test_the_repository_is_listed_with_states(
    control: Control, triton: Any, state: str, reason: str, read: EntryState
) -> None:
    triton.models["old"] = FakeModel(state=state, reason=reason)
    assert await control.repository() == {"m": EntryState.READY, "old": read}


async def test_a_restricted_repository_needs_its_key_and_nothing_else_has_it(triton: Any) -> None:
    triton.restriction = ("triton-grpc-protocol-admin-key", "s3cret")
    for key in (None, "admin-key=wrong", "other=s3cret"):
        channel = Channel(triton.address, repository_key=key)
        for ask in (
            Control(channel).repository(),
            Control(channel).unload("m"),
            Control(channel).load("m", timeout_s=5),
        ):
            with pytest.raises(TritonError) as raised:
                await ask
            assert raised.value.fault is Fault.NOT_PERMITTED
            assert "repository_key" in raised.value.message
        await channel.close()
    assert triton.orders == []
    channel = Channel(triton.address, repository_key="admin-key=s3cret")
    control = Control(channel)
    assert await control.repository() == {"m": EntryState.READY}
    await control.unload("m")
    await control.load("m", timeout_s=5)
    request = service_pb2.ModelInferRequest(model_name="m", id="r")
    request.inputs.add(name="prompt", datatype="BYTES", shape=(1, 1))
    request.raw_input_contents.append(b"")
    await channel.infer(request, deadline=asyncio.get_running_loop().time() + 20)
    await control.live()
    assert len(triton.metadata) == 2
    assert "s3cret" not in str(triton.metadata)
    await channel.close()


async def test_of_several_versions_the_one_that_serves_counts(
    control: Control, triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def index(self: Any, method: str, request: Any, *, timeout_s: float) -> Any:
        answer = service_pb2.RepositoryIndexResponse()
        for version, state, reason in (("1", "UNAVAILABLE", "unloaded"), ("2", "READY", ""), ("3", "", "")):
            answer.models.add(name="m", version=version, state=state, reason=reason)
        return answer

    monkeypatch.setattr(Channel, "unary", index)
    assert await control.repository() == {"m": EntryState.READY}


async def test_entries_are_loaded_and_unloaded(control: Control, triton: Any) -> None:
    await control.unload("m")
    await until(lambda: triton.model.state == "UNAVAILABLE")
    await control.load("m", timeout_s=5)
    assert triton.model.state == "READY"
    assert triton.orders == ["unload m", "load m"]


@pytest.mark.parametrize(
    ("detail", "reason"),
    [
        (
            "version 1 is at UNAVAILABLE state: Internal: Error: /ckpt: no\nweights\n\nAt:\n  /x: load\n;\n",
            "Error: /ckpt: no weights",
        ),
        (
            "version 1 is at UNAVAILABLE state: Internal: Stub process 'm_0_0' is not healthy.;",
            "its process died while loading; is there enough memory?",
        ),
        (
            "failed to load 'm', failed to poll from model repository",
            "failed to load 'm', failed to poll from model repository",
        ),
    ],
)
def test_a_failed_load_is_told_in_one_line(detail: str, reason: str) -> None:
    assert load_failure(detail) == reason


async def test_metadata_and_config_are_read(control: Control) -> None:
    string = TensorMetadata(datatype="BYTES", shape=(-1, 1))
    assert await control.metadata("m") == ModelMetadata(
        inputs=dict.fromkeys(("prompt", "history", "sampling"), string),
        outputs=dict.fromkeys(("response", "meta"), string),
    )
    assert (await control.config("m")).backend == "python"


async def test_asking_about_an_unknown_model_is_an_error(control: Control) -> None:
    for question in (control.metadata, control.config):
        with pytest.raises(TritonError) as raised:
            await question("other")
        assert raised.value.fault is Fault.NOT_READY
