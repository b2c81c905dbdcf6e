"""The gRPC service on a real port, over the fake upstream: what Triton's own library and raw stubs get."""

import asyncio
import json
import logging
import queue
import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from gateway.app import create_app
from gateway.core.events import Event
from gateway.core.request import Generation, Turns
from gateway.errors import (
    ContextLengthError,
    DeadlineError,
    ListenError,
    RateLimitError,
    UnavailableError,
    UpstreamProtocolError,
)
from gateway.kserve.grpc import GrpcServer, _client_of
from gateway.limits.admission import Pacing
from tests.gateway.fake_upstream import FakeUpstream, say, say_and_hang
from tests.gateway.kserve.legacy import VALUES, echo, over_grpc, question
from tests.gateway.serving import settings, until
from wire.history import Turn
from wire.strings import unpack_strings

ROUTE = "/inference.GRPCInferenceService/"
CODE = grpc.StatusCode


async def refusal(call: Any) -> tuple[Any, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), raised.value.details() or ""


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("ipv4:192.0.2.7:4711", "192.0.2.7"),
        ("ipv6:%5B2001:db8::1%5D:4711", "2001:db8::1"),
        ("unix:/run/socket", None),
    ],
)
def test_the_address_of_a_peer(peer: str, client: str | None) -> None:
    assert _client_of(SimpleNamespace(peer=lambda: peer)) == client


async def test_a_line_has_the_peers_address(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.access")
    async with over_grpc(FakeUpstream(echo)) as (served, stub, _):
        await stub.ModelInfer(question(), metadata=[("x-forwarded-for", "192.0.2.7")])
        await served.until_idle()
    (line,) = (vars(record) for record in caplog.records if record.name == "gateway.access")
    assert line["client"] == "127.0.0.1"


async def test_a_question_is_answered_and_counted() -> None:
    upstream = FakeUpstream(echo)
    async with over_grpc(upstream) as (served, stub, _):
        answer = await stub.ModelInfer(question(history="[['q', 'a']]"), metadata=[("x-request-id", "mine")])
        assert (answer.model_name, answer.model_version, answer.id) == ("glm", "1", "7")
        assert [(each.name, each.datatype, list(each.shape)) for each in answer.outputs] == [
            ("response", "BYTES", [1, 1]),
            ("history", "BYTES", [1, 1]),
        ]
        response, history = (unpack_strings(raw)[0].decode() for raw in answer.raw_output_contents)
        assert response == "re 你好\nmore"
        assert json.loads(history) == [["q", "a"], ["你好", "re 你好\nmore"]]
        await served.until_idle()
        assert served.metric("requests_total", route=ROUTE + "ModelInfer", model="glm", status="200") == 1
        assert served.metric("generated_tokens_total", model="glm") == 2
    (generation,) = upstream.requests
    assert generation.request_id == "mine"
    assert generation.prompt == Turns((Turn("user", "q"), Turn("assistant", "a")), "你好")


async def test_contents_may_be_in_the_tensors_themselves() -> None:
    async with over_grpc(FakeUpstream(echo), contract="unbatched") as (_, stub, _):
        request = service_pb2.ModelInferRequest(model_name="glm")
        for name in ("prompt", "history", "temperature"):
            request.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(
                VALUES[name].encode()
            )
        for name in ("max_token", "history_len"):
            request.inputs.add(name=name, datatype="INT16", shape=[1]).contents.int_contents.append(40)
        answer = await stub.ModelInfer(request)
        assert list(answer.outputs[0].shape) == [1]
        request.inputs[3].contents.int_contents[0] = 40000
        assert (await refusal(stub.ModelInfer(request)))[0] is CODE.INVALID_ARGUMENT
        request.raw_input_contents.append(b"")
        assert (await refusal(stub.ModelInfer(request)))[0] is CODE.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ContextLengthError("too long"), CODE.INVALID_ARGUMENT),
        (RateLimitError("full"), CODE.RESOURCE_EXHAUSTED),
        (UpstreamProtocolError("odd"), CODE.INTERNAL),
        (UnavailableError("away"), CODE.UNAVAILABLE),
        (DeadlineError("late"), CODE.DEADLINE_EXCEEDED),
        (ZeroDivisionError("a secret"), CODE.INTERNAL),
    ],
)
async def test_errors_have_tritons_codes(error: Exception, code: Any) -> None:
    async def fail(_: Generation) -> AsyncGenerator[Event, None]:
        raise error
        yield

    async with over_grpc(FakeUpstream(fail)) as (served, stub, _):
        found, message = await refusal(stub.ModelInfer(question()))
        assert found is code
        assert "secret" not in message
        await served.until_idle()


