import asyncio
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from gateway.errors import (
    DeadlineError,
    GatewayError,
    InvalidRequestError,
    RateLimitError,
    UnavailableError,
    UpstreamProtocolError,
)
from gateway.prediction import InputTensor, Prediction
from gateway.triton.health import ReplicaState
from tests.gateway.triton.fake_triton import FakeModel, until
from wire.strings import pack_strings


def prediction(**changes: Any) -> Prediction:
    fields: dict[str, Any] = {
        "request_id": "req-1",
        "model": "m",
        "inputs": (InputTensor(name="prompt", datatype="BYTES", shape=(1,), values=(b"hi",)),),
        "deadline": asyncio.get_running_loop().time() + 30,
    }
    return Prediction(**(fields | changes))


def entry(**changes: Any) -> FakeModel:
    return FakeModel(inputs=("prompt", "history"), **changes)


def failing(code: grpc.StatusCode, text: str) -> Any:
    async def answer(request: Any, context: Any) -> Any:
        await context.abort(code, text)

    return answer


async def hang(request: Any, context: Any) -> Any:
    await asyncio.Event().wait()


async def test_a_prediction_goes_to_the_request_response_entry(
    triton: Any, serve: Any, observer: Any
) -> None:
    pool = await serve(triton)
    triton.models["m"] = entry()
    answer = await pool.predict(prediction(outputs=("response",), version="1"))
    assert answer.version == "1"
    (output,) = answer.outputs
    assert (output.name, output.datatype, output.raw) == ("response", "BYTES", pack_strings([b"hi"]))
    (request,) = triton.requests
    assert (request.model_name, request.model_version, request.id) == ("m", "1", "req-1")
    assert [asked.name for asked in request.outputs] == ["response"]
    assert triton.metadata[0]["x-request-id"] == "req-1"
    assert observer.errors == []


@pytest.mark.parametrize(
    ("declared", "given", "sent"),
    [((-1, 1), (1,), [1, 1]), ((-1, 1), (1, 1), [1, 1]), ((1,), (1,), [1]), ((-1,), (1,), [1])],
)
async def test_the_batchers_dimension_is_added_where_it_is_missing_and_taken_off_again(
    triton: Any, serve: Any, declared: tuple[int, ...], given: tuple[int, ...], sent: list[int]
) -> None:
    pool = await serve(triton)
    triton.models["m"] = entry(shape=declared)
    tensor = InputTensor(name="prompt", datatype="BYTES", shape=given, values=(b"hi",))
    answer = await pool.predict(prediction(inputs=(tensor,)))
    assert list(triton.requests[0].inputs[0].shape) == sent
    assert answer.outputs[0].shape == given


@pytest.mark.parametrize(
    ("changes", "param"), [({"name": "promt"}, "inputs.0.name"), ({"datatype": "INT16"}, "inputs.0.datatype")]
)
async def test_what_the_model_does_not_have_is_named(
    triton: Any, serve: Any, changes: dict[str, Any], param: str
) -> None:
    pool = await serve(triton)
    triton.models["m"] = entry()
    fields: dict[str, Any] = {"name": "prompt", "datatype": "BYTES", "shape": (1,), "values": (1,)} | changes
    with pytest.raises(InvalidRequestError) as raised:
        await pool.predict(prediction(inputs=(InputTensor(**fields),)))
    assert raised.value.param == param
    assert triton.requests == []


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (
            (
                grpc.StatusCode.INVALID_ARGUMENT,
                "[request id: r] expected 4 inputs but got 1 inputs for model 'm'\nAt: /models",
            ),
            InvalidRequestError,
            "expected 4 inputs but got 1 inputs for model 'm'",
        ),
        (
            (grpc.StatusCode.INVALID_ARGUMENT, "tritongate:invalid_request: max_token: not a number"),
            InvalidRequestError,
            "max_token: not a number",
        ),
        ((grpc.StatusCode.UNAVAILABLE, "tritongate:queue_full: 512"), RateLimitError, "queue is full"),
        ((grpc.StatusCode.INTERNAL, "Traceback: /models/m"), UpstreamProtocolError, "failed to answer"),
    ],
)
async def test_refusals_go_through_the_one_table_and_leave_the_engine_in_peace(
    triton: Any, serve: Any, status: tuple[Any, str], error: type[GatewayError], words: str
) -> None:
    pool = await serve(triton)
    triton.models["m"] = entry(predict=failing(*status))
    with pytest.raises(error) as raised:
        await pool.predict(prediction())
    assert words in raised.value.message
    assert "/models" not in raised.value.message
    assert pool.model("m").ready


async def test_a_triton_without_the_entry_is_passed_by_and_keeps_its_engine(tritons: Any, serve: Any) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    second.models["m"] = entry()
    for _ in range(2):
        await pool.predict(prediction())
    assert len(second.requests) == 2
    assert all(replica.state is ReplicaState.READY for replica in pool.replicas())
    del second.models["m"]
    with pytest.raises(UnavailableError):
        await pool.predict(prediction())


async def test_a_lost_triton_is_replaced_unseen(tritons: Any, serve: Any, observer: Any) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    for triton in (first, second):
        triton.models["m"] = entry()
    first.models["m"].predict = failing(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    for _ in range(2):
        await pool.predict(prediction())
    assert len(second.requests) == 2
    assert set(observer.errors) <= {("m", first.address, "unreachable")}


async def test_cancelling_and_the_deadline_reach_triton(triton: Any, serve: Any) -> None:
    pool = await serve(triton)
    triton.models["m"] = entry(predict=hang)
    with pytest.raises(DeadlineError):
        await pool.predict(prediction(deadline=asyncio.get_running_loop().time() + 2))
    await asyncio.wait_for(triton.cancelled.wait(), 60)
    triton.cancelled.clear()
    task = asyncio.create_task(pool.predict(prediction()))
    await until(lambda: len(triton.requests) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(triton.cancelled.wait(), 60)


async def test_one_that_runs_on_a_dead_engine_ends(triton: Any, serve: Any) -> None:
    async def dead(request: Any, context: Any) -> Any:
        yield await context.abort(grpc.StatusCode.INTERNAL, "Stub process 'm-stream_0_0' is not healthy.")

    pool = await serve(triton)
    triton.models["m"] = entry(predict=hang)
    task = asyncio.create_task(pool.predict(prediction()))
    await until(lambda: bool(triton.requests))
    triton.model.probe = dead
    with pytest.raises(UnavailableError, match="died"):
        await task


async def test_an_answer_without_its_contents_is_a_502(triton: Any, serve: Any) -> None:
    async def answer(request: Any, context: Any) -> Any:
        message = service_pb2.ModelInferResponse()
        message.outputs.add(name="response", datatype="BYTES", shape=[1])
        return message

    pool = await serve(triton)
    triton.models["m"] = entry(predict=answer)
    with pytest.raises(UpstreamProtocolError):
        await pool.predict(prediction())
