import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from gateway.triton.client import Client, EntryState
from gateway.triton.errors import Fault, TritonError
from tests.gateway.triton.fake_triton import (
    FakeModel,
    accepted,
    empty_final,
    hanging,
    infer_request,
    reply,
    until,
)
from wire.strings import pack_strings


@pytest.fixture
async def client(triton: Any) -> AsyncIterator[Client]:
    client = Client(triton.address)
    yield client
    await client.close()


def stream(client: Client, *, time_s: float = 30, idle_timeout_s: float = 20) -> Any:
    deadline = asyncio.get_running_loop().time() + time_s
    return client.stream_infer(infer_request(), deadline=deadline, idle_timeout_s=idle_timeout_s)


async def test_one_request_travels_alone_with_what_triton_has_to_know(client: Client, triton: Any) -> None:
    responses = [response async for response in stream(client)]
    assert len(responses) == 3
    (request,) = triton.requests
    assert request.parameters["triton_enable_empty_final_response"].bool_param
    assert "triton_grpc_error" not in triton.metadata[0]
    assert triton.metadata[0]["x-request-id"] == "req-1"


async def test_a_whole_answer_ends_by_the_streams_own_status_not_by_a_reset(
    client: Client, triton: Any
) -> None:
    async for _ in stream(client):
        pass
    assert triton.half_closed == 1
    assert not triton.cancelled.is_set()


async def test_an_empty_final_response_ends_the_stream_unseen(client: Client, triton: Any) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        yield empty_final()
        yield reply("never read")

    triton.model.answer = answer
    assert len([response async for response in stream(client)]) == 1


async def test_an_answer_beyond_grpcs_default_size_passes(client: Client, triton: Any) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield reply("x" * (5 * 2**20), final=True)

    triton.model.answer = answer
    (response,) = [response async for response in stream(client)]
    assert len(response.raw_output_contents[0]) > 5 * 2**20


async def test_a_bare_text_ends_the_stream_though_the_server_leaves_it_open(
    client: Client, triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.triton.client._LEAVE_S", 0.5)

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield service_pb2.ModelStreamInferResponse(error_message="[request id: r] Exceeds maximum queue size")
        await asyncio.Event().wait()

    triton.model.answer = answer
    with pytest.raises(TritonError) as raised:
        await anext(stream(client))
    assert raised.value.fault is Fault.QUEUE_FULL
    await asyncio.wait_for(triton.cancelled.wait(), 60)


async def test_a_models_own_status_is_read_with_its_text(client: Client, triton: Any) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "tritongate:invalid_request: no")

    triton.model.answer = answer
    responses = stream(client)
    await anext(responses)
    with pytest.raises(TritonError) as raised:
        await anext(responses)
    assert raised.value.fault is Fault.INVALID_REQUEST
    assert raised.value.message == "no"


async def test_a_stream_that_ends_without_its_final_response_was_cut(client: Client, triton: Any) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()

    triton.model.answer = answer
    responses = stream(client)
    await anext(responses)
    with pytest.raises(TritonError) as raised:
        await anext(responses)
    assert raised.value.fault is Fault.PROTOCOL


@pytest.mark.parametrize("answered", [0, 1], ids=["before the first response", "after it"])
async def test_silence_is_an_error_and_cancels(client: Client, triton: Any, answered: int) -> None:
    triton.model.answer = hanging(*[accepted()] * answered)
    responses = stream(client, idle_timeout_s=1)
    with pytest.raises(TritonError) as raised:
        async for _ in responses:
            pass
    assert raised.value.fault is Fault.SILENT
    await asyncio.wait_for(triton.cancelled.wait(), 60)


async def test_a_slow_reader_is_not_taken_for_a_silent_upstream(client: Client) -> None:
    seen = 0
    async for _ in stream(client, idle_timeout_s=2):
        seen += 1
        await asyncio.sleep(2.5 if seen < 3 else 0)
    assert seen == 3


async def test_the_deadline_ends_a_stream_that_still_talks(client: Client, triton: Any) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        while True:
            await asyncio.sleep(0.02)
            yield reply()

    triton.model.answer = answer
    with pytest.raises(TritonError) as raised:
        async for _ in stream(client, time_s=2):
            pass
    assert raised.value.fault is Fault.DEADLINE
    await asyncio.wait_for(triton.cancelled.wait(), 60)