async def test_what_is_wrong_is_refused_by_name() -> None:
    async with over_grpc(FakeUpstream(echo)) as (_, stub, address):
        for request, words in (
            (question(temperature="x"), "temperature"),
            (question(max_token=None), "max_token missing"),
            (question(surprise="x"), "no input 'surprise'"),
        ):
            code, message = await refusal(stub.ModelInfer(request))
            assert (code, words in message) == (CODE.INVALID_ARGUMENT, True)
        assert (await refusal(stub.ModelInfer(question("other"))))[0] is CODE.NOT_FOUND
        assert (await refusal(stub.ModelMetadata(service_pb2.ModelMetadataRequest(name="x"))))[
            0
        ] is CODE.NOT_FOUND
        shared = question()
        shared.inputs[0].parameters["shared_memory_region"].string_param = "x"
        assert (await refusal(stub.ModelInfer(shared)))[0] is CODE.INVALID_ARGUMENT
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary(ROUTE + "ModelInfer")
            assert (await refusal(call(b"\xff\xff\xff")))[0] is CODE.INVALID_ARGUMENT


async def test_methods_that_are_not_offered_are_refused_by_name() -> None:
    async with over_grpc(FakeUpstream()) as (_, stub, _):
        for name in ("SystemSharedMemoryStatus", "CudaSharedMemoryRegister", "TraceSetting", "LogSettings"):
            request = getattr(service_pb2, f"{name}Request")()
            code, message = await refusal(getattr(stub, name)(request))
            assert (code, name in message) == (CODE.UNIMPLEMENTED, True)


