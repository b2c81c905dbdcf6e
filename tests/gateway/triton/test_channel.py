import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from gateway.triton.channel import Channel
from gateway.triton.status import Fault, TritonError
from tests.gateway.triton.fake_triton import accepted, empty_final, hanging, reply
from wire.strings import pack_strings


@pytest.fixture
async def channel(triton: Any) -> AsyncIterator[Channel]:
    channel = Channel(triton.address)
    yield channel
    await channel.close()


def infer_request() -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="m", id="req-1")
    for name in ("prompt", "history", "sampling"):
        request.inputs.add(name=name, datatype="BYTES", shape=(1, 1))
        request.raw_input_contents.append(pack_strings([b"{}"]))
    return request


def stream(channel: Channel, *, time_s: float = 30, idle_timeout_s: float = 20) -> Any:
    deadline = asyncio.get_running_loop().time() + time_s
    return channel.stream_infer(infer_request(), deadline=deadline, idle_timeout_s=idle_timeout_s)


async def test_one_request_travels_alone_with_what_triton_has_to_know(channel: Channel, triton: Any) -> None:
    responses = [response async for response in stream(channel)]
    assert len(responses) == 3
    (request,) = triton.requests
    assert request.parameters["triton_enable_empty_final_response"].bool_param
    assert "triton_grpc_error" not in triton.metadata[0]
    assert triton.metadata[0]["x-request-id"] == "req-1"


async def test_a_whole_answer_ends_by_the_streams_own_status_not_by_a_reset(
    channel: Channel, triton: Any
) -> None:
    async for _ in stream(channel):
        pass
    assert triton.half_closed == 1
    assert not triton.cancelled.is_set()


async def test_an_empty_final_response_ends_the_stream_unseen(channel: Channel, triton: Any) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        yield empty_final()
        yield reply("never read")

    triton.model.answer = answer
    assert len([response async for response in stream(channel)]) == 1


async def test_an_answer_beyond_grpcs_default_size_passes(channel: Channel, triton: Any) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield reply("x" * (5 * 2**20), final=True)

    triton.model.answer = answer
    (response,) = [response async for response in stream(channel)]
    assert len(response.raw_output_contents[0]) > 5 * 2**20


async def test_a_bare_text_ends_the_stream_though_the_server_leaves_it_open(
    channel: Channel, triton: Any
) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield service_pb2.ModelStreamInferResponse(error_message="[request id: r] Exceeds maximum queue size")
        await asyncio.Event().wait()

    triton.model.answer = answer
    with pytest.raises(TritonError) as raised:
        await anext(stream(channel))
    assert raised.value.fault is Fault.QUEUE_FULL
    await asyncio.wait_for(triton.cancelled.wait(), 60)


async def test_a_models_own_status_is_read_with_its_text(channel: Channel, triton: Any) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "tritongate:invalid_request: no")

    triton.model.answer = answer
    responses = stream(channel)
    await anext(responses)
    with pytest.raises(TritonError) as raised:
        await anext(responses)
    assert raised.value.fault is Fault.INVALID_REQUEST
    assert raised.value.message == "no"


async def test_a_stream_that_ends_without_its_final_response_was_cut(channel: Channel, triton: Any) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()

    triton.model.answer = answer
    responses = stream(channel)
    await anext(responses)
    with pytest.raises(TritonError) as raised:
        await anext(responses)
    assert raised.value.fault is Fault.PROTOCOL


@pytest.mark.parametrize("answered", [0, 1], ids=["before the first response", "after it"])
async def test_silence_is_an_error_and_cancels(channel: Channel, triton: Any, answered: int) -> None:
    triton.model.answer = hanging(*[accepted()] * answered)
    responses = stream(channel, idle_timeout_s=1)
    with pytest.raises(TritonError) as raised:
        async for _ in responses:
            pass
    assert raised.value.fault is Fault.SILENT
    await asyncio.wait_for(triton.cancelled.wait(), 60)


async def test_a_slow_reader_is_not_taken_for_a_silent_upstream(channel: Channel) -> None:
    seen = 0
    async for _ in stream(channel, idle_timeout_s=2):
        seen += 1
        await asyncio.sleep(2.5 if seen < 3 else 0)
    assert seen == 3


async def test_the_deadline_ends_a_stream_that_still_talks(channel: Channel, triton: Any) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        while True:
            await asyncio.sleep(0.02)
            yield reply()

    triton.model.answer = answer
    with pytest.raises(TritonError) as raised:
        async for _ in stream(channel, time_s=2):
            pass
    assert raised.value.fault is Fault.DEADLINE
    await asyncio.wait_for(triton.cancelled.wait(), 60)


async def test_closing_the_generator_cancels_the_call(channel: Channel, triton: Any) -> None:
    triton.model.answer = hanging(accepted())
    responses = stream(channel)
    await anext(responses)
    await responses.aclose()
    await asyncio.wait_for(triton.cancelled.wait(), 60)


async def test_cancelling_the_waiting_task_cancels_the_call(channel: Channel, triton: Any) -> None:
    triton.model.answer = hanging(accepted())
    waiting = asyncio.Event()

    async def read() -> None:
        async with contextlib.aclosing(stream(channel)) as responses:
            async for _ in responses:
                waiting.set()

    task = asyncio.create_task(read())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(triton.cancelled.wait(), 60)


async def test_nobody_there_is_said_at_once(triton: Any) -> None:
    await triton.stop()
    channel = Channel(triton.address)
    try:
        with pytest.raises(TritonError) as raised:
            await anext(stream(channel))
        assert raised.value.fault is Fault.UNREACHABLE
        with pytest.raises(TritonError) as raised:
            await channel.unary("ServerLive", service_pb2.ServerLiveRequest(), timeout_s=20)
        assert raised.value.fault is Fault.UNREACHABLE
    finally:
        await channel.close()


async def test_a_server_that_goes_away_ends_its_streams(channel: Channel, triton: Any) -> None:
    triton.model.answer = hanging(accepted())
    responses = stream(channel)
    await anext(responses)
    await triton.stop()
    with pytest.raises(TritonError) as raised:
        await anext(responses)
    assert raised.value.fault is Fault.UNREACHABLE


async def test_closing_the_channel_ends_calls_with_an_error_of_their_own(triton: Any) -> None:
    triton.model.answer = hanging(accepted())
    channel = Channel(triton.address)
    responses = stream(channel)
    await anext(responses)
    waiting = asyncio.create_task(anext(responses))
    await asyncio.sleep(0)
    await channel.close()
    with pytest.raises(TritonError) as raised:
        await waiting
    assert raised.value.fault is Fault.CLOSED
    await asyncio.wait_for(triton.cancelled.wait(), 60)


async def test_closing_the_channel_may_have_a_reason_of_its_own(triton: Any) -> None:
    triton.model.answer = hanging(accepted())
    channel = Channel(triton.address)
    responses = stream(channel)
    await anext(responses)
    await channel.close(Fault.UNREACHABLE, "it went away")
    with pytest.raises(TritonError, match="it went away") as raised:
        await anext(responses)
    assert raised.value.fault is Fault.UNREACHABLE


async def test_a_unary_call_has_a_time_limit(channel: Channel, triton: Any, monkeypatch: Any) -> None:
    async def never(request: Any, context: Any) -> None:
        await asyncio.Event().wait()

    triton.model.state = "READY"
    monkeypatch.setattr(triton, "_ready", never)
    with pytest.raises(TritonError) as raised:
        await channel.unary("ModelMetadata", service_pb2.ModelMetadataRequest(name="m"), timeout_s=0.2)
    assert raised.value.fault is Fault.DEADLINE