async def test_closing_the_generator_cancels_the_call(client: Client, triton: Any) -> None:
    triton.model.answer = hanging(accepted())
    responses = stream(client)
    await anext(responses)
    await responses.aclose()
    await asyncio.wait_for(triton.cancelled.wait(), 60)


async def test_cancelling_the_waiting_task_cancels_the_call(client: Client, triton: Any) -> None:
    triton.model.answer = hanging(accepted())
    waiting = asyncio.Event()

    async def read() -> None:
        async with contextlib.aclosing(stream(client)) as responses:
            async for _ in responses:
                waiting.set()

    task = asyncio.create_task(read())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(triton.cancelled.wait(), 60)


@pytest.mark.parametrize("waits", [False, True])
async def test_whoever_leaves_behind_the_final_response_cancels_nothing(
    client: Client, triton: Any, waits: bool
) -> None:
    """A client that reads no further than `finish_reason` leaves at that moment.

    Cancelled then, the stream would keep the model from ever being unloaded.
    """
    final, ends = asyncio.Event(), asyncio.Event()

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        yield reply("x", final=True)
        await ends.wait()

    async def read() -> None:
        async with contextlib.aclosing(stream(client)) as responses:
            await anext(responses)
            await anext(responses)
            final.set()
            if waits:
                await anext(responses)

    triton.model.answer = answer
    task = asyncio.create_task(read())
    await final.wait()
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.1)
    assert not triton.cancelled.is_set()
    ends.set()
    await until(lambda: triton.half_closed == 1)
    assert not triton.cancelled.is_set()


async def test_nobody_there_is_said_at_once(triton: Any) -> None:
    await triton.stop()
    client = Client(triton.address)
    try:
        with pytest.raises(TritonError) as raised:
            await anext(stream(client))
        assert raised.value.fault is Fault.UNREACHABLE
        with pytest.raises(TritonError) as raised:
            await client.live()
        assert raised.value.fault is Fault.UNREACHABLE
    finally:
        await client.close()


async def test_a_server_that_goes_away_ends_its_streams(client: Client, triton: Any) -> None:
    triton.model.answer = hanging(accepted())
    responses = stream(client)
    await anext(responses)
    await triton.stop()
    with pytest.raises(TritonError) as raised:
        await anext(responses)
    assert raised.value.fault is Fault.UNREACHABLE


async def test_closing_the_channel_ends_calls_with_an_error_of_their_own(triton: Any) -> None:
    triton.model.answer = hanging(accepted())
    client = Client(triton.address)
    responses = stream(client)
    await anext(responses)
    waiting = asyncio.create_task(anext(responses))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(TritonError) as raised:
        await waiting
    assert raised.value.fault is Fault.CLOSED
    await asyncio.wait_for(triton.cancelled.wait(), 60)


@pytest.mark.parametrize("turns", range(12))
async def test_calls_can_be_ended_at_any_moment(client: Client, triton: Any, turns: int) -> None:
    """Also before they are sent: so many turns of the loop after they began."""
    triton.model.answer = hanging(accepted())

    async def read() -> Fault:
        with pytest.raises(TritonError) as raised:
            async for _ in stream(client):
                pass
        return raised.value.fault

    tasks = [asyncio.create_task(read()) for _ in range(20)]
    for _ in range(turns + 1):
        await asyncio.sleep(0)
    client.end_inference("m", Fault.UNLOADED, "it was unloaded")
    assert await asyncio.gather(*tasks) == [Fault.UNLOADED] * 20


