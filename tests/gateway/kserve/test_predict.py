import base64
import json
import time
from collections.abc import AsyncGenerator
from itertools import product
from typing import Any

import pytest
from google.protobuf import json_format
from tritonclient.grpc import service_pb2

from gateway.core.events import Event
from gateway.core.request import Generation
from gateway.errors import GatewayError, InvalidRequestError, UnavailableError
from gateway.kserve.contracts import InferRequest, Tensor
from gateway.kserve.predict import read_predict_request, write_predict_answer
from tests.gateway.fake_upstream import FakeUpstream, say_and_hang
from tests.gateway.kserve.legacy import VALUES, echo, predict_body
from tests.gateway.serving import Served, in_process, on_socket, until
from wire.strings import pack_strings, unpack_strings

PREDICT = "/MutilBackendService/Predict"


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def tensor(**changes: Any) -> dict[str, Any]:
    return {
        "name": "prompt",
        "datatype": "BYTES",
        "shape": [1],
        "contents": {"bytes_contents": [b64("你好")]},
    } | changes


def read(**changes: Any) -> Any:
    document = {"model_name": "m", "inputs": [tensor()]} | changes
    return read_predict_request(json.dumps(document).encode())


def fault(**changes: Any) -> str | None:
    with pytest.raises(InvalidRequestError) as raised:
        read(**changes)
    assert raised.value.param is None or raised.value.param.rpartition(".")[2] in raised.value.message
    return raised.value.param


def test_a_request_is_read() -> None:
    history = tensor(name="history", shape=["2"], contents={"bytes_contents": [b64("a"), ""]})
    prediction = read(inputs=[tensor(), history], outputs=[{"name": "response"}], model_version="2")
    assert (prediction.model, prediction.version, prediction.outputs) == ("m", "2", ["response"])
    assert prediction.inputs == [
        Tensor("prompt", "BYTES", (1,), ["你好".encode()]),
        Tensor("history", "BYTES", (2,), [b"a", b""]),
    ]


def test_small_integers_are_read() -> None:
    number = tensor(name="max_token", datatype="INT16", contents={"int_contents": ["1024"]})
    assert read(inputs=[number]).inputs[0].values == [1024]


def test_what_protobuf_itself_writes_is_read() -> None:
    message = service_pb2.ModelInferRequest(model_name="m", id="7")
    message.inputs.add(name="prompt", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"\xfb\xff")
    message.outputs.add(name="response")
    for names, empty in product((True, False), repeat=2):
        body = json_format.MessageToJson(
            message, preserving_proto_field_name=names, always_print_fields_with_no_presence=empty
        )
        prediction = read_predict_request(body.encode())
        assert prediction.inputs[0].values == [b"\xfb\xff"]
    unpadded = tensor(contents={"bytes_contents": ["-_8"]})
    assert read(inputs=[unpadded]).inputs[0].values == [b"\xfb\xff"]


def test_null_is_an_absent_field_as_protobuf_reads_it() -> None:
    contents = {"bytes_contents": [b64("x")], "int_contents": None, "fp32Contents": None}
    nulls = dict.fromkeys(("id", "modelVersion", "outputs", "parameters", "raw_input_contents"))
    document = {**predict_body(), "inputs": [tensor(contents=contents)], **nulls}
    body = json.dumps(document)
    json_format.Parse(body, service_pb2.ModelInferRequest())
    without = [tensor(contents={"bytes_contents": [b64("x")]})]
    assert read_predict_request(body.encode()) == read(model_name="glm", inputs=without)


@pytest.mark.parametrize(
    ("shape", "count", "whole"), [([-1], 3, (3,)), ([-1], 0, (0,)), ([1, -1], 2, (1, 2)), ([], 1, ())]
)
def test_a_size_left_open_is_the_count(shape: list[int], count: int, whole: tuple[int, ...]) -> None:
    given = tensor(shape=shape, contents={"bytes_contents": [b64("x")] * count})
    assert read(inputs=[given]).inputs[0].shape == whole


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"shape": [2]}, "inputs.0.shape"),
        ({"shape": [2, -1]}, "inputs.0.shape"),
        ({"shape": [-1, -1]}, "inputs.0.shape"),
        ({"shape": [0, -1]}, "inputs.0.shape"),
        ({"shape": [-2]}, "inputs.0.shape.0"),
        ({"shape": [True]}, "inputs.0.shape.0"),
        ({"shape": ["x"]}, "inputs.0.shape.0"),
        ({"shape": [1] * 9}, "inputs.0.shape"),
        ({"datatype": "FP32"}, "inputs.0.datatype"),
        ({"datatype": "INT16"}, "inputs.0.contents.bytes_contents"),
        ({"contents": {"int_contents": [1]}}, "inputs.0.contents.int_contents"),
        ({"contents": {"bytes_contents": ["!!!"]}}, "inputs.0.contents.bytes_contents.0"),
        ({"contents": {"bytes_contents": ["YQ", "A"]}}, "inputs.0.contents.bytes_contents.1"),
        ({"contents": {"bytes_contents": ["你"]}}, "inputs.0.contents.bytes_contents.0"),
        ({"contents": {"bytes_contents": [1]}}, "inputs.0.contents.bytes_contents.0"),
        ({"contents": {"fp32_contents": [1.0]}}, "inputs.0.contents.fp32_contents"),
        ({"datatype": "INT16", "contents": {"int_contents": [40000]}}, "inputs.0.contents.int_contents.0"),
        ({"parameters": {"shared_memory_region": {"string_param": "x"}}}, "inputs.0.parameters"),
        ({"nme": "x"}, "inputs.0.nme"),
    ],
)
def test_a_fault_in_an_input_is_named(changes: dict[str, Any], param: str) -> None:
    assert fault(inputs=[tensor(**changes)]) == param


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"inputs": []}, "inputs"),
        ({"inputs": {}}, "inputs"),
        ({"inputs": [None]}, "inputs.0"),
        ({"inputs": [tensor()] * 33}, "inputs"),
        ({"model_name": 3}, "model_name"),
        ({"foo": 1}, "foo"),
        ({"parameters": {"priority": {"uint64_param": "1"}}}, "parameters"),
        ({"raw_input_contents": ["AA=="]}, "raw_input_contents"),
        ({"outputs": [{"name": "x", "parameters": {"classification": {}}}]}, "outputs.0.parameters"),
        ({"outputs": ["response"]}, "outputs.0"),
    ],
)
def test_a_fault_of_the_request_is_named(changes: dict[str, Any], param: str) -> None:
    assert fault(**changes) == param