async def test_probes_of_kubernetes_are_answered_as_by_triton() -> None:
    upstream = FakeUpstream()
    async with (
        over_grpc(upstream, api_keys=[{"name": "user", "key": "k"}]) as (served, _, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        serving, not_serving = b"\x08\x01", b"\x08\x02"
        for request in (b"", b"\x0a\x07service"):
            assert await check(request) == serving
        upstream.ready = False
        assert await check(b"") == not_serving
        upstream.ready = True
        served.gateway.drain.begin()
        assert await check(b"") == not_serving
        route = "/grpc.health.v1.Health/Check"
        assert served.metric("requests_total", route=route, model="unknown", status="200") == 4
        watch = channel.unary_unary("/grpc.health.v1.Health/Watch")
        assert (await refusal(watch(b"")))[0] is CODE.UNIMPLEMENTED


async def test_keys_are_metadata() -> None:
    keys = [{"name": "user", "key": "k"}, {"name": "boss", "key": "a", "scopes": ["admin"]}]
    async with over_grpc(FakeUpstream(echo), api_keys=keys) as (served, stub, _):
        user, boss = ([("authorization", f"Bearer {key}")] for key in "ka")
        load = service_pb2.RepositoryModelLoadRequest(model_name="glm")
        assert (await refusal(stub.ModelInfer(question())))[0] is CODE.UNAUTHENTICATED
        assert (await refusal(stub.ModelInfer(question(), metadata=boss)))[0] is CODE.PERMISSION_DENIED
        assert (await refusal(stub.RepositoryModelLoad(load, metadata=user)))[0] is CODE.PERMISSION_DENIED
        assert (await refusal(stub.ModelReady(service_pb2.ModelReadyRequest(name="glm"))))[
            0
        ] is CODE.UNAUTHENTICATED
        await stub.RepositoryModelLoad(load, metadata=boss)
        assert (await stub.ServerLive(service_pb2.ServerLiveRequest())).live
        await stub.ModelInfer(question(), metadata=user)
        await served.until_idle()
        for name in ("user", "boss"):
            assert served.metric("key_requests_total", key=name, model="unknown", status="403") == 1


async def test_the_key_and_its_limits_come_before_the_message() -> None:
    key = {"name": "k", "key": "k", "requests_per_minute": 1}
    async with over_grpc(FakeUpstream(echo), api_keys=[key]) as (served, stub, address):
        metadata = [("authorization", "Bearer k")]
        await stub.ModelInfer(question(), metadata=metadata)
        async with grpc.aio.insecure_channel(address) as channel:
            for name in ("ModelInfer", "ModelStreamInfer"):
                # What would send messages sends none, and hears nevertheless.
                unknown = channel.stream_stream(ROUTE + name)()
                assert (await refusal(unknown.read()))[0] is CODE.UNAUTHENTICATED
            over = channel.stream_stream(ROUTE + "ModelInfer")(metadata=metadata)
            assert (await refusal(over.read()))[0] is CODE.RESOURCE_EXHAUSTED
        await until(
            lambda: (
                served.metric("requests_total", route=ROUTE + "ModelInfer", model="unknown", status="429")
                == 1
            )
        )
        assert (
            served.metric("requests_total", route=ROUTE + "ModelStreamInfer", model="unknown", status="401")
            == 1
        )


async def test_a_message_that_never_comes_is_given_up() -> None:
    async with (
        over_grpc(FakeUpstream(echo), body_timeout_s=0.2) as (served, stub, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        silent = channel.stream_stream(ROUTE + "ModelInfer")()
        assert (await refusal(silent.read()))[0] is CODE.DEADLINE_EXCEEDED
        none = channel.stream_stream(ROUTE + "ModelInfer")()
        await none.done_writing()
        assert (await refusal(none.read()))[0] is CODE.INVALID_ARGUMENT
        assert await stub.ModelInfer(question())
        await served.until_idle()


async def test_without_keys_nobody_controls_models_through_a_proxy() -> None:
    async with over_grpc(FakeUpstream()) as (served, stub, _):
        load = service_pb2.RepositoryModelLoadRequest(model_name="glm")
        for name in ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"):
            call = stub.RepositoryModelLoad(load, metadata=[(name, "192.0.2.7")])
            code, message = await refusal(call)
            assert (code, "proxy" in message) == (CODE.PERMISSION_DENIED, True)
        assert not served.upstream.changes
        await stub.RepositoryModelLoad(load)


@pytest.mark.parametrize("how", ["cancel", "connection"])
async def test_a_client_that_leaves_frees_the_engine_at_once(how: str) -> None:
    upstream = FakeUpstream(lambda _: say_and_hang("a"))
    took = []
    async with over_grpc(upstream) as (served, _, address):
        for number in range(1, 5):
            channel = grpc.aio.insecure_channel(address)
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(question())
            await until(lambda count=number: served.metric("generated_tokens_total", model="glm") == count)
            left = time.monotonic()
            if how == "cancel":
                call.cancel()
            else:
                await channel.close()
            await until(lambda count=number: upstream.cancelled == count)
            took.append(time.monotonic() - left)
            await channel.close()
        await served.until_idle()
        await until(lambda: served.metric("client_cancels_total", model="glm") == 4)
    assert min(took) < 0.25  # whatever else the machine did meanwhile


async def test_the_clients_deadline_ends_it() -> None:
    upstream = FakeUpstream(lambda _: say_and_hang("a"))
    async with over_grpc(upstream) as (served, stub, _):
        assert (await refusal(stub.ModelInfer(question(), timeout=2)))[0] is CODE.DEADLINE_EXCEEDED
        await until(lambda: upstream.cancelled == 1)
        await served.until_idle()


async def test_the_parameter_timeout_ends_it_too() -> None:
    upstream = FakeUpstream(lambda _: say_and_hang("a"))
    async with over_grpc(upstream) as (served, stub, _):
        limited = question()
        limited.parameters["timeout"].int64_param = 100_000
        assert (await refusal(stub.ModelInfer(limited)))[0] is CODE.DEADLINE_EXCEEDED
        for other in ({"uint64_param": 100_000}, {"string_param": "1"}, {"double_param": 0.1}, {}):
            wrong = question()
            wrong.parameters["timeout"].CopyFrom(service_pb2.InferParameter(**other))
            code, message = await refusal(stub.ModelInfer(wrong, timeout=20))
            assert (code, "parameters.timeout" in message) == (CODE.INVALID_ARGUMENT, True)
        await served.until_idle()


async def test_a_message_over_the_limit_is_refused() -> None:
    async with over_grpc(FakeUpstream(echo), max_body_bytes=10_000) as (_, stub, _):
        assert (await refusal(stub.ModelInfer(question(prompt="x" * 10_000))))[0] is CODE.RESOURCE_EXHAUSTED
        assert await stub.ModelInfer(question())


async def test_messages_that_are_held_count_together() -> None:
    upstream = FakeUpstream(lambda _: say_and_hang("a"))
    async with over_grpc(upstream, max_held_body_bytes=2**20) as (served, stub, _):
        large = question(prompt="x" * 300_000)
        first = stub.ModelInfer(large)
        await until(lambda: upstream.running == 1)
        assert (await refusal(stub.ModelInfer(large)))[0] is CODE.RESOURCE_EXHAUSTED
        first.cancel()
        await served.until_idle()
        await until(lambda: served.gateway.bodies.held == 0)


async def test_a_drain_refuses_new_calls_and_waits_for_others() -> None:
    upstream = FakeUpstream(lambda _: say("a", gap_s=0.5))
    async with over_grpc(upstream) as (served, stub, _):
        running = asyncio.ensure_future(stub.ModelInfer(question()))
        await until(lambda: upstream.running == 1)
        served.gateway.drain.begin()
        assert (await refusal(stub.ModelInfer(question())))[0] is CODE.UNAVAILABLE
        assert not (await stub.ServerReady(service_pb2.ServerReadyRequest())).ready
        assert await served.gateway.drain.idle(30)
        assert (await running).model_name == "glm"


async def test_an_address_that_somebody_has() -> None:
    async with over_grpc(FakeUpstream()) as (_, _, _):
        app = create_app(settings(), FakeUpstream())
        taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        address = f"127.0.0.1:{taken.sockets[0].getsockname()[1]}"
        with pytest.raises(ListenError, match=f"cannot listen on {address} for gRPC"):
            await GrpcServer(app.state.door, app.state.records).start(address)
        taken.close()


def streamed(*requests: Any, pause_s: float = 0.0) -> Any:
    async def each() -> AsyncGenerator[Any, None]:
        for request in requests:
            yield request
            await asyncio.sleep(pause_s)

    return each()


async def test_each_request_of_a_stream_has_one_final_response_in_order() -> None:
    slow = asyncio.Event()

    async def answer(request: Generation) -> AsyncGenerator[Event, None]:
        assert isinstance(request.prompt, Turns)
        if request.prompt.text == "slow":
            await slow.wait()
        else:
            slow.set()
        async for event in echo(request):
            yield event

    first = question(prompt="slow")
    first.parameters["triton_enable_empty_final_response"].bool_param = True
    async with over_grpc(FakeUpstream(answer)) as (served, stub, _):
        answers = [
            each
            async for each in stub.ModelStreamInfer(
                streamed(first, question(temperature="x"), question(prompt="fast"))
            )
        ]
        assert [bool(each.error_message) for each in answers] == [False, True, False]
        assert "temperature" in answers[1].error_message
        assert answers[0].infer_response.parameters["triton_final_response"].bool_param
        assert b"re slow" in answers[0].infer_response.raw_output_contents[0]
        assert b"re fast" in answers[2].infer_response.raw_output_contents[0]
        await served.until_idle()


async def test_an_error_within_a_stream_names_its_request() -> None:
    unknown, wrong, none = question("other"), question(temperature="x"), question(max_token=None)
    unknown.id, wrong.id, none.id = "first", "second", ""
    async with over_grpc(FakeUpstream(echo)) as (_, stub, address):
        answers = [each async for each in stub.ModelStreamInfer(streamed(unknown, wrong, none))]
        assert all(each.error_message for each in answers)
        assert [each.infer_response.id for each in answers] == ["first", "second", ""]
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream(ROUTE + "ModelStreamInfer")(streamed(b"\xff\xff\xff"))
            answer = service_pb2.ModelStreamInferResponse.FromString(await call.read())
            assert "not the message" in answer.error_message


async def test_a_stream_may_ask_for_real_statuses() -> None:
    async with over_grpc(FakeUpstream(echo)) as (_, stub, _):
        call = stub.ModelStreamInfer(streamed(question("other")), metadata=[("triton_grpc_error", "true")])
        assert (await refusal(call.read()))[0] is CODE.NOT_FOUND


async def test_a_stream_that_is_cancelled_ends_its_requests() -> None:
    upstream = FakeUpstream(lambda _: say_and_hang("a"))
    async with over_grpc(upstream) as (served, stub, _):
        call = stub.ModelStreamInfer(streamed(*[question()] * 3, pause_s=0.01))
        reading = asyncio.ensure_future(call.read())
        await until(lambda: upstream.running == 3)
        call.cancel()
        await asyncio.wait([reading])
        await until(lambda: upstream.cancelled == 3)
        await served.until_idle()


def ask_chatglm2(client: Any, history: list[str]) -> tuple[str, list[str]]:
    """Contract 3, as its clients do it."""
    values = {"prompt": ["你好"], "history": history, "temperature": ["0.8"], "max_token": ["500"]}
    inputs = []
    for name, texts in (values | {"history_len": ["5"]}).items():
        data = np.array([text.encode() for text in texts], dtype=np.object_)
        one = grpcclient.InferInput(name, list(data.shape), "BYTES")
        one.set_data_from_numpy(data)
        inputs.append(one)
    result = client.infer("glm", inputs, client_timeout=60)
    return result.as_numpy("response")[0].decode(), [each.decode() for each in result.as_numpy("history")]


def use_library(address: str) -> None:
    with grpcclient.InferenceServerClient(address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("glm")
        assert not client.is_model_ready("other")
        assert client.get_server_metadata().name == "tritongate"
        assert client.get_model_metadata("glm").inputs[1].shape == [-1]
        assert client.get_model_config("glm").config.input[0].name == "prompt"
        assert client.get_model_repository_index().models[0].state == "READY"
        client.unload_model("glm")
        client.load_model("glm")
        answer, history = ask_chatglm2(client, [])
        assert history == ["你好", answer]
        assert ask_chatglm2(client, history)[1] == ["你好", answer, "你好", answer]
        assert client.get_inference_statistics("glm").model_stats[0].inference_count == 2
        with pytest.raises(InferenceServerException, match="flat list"):
            ask_chatglm2(client, ["q"])
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        inputs = [grpcclient.InferInput("prompt", [1], "BYTES")]
        inputs[0].set_data_from_numpy(np.array([b"x"], dtype=np.object_))
        client.async_stream_infer("glm", inputs)
        assert "missing" in str(answers.get(timeout=60)[1])
        client.stop_stream()


async def test_tritons_library() -> None:
    upstream = FakeUpstream(echo)
    upstream.chat_format = "chatglm2"
    async with over_grpc(upstream) as (_, _, address):
        await asyncio.to_thread(use_library, address)


async def test_no_burst_is_in_front_of_health(monkeypatch: pytest.MonkeyPatch) -> None:
    async def enter(_: Pacing) -> None:
        await asyncio.Event().wait()  # as behind a burst that never ends

    monkeypatch.setattr(Pacing, "enter", enter)
    async with over_grpc(FakeUpstream(echo)) as (_, stub, _):
        asked = stub.ModelInfer(question())
        assert (await stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=20)).live
        assert (await stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=20)).ready
        assert not asked.done()
        asked.cancel()


async def test_connections_are_bounded() -> None:
    async with over_grpc(FakeUpstream(), max_connections=1) as (_, stub, address):
        live = service_pb2.ServerLiveRequest()
        assert (await stub.ServerLive(live)).live
        options = [("grpc.use_local_subchannel_pool", 1)]  # or it is the same connection
        async with grpc.aio.insecure_channel(address, options) as other:
            call = service_pb2_grpc.GRPCInferenceServiceStub(other).ServerLive(live)
            assert (await refusal(call))[0] is CODE.UNAVAILABLE
