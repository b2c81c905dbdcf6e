"""The contract `logits`: what is read and refused, and how it is served over HTTP and gRPC."""

import asyncio
import copy
import json
import struct
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.core.events import Accepted, Delta, Event, LogitsPart, Usage
from gateway.core.request import Generation, PlainText, TokenIds
from gateway.core.upstream import Tokenization, Tokens
from gateway.errors import InvalidRequestError, UnavailableError, UpstreamProtocolError
from gateway.kserve.contracts import HEADER_LENGTH, InferRequest, Tensor
from gateway.kserve.logits import LogitsTensor, Prompts, logits_signature, padded, read_prompts, read_texts
from tests.gateway.fake_upstream import FakeUpstream, Script
from tests.gateway.kserve.legacy import over_grpc, tensor
from tests.gateway.serving import in_process, on_socket, until

VOCABULARY = 5
INFER = "/v2/models/glm/infer"
CONTRACT = {"contract": "glm=logits"}
IDS, MASK = [[9, 1, 2, 4], [1, 3, 0, 0]], [[0, 1, 1, 1], [1, 1, 0, 0]]


def telling(vocabulary: int = VOCABULARY) -> Script:
    """Return what tells of each id its own number, and the places in the vocabulary."""

    async def tell(request: Generation) -> AsyncGenerator[Event, None]:
        assert isinstance(request.prompt, TokenIds)
        ids = request.prompt.ids
        yield Accepted(prompt_tokens=len(ids))
        for place, each in enumerate(ids):
            values = struct.pack(f"<{vocabulary}f", *(each + number / 10 for number in range(vocabulary)))
            yield Delta(tokens=0, logits=LogitsPart(place, vocabulary, values))
        usage = Usage(prompt_tokens=len(ids), completion_tokens=0)
        yield Delta(tokens=0, finish_reason="length", usage=usage)

    return tell


def expected() -> Any:
    found = np.zeros((2, 4, VOCABULARY), np.float32)
    for row, place in zip(*np.nonzero(MASK), strict=True):
        found[row, place] = IDS[row][place] + np.arange(VOCABULARY) / 10
    return found


def body(ids: Any = IDS, mask: Any = MASK, **changes: Any) -> dict[str, Any]:
    def given(name: str, data: Any) -> Any:
        return tensor(name, copy.deepcopy(data), list(np.shape(data)), "INT64")

    return {"inputs": [given("input_ids", ids), given("attention_mask", mask)], **changes}


def message(ids: Any = IDS, mask: Any = MASK, *, raw: bool = False) -> Any:
    request = service_pb2.ModelInferRequest(model_name="glm")
    for name, data in (("input_ids", ids), ("attention_mask", mask)):
        values = np.array(data, np.int64)
        sent = request.inputs.add(name=name, datatype="INT64", shape=values.shape)
        if raw:
            request.raw_input_contents.append(values.tobytes())
        else:
            sent.contents.int64_contents.extend(values.ravel().tolist())
    return request


def infer_request(ids: Any, mask: Any, **changes: Any) -> InferRequest:
    inputs = [
        Tensor(name, "INT64", np.shape(data), np.array(data, np.int64).ravel().tolist())
        for name, data in (("input_ids", ids), ("attention_mask", mask))
    ]
    return InferRequest(**{"model": "glm", "inputs": inputs} | changes)


def test_rows_lose_their_padding() -> None:
    prompts = read_prompts(infer_request(IDS, MASK), VOCABULARY, 1000)
    assert prompts == Prompts([(1, 2, 4), (1, 3)], [1, 0], 4, VOCABULARY)
    assert prompts.nbytes == 2 * 4 * VOCABULARY * 4