def test_what_is_missing_is_named() -> None:
    for body, param in (({"inputs": [tensor()]}, "model_name"), ({"model_name": "m"}, "inputs")):
        with pytest.raises(InvalidRequestError) as raised:
            read_predict_request(json.dumps(body).encode())
        assert raised.value.param == param


@pytest.mark.parametrize("item", ['"!"', "0", "{}"])
def test_a_body_of_faults_costs_one(item: str) -> None:
    body = '{"model_name":"m","inputs":[{"name":"p","datatype":"BYTES","shape":[1],"contents":'
    body += '{"bytes_contents":['
    started = time.perf_counter()
    with pytest.raises(InvalidRequestError):
        read_predict_request((body + ",".join([item] * 500_000) + "]}}]}").encode())
    assert time.perf_counter() - started < 10


def test_an_answer_is_what_protobuf_reads() -> None:
    output = Tensor("response", "BYTES", (2,), ["你好".encode(), b""])
    body = write_predict_answer(InferRequest(model="m", id="7", inputs=[]), [output])
    message = json_format.Parse(body, service_pb2.ModelInferResponse())
    assert (message.model_name, message.model_version, message.id) == ("m", "1", "7")
    assert (message.outputs[0].name, list(message.outputs[0].shape)) == ("response", [2])
    assert list(message.raw_output_contents) == [pack_strings(["你好".encode(), b""])]
    assert json.loads(body) == json.loads(
        json_format.MessageToJson(message, preserving_proto_field_name=True)
    )


async def refusal(served: Served, document: Any, **options: Any) -> tuple[int, Any, Any]:
    answer = await served.http.post(PREDICT, json=document, **options)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["param"], error["code"]


async def test_a_question_is_answered_and_counted() -> None:
    upstream = FakeUpstream(echo)
    async with in_process(upstream) as served:
        document = predict_body(id="7", outputs=[{"name": "response"}])
        answer = (await served.http.post(PREDICT, json=document, headers={"X-Request-Id": "mine"})).json()
        assert answer["outputs"] == [{"name": "response", "datatype": "BYTES", "shape": ["1"]}]
        (raw,) = answer["raw_output_contents"]
        assert unpack_strings(base64.b64decode(raw)) == ["re 你好\nmore".encode()]
        assert (answer["model_name"], answer["id"]) == ("glm", "7")
        assert upstream.requests[0].request_id == "mine"
        assert served.metric("requests_total", route=PREDICT, model="glm", status="200") == 1
        assert served.metric("overhead_seconds_count", model="glm") == 1
        await served.until_idle()


async def test_only_served_models_can_be_named() -> None:
    async with in_process(FakeUpstream(echo)) as served:
        for name in ("other", "glm-stream", "glm-tokenizer", ""):
            assert await refusal(served, predict_body(name)) == (404, "model_name", "model_not_found")
        assert (await refusal(served, predict_body(model_version="2")))[:2] == (404, "model_version")
    assert not served.upstream.requests


async def test_a_bad_body_is_a_400_naming_the_field() -> None:
    async with in_process(FakeUpstream(echo)) as served:
        assert await refusal(served, predict_body(surprise=1)) == (400, "surprise", None)
        assert (await refusal(served, []))[0] == 400
        assert (await refusal(served, predict_body(values=VALUES | {"x": ""})))[:2] == (400, "inputs.4.name")
        assert (await refusal(served, predict_body(values={})))[:2] == (400, "inputs")
        broken = await served.http.post(PREDICT, content=b"{", headers={"content-type": "application/json"})
        assert broken.status_code == 400
        assert (await served.http.post(PREDICT, content=b"{}")).status_code == 415
        assert (await served.http.get(PREDICT)).status_code == 405


@pytest.mark.parametrize("error", [InvalidRequestError("bad", param="prompt"), UnavailableError("away")])
async def test_the_upstreams_errors_are_told(error: GatewayError) -> None:
    async def fail(_: Generation) -> AsyncGenerator[Event, None]:
        raise error
        yield

    async with in_process(FakeUpstream(fail)) as served:
        assert await refusal(served, predict_body()) == (error.status, error.param, error.code)


async def test_the_deadline_ends_it() -> None:
    upstream = FakeUpstream(lambda _: say_and_hang("a"))
    async with in_process(upstream, request_timeout_s=1) as served:
        assert (await refusal(served, predict_body()))[0] == 504
        await served.until_idle()
    assert upstream.cancelled == 1


async def test_a_client_that_hangs_up_is_noticed() -> None:
    upstream = FakeUpstream(lambda _: say_and_hang("a"))
    async with on_socket(upstream) as served:
        await served.hang_up(served.http.post(PREDICT, json=predict_body()), tokens=1)
        await until(lambda: upstream.cancelled == 1)
        await served.until_idle()
        await until(lambda: served.metric("client_cancels_total", model="glm") == 1)