async def test_nothing_is_left_of_a_call_that_ended_before_it_was_sent() -> None:
    """As to a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(f"127.0.0.1:{silent.getsockname()[1]}")
        others = asyncio.all_tasks()
        deadline = asyncio.get_running_loop().time() + 60
        responses = client.stream_infer(
            infer_request(), deadline=deadline, idle_timeout_s=60, cancel=lambda request: request
        )
        sending = asyncio.create_task(anext(responses))
        await until(lambda: len(asyncio.all_tasks() - others) > 1)
        client.end_inference("m", Fault.UNLOADED, "it was unloaded")
        with pytest.raises(TritonError, match="it was unloaded"):
            await sending
        await until(lambda: asyncio.all_tasks() <= others, within_s=5)
        await client.close()


async def test_closing_the_channel_may_have_a_reason_of_its_own(triton: Any) -> None:
    triton.model.answer = hanging(accepted())
    client = Client(triton.address)
    responses = stream(client)
    await anext(responses)
    await client.close(Fault.UNREACHABLE, "it went away")
    with pytest.raises(TritonError, match="it went away") as raised:
        await anext(responses)
    assert raised.value.fault is Fault.UNREACHABLE


async def test_a_unary_call_has_a_time_limit(triton: Any, monkeypatch: Any) -> None:
    async def never(request: Any, context: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(triton, "_ready", never)
    client = Client(triton.address, timeout_s=0.2)
    with pytest.raises(TritonError) as raised:
        await client.metadata("m")
    assert raised.value.fault is Fault.DEADLINE
    await client.close()


async def test_a_call_after_the_end_fails_for_the_reason_of_the_end(triton: Any) -> None:
    client = Client(triton.address)
    await client.close(Fault.UNREACHABLE, "it went away")
    for call in (client.live(), client.repository(), anext(stream(client))):
        with pytest.raises(TritonError, match="it went away"):
            await call


async def test_a_server_says_if_it_is_live(client: Client, triton: Any) -> None:
    assert await client.live()
    triton.live = False
    assert not await client.live()


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
    client: Client, triton: Any, state: str, reason: str, read: EntryState
) -> None:
    triton.models["old"] = FakeModel(state=state, reason=reason)
    assert await client.repository() == {"m": EntryState.READY, "old": read}


async def test_a_restricted_repository_needs_its_key_and_nothing_else_has_it(triton: Any) -> None:
    triton.restriction = ("triton-grpc-protocol-admin-key", "s3cret")
    for key in (None, "admin-key=wrong", "other=s3cret"):
        client = Client(triton.address, repository_key=key)
        for ask in (
            client.repository(),
            client.unload("m"),
            client.load("m", timeout_s=5),
        ):
            with pytest.raises(TritonError) as raised:
                await ask
            assert raised.value.fault is Fault.NOT_PERMITTED
            assert "repository_key" in raised.value.message
        await client.close()
    assert triton.orders == []
    client = Client(triton.address, repository_key="admin-key=s3cret")
    assert await client.repository() == {"m": EntryState.READY}
    await client.unload("m")
    await client.load("m", timeout_s=5)
    request = service_pb2.ModelInferRequest(model_name="m", id="r")
    request.inputs.add(name="sampling", datatype="BYTES", shape=(1, 1))
    request.raw_input_contents.append(pack_strings([b""]))
    deadline = asyncio.get_running_loop().time() + 20
    async for _ in client.stream_infer(request, deadline=deadline, idle_timeout_s=20):
        pass
    await client.live()
    assert len(triton.metadata) == 2
    assert "s3cret" not in str(triton.metadata)
    await client.close()


async def test_of_several_versions_the_one_that_serves_counts(
    client: Client, triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def index(self: Any, method: str, request: Any) -> Any:
        answer = service_pb2.RepositoryIndexResponse()
        for version, state, reason in (("1", "UNAVAILABLE", "unloaded"), ("2", "READY", ""), ("3", "", "")):
            answer.models.add(name="m", version=version, state=state, reason=reason)
        return answer

    monkeypatch.setattr(Client, "_unary", index)
    assert await client.repository() == {"m": EntryState.READY}


async def test_entries_are_loaded_and_unloaded(client: Client, triton: Any) -> None:
    await client.unload("m")
    await until(lambda: triton.model.state == "UNAVAILABLE")
    await client.load("m", timeout_s=5)
    assert triton.model.state == "READY"
    assert triton.orders == ["unload m", "load m"]


async def test_the_tensors_of_an_entry_are_read(client: Client) -> None:
    assert [tensor.name for tensor in (await client.metadata("m")).inputs] == [
        "prompt",
        "history",
        "sampling",
    ]


async def test_asking_about_an_unknown_model_is_an_error(client: Client) -> None:
    with pytest.raises(TritonError) as raised:
        await client.metadata("other")
    assert raised.value.fault is Fault.NOT_READY