@pytest.mark.parametrize(
    ("ids", "mask", "words"),
    [
        ([[5]], [[1]], "input_ids: row 0 has the id 5, and the model has 5 ids"),
        ([[1], [-1]], [[1], [1]], "input_ids: row 1 has the id -1"),
        ([[1, 1, 1]], [[1, 0, 1]], "attention_mask: row 0 has a 0 between ones"),
        ([[1, 1, 1]], [[1, 2, 1]], "attention_mask: row 0 has something else"),
        ([[1, 1], [1, 1]], [[1, 1], [0, 0]], "attention_mask: row 1 has no 1"),
        ([[1, 1]], [[1, 1], [1, 1]], r"attention_mask: its shape is \[2, 2\]"),
        (np.zeros((0, 2)), np.zeros((0, 2)), "1 to 64 rows"),
        (np.zeros((2, 0)), np.zeros((2, 0)), "1 to 64 rows"),
        (np.ones((65, 1)), np.ones((65, 1)), "1 to 64 rows"),
        (np.ones((3, 20)), np.ones((3, 20)), "3 x 20 positions and 5 ids take 1200 bytes, and at most 1000"),
    ],
)
def test_what_is_wrong_is_named(ids: Any, mask: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        read_prompts(infer_request(ids, mask), VOCABULARY, 1000)


def test_parts_join_to_a_tensor_whose_padding_is_zero() -> None:
    prompts = read_prompts(infer_request([[9, 0, 1], [1, 9, 9]], [[0, 1, 1], [1, 0, 0]]), 2, 1000)
    tensor = LogitsTensor(prompts)
    with pytest.raises(UpstreamProtocolError, match="before they were complete"):
        tensor.tensor()
    tensor.put(0, LogitsPart(0, 2, struct.pack("<2f", 1, 2)))
    tensor.put(0, LogitsPart(0, 2, struct.pack("<4f", 1, 2, 3, 4)))  # again, from another server
    tensor.put(1, LogitsPart(0, 2, struct.pack("<2f", 5, 6)))
    found = tensor.tensor()
    assert (found.name, found.datatype, found.shape) == ("logits", "FP32", (2, 3, 2))
    assert list(found.values) == [0, 0, 1, 2, 3, 4, 5, 6, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "part",
    [
        LogitsPart(0, 3, b"\0" * 12),
        LogitsPart(1, 2, b"\0" * 8),
        LogitsPart(0, 2, b"\0" * 24),
    ],
)
def test_parts_of_something_else_are_refused(part: LogitsPart) -> None:
    prompts = read_prompts(infer_request([[0, 1]], [[1, 1]]), 2, 1000)
    with pytest.raises(UpstreamProtocolError):
        LogitsTensor(prompts).put(0, part)


def test_texts_are_padded_on_the_left() -> None:
    request = InferRequest(model="glm_tokenizer", inputs=[])
    ids, mask = padded(request, [[5], [6, 7], []], 3)
    assert (ids.name, ids.datatype, ids.shape, ids.values) == (
        "input_ids",
        "INT64",
        (3, 2),
        [3, 5, 6, 7, 3, 3],
    )
    assert mask.values == [0, 1, 1, 1, 0, 0]
    only = InferRequest(model="glm_tokenizer", inputs=[], outputs=["attention_mask"])
    assert [each.name for each in padded(only, [[5]], 3)] == ["attention_mask"]
    with pytest.raises(InvalidRequestError, match="at most 1048576"):
        padded(request, [[5] * 2**19, [5], [5]], 3)


def test_texts_are_read() -> None:
    def read(*values: bytes) -> list[str]:
        given = [Tensor("TEXT", "BYTES", (len(values),), values)]
        return read_texts(InferRequest(model="m", inputs=given))

    assert read("你".encode(), b"") == ["你", ""]
    for wrong in ([], [b"a"] * 65, [b"a", b"\xff"]):
        with pytest.raises(InvalidRequestError, match="TEXT"):
            read(*wrong)


def test_a_model_of_unknown_size_says_so() -> None:
    assert logits_signature(None).outputs[0].shape == (-1, -1, -1)


@pytest.mark.parametrize("binary", [False, True])
async def test_logits_over_http(binary: bool) -> None:
    upstream = FakeUpstream(telling())
    async with in_process(upstream, **CONTRACT) as served:
        asked = body(id="7", parameters={"binary_data_output": binary})
        answer = await served.http.post(INFER, json=asked)
        assert answer.status_code == 200
        end = int(answer.headers.get(HEADER_LENGTH, len(answer.content)))
        document = httpclient.InferResult.from_response_body(
            answer.content, header_length=end if binary else None
        )
        assert (document.as_numpy("logits") == expected()).all()
        assert document.get_response()["id"] == "7"
        assert ("Content-Length" in answer.headers) == binary
        assert served.metric("prompt_tokens_total", model="glm") == 5
        await served.until_idle()
        assert served.gateway.logits.in_flight == 0
    first, second = upstream.requests
    assert (first.prompt, second.prompt) == (TokenIds((1, 2, 4)), TokenIds((1, 3)))
    assert (first.max_tokens, first.logits, first.prompt_field) == (0, True, "row 0")


async def test_a_large_answer_is_sent_in_pieces() -> None:
    wide = 300_000

    async def one(request: Generation) -> AsyncGenerator[Event, None]:
        yield Accepted(prompt_tokens=2)
        for place in range(2):
            yield Delta(tokens=0, logits=LogitsPart(place, wide, struct.pack(f"<{wide}f", *range(wide))))
        yield Delta(tokens=0, finish_reason="length", usage=Usage(prompt_tokens=2, completion_tokens=0))

    upstream = FakeUpstream(one)
    upstream.vocabulary = wide
    async with on_socket(upstream, **CONTRACT) as served:
        for binary in (False, True):
            asked = body([[1, 2]], [[1, 1]], parameters={"binary_data_output": binary})
            answer = await served.http.post(INFER, json=asked)
            end = int(answer.headers[HEADER_LENGTH]) if binary else None
            found = httpclient.InferResult.from_response_body(answer.content, header_length=end)
            assert (found.as_numpy("logits") == [[np.arange(wide, dtype=np.float32)] * 2]).all()


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_client_that_does_not_read_gives_its_room_back(leaves: bool) -> None:
    wide = 6 * 2**20  # more than sockets hold
    upstream = FakeUpstream(telling(wide))
    upstream.vocabulary = wide
    asked = json.dumps(body([[5]], [[1]], parameters={"binary_data_output": True})).encode()
    timeout_s = 60 if leaves else 0.5
    async with on_socket(upstream, send_timeout_s=timeout_s, **CONTRACT) as served:
        url = served.http.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
        head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(asked)}\r\n\r\n"
        writer.write(head.encode() + asked)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert served.gateway.logits.in_flight == 4 * wide
        if leaves:
            writer.close()
        await until(lambda: served.gateway.logits.in_flight == 0)
        writer.close()
        await until(lambda: served.metric("client_cancels_total", model="glm") == 1)


@pytest.mark.parametrize("raw", [False, True])
async def test_logits_over_grpc(raw: bool) -> None:
    async with over_grpc(FakeUpstream(telling()), **CONTRACT) as (served, stub, _):
        streamed = stub.ModelStreamInfer(iter([message(raw=raw)]))
        for answer in (await stub.ModelInfer(message(raw=raw)), (await streamed.read()).infer_response):
            (output,) = answer.outputs
            assert (output.name, output.datatype) == ("logits", "FP32")
            assert list(output.shape) == [2, 4, VOCABULARY]
            found = np.frombuffer(answer.raw_output_contents[0], "<f4").reshape(output.shape)
            assert (found == expected()).all()
        assert answer.parameters["triton_final_response"].bool_param
        await served.until_idle()


async def test_a_large_message_is_that_of_protobuf() -> None:
    wide = 700_000
    upstream = FakeUpstream(telling(wide))
    upstream.vocabulary = wide
    options = [("grpc.max_receive_message_length", -1)]
    async with (
        over_grpc(upstream, **CONTRACT) as (_, _, address),
        grpc.aio.insecure_channel(address, options=options) as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = await stub.ModelInfer(message([[5]], [[1]]))
        again = await stub.ModelStreamInfer(iter([message([[5]], [[1]])])).read()
    places = (5 + np.arange(wide) / 10).astype("<f4").tobytes()
    assert answer.raw_output_contents == again.infer_response.raw_output_contents == [places]


async def test_the_tokenizer_beside_it() -> None:
    async def by_length(request: Tokenization) -> Tokens:
        assert isinstance(request.prompt, PlainText)
        assert request.prefix
        return Tokens(ids=tuple(map(ord, request.prompt.text)), pad=7)

    upstream = FakeUpstream(telling())
    upstream.tokenizing = by_length
    asked = {"inputs": [tensor("TEXT", ["ab", "c"], [2])]}
    async with in_process(upstream, **CONTRACT) as served:
        answer = await served.http.post("/v2/models/glm_tokenizer/infer", json=asked)
        found = {each["name"]: (each["shape"], each["data"]) for each in answer.json()["outputs"]}
        assert found == {
            "input_ids": ([2, 2], [97, 98, 7, 99]),
            "attention_mask": ([2, 2], [1, 1, 0, 1]),
        }
        names = [each["name"] for each in (await served.http.post("/v2/repository/index")).json()]
        assert names == ["glm", "glm_tokenizer", "org/glm-2"]
        assert (await served.http.get("/v2/models/glm_tokenizer/ready")).status_code == 200
        assert (await served.http.get("/v2/models/org/glm-2_tokenizer")).status_code == 404
        told = (await served.http.get("/v2/models/stats")).json()["model_stats"]
        assert [each["name"] for each in told] == ["glm", "glm_tokenizer", "org/glm-2"]


FULL = {"max_in_flight": 1, "max_waiting": 0, **CONTRACT}


async def test_a_full_engine_does_not_keep_its_tokenizer_from_working_over_http() -> None:
    text = {"name": "TEXT", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": ["YQ=="]}}
    predict = "/MutilBackendService/Predict"
    async with in_process(FakeUpstream(telling()), **FULL) as served:
        await served.gateway.admission.acquire()
        asked = {"inputs": [tensor("TEXT", ["a"], [1])]}
        answer = await served.http.post("/v2/models/glm_tokenizer/infer", json=asked)
        assert answer.status_code == 200
        answer = await served.http.post(predict, json={"model_name": "glm_tokenizer", "inputs": [text]})
        assert answer.status_code == 200
        assert (await served.http.post(INFER, json=body())).status_code == 429


async def test_a_full_engine_does_not_keep_its_tokenizer_from_working_over_grpc() -> None:
    request = service_pb2.ModelInferRequest(model_name="glm_tokenizer")
    request.inputs.add(name="TEXT", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    async with over_grpc(FakeUpstream(telling()), **FULL) as (served, stub, _):
        await served.gateway.admission.acquire()
        assert (await stub.ModelInfer(request)).outputs
        streamed = stub.ModelStreamInfer(iter([request]))
        assert (await streamed.read()).infer_response.outputs
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelInfer(message())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_backend_without_logits_says_so() -> None:
    upstream = FakeUpstream(telling())
    upstream.vocabulary = None
    async with in_process(upstream, **CONTRACT) as served:
        answer = await served.http.post(INFER, json=body())
        assert (answer.status_code, "reports no logits" in answer.text) == (400, True)
        upstream.ready = False
        assert (await served.http.post(INFER, json=body())).status_code == UnavailableError.status


async def test_answers_wait_for_room() -> None:
    """Three requests of 600,000 bytes each, where a MiB is the limit, run one after the other."""
    release = asyncio.Event()
    wide = 150_000

    async def one(request: Generation) -> AsyncGenerator[Event, None]:
        await release.wait()
        yield Accepted(prompt_tokens=1)
        yield Delta(tokens=0, logits=LogitsPart(0, wide, bytes(4 * wide)))
        yield Delta(tokens=0, finish_reason="length", usage=Usage(prompt_tokens=1, completion_tokens=0))

    upstream = FakeUpstream(one)
    upstream.vocabulary = wide
    async with over_grpc(upstream, logits_bytes=2**20, **CONTRACT) as (served, stub, _):
        asking = [asyncio.create_task(call(stub)) for _ in range(3)]
        await until(lambda: served.gateway.logits.waiting == 2)
        assert upstream.running == 1
        late = asking.pop()
        late.cancel()  # who leaves while waiting, leaves nothing
        await until(lambda: served.gateway.logits.waiting == 1)
        release.set()
        assert all(answer.outputs for answer in await asyncio.gather(*asking))
        await served.until_idle()
        await until(lambda: served.gateway.logits.in_flight == 0)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelInfer(message([[1, 1]], [[1, 1]]))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "1200000 bytes" in (refused.value.details() or "")


async def test_answers_of_a_stream_give_their_room_back_one_by_one() -> None:
    """Ten of 400,000 bytes each, a MiB in all at once: each holds its own until it, or its stream, ends."""
    wide = 100_000
    upstream = FakeUpstream(telling(wide))
    upstream.vocabulary = wide
    async with over_grpc(upstream, logits_bytes=2**20, **CONTRACT) as (served, stub, _):
        for taken in (10, 3):
            stream = stub.ModelStreamInfer(iter([message([[5]], [[1]])] * 10))
            for _ in range(taken):
                assert (await stream.read()).infer_response.outputs
            stream.cancel()
            await until(lambda: served.gateway.logits.in_flight == 0)
            assert served.gateway.logits.waiting == 0
        await served.until_idle()


async def call(stub: Any) -> Any:
    return await stub.ModelInfer(message([[1]], [[1]]))


async def test_a_hang_up_cancels_the_rows() -> None:
    async def hang(request: Generation) -> AsyncGenerator[Event, None]:
        yield Accepted(prompt_tokens=1)
        await asyncio.Event().wait()

    upstream = FakeUpstream(hang)
    async with on_socket(upstream, **CONTRACT) as served:
        await served.hang_up(served.http.post(INFER, json=body([[1]], [[1]])))
        await served.until_idle()
        answer = await served.http.post(INFER, json=body([[1]], [[1]], parameters={"timeout": 50_000}))
        assert answer.status_code == 504
        await served.until_idle()
        assert served.gateway.logits.in_flight == 0
