"""`/v2` over HTTP: what Triton's own library and plain JSON get, in process and on a socket."""

import ast
import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from gateway.core.events import Accepted, Delta, Event
from gateway.core.request import Generation, Turns
from gateway.errors import (
    ContextLengthError,
    DeadlineError,
    GatewayError,
    RateLimitError,
    UnavailableError,
    UpstreamProtocolError,
)
from gateway.kserve.contracts import HEADER_LENGTH
from gateway.kserve.http import read_infer_request
from tests.gateway.fake_upstream import FakeUpstream, say_and_hang
from tests.gateway.kserve.legacy import VALUES, body, echo, tensor, unbatched
from tests.gateway.serving import Served, in_process, on_socket, until
from wire.history import Turn

INFER = "/v2/models/glm/infer"
ROUTE = "/v2/models/{model:path}/infer"
LOOPBACK = {"Host": "127.0.0.1:8000"}


async def refusal(served: Served, document: Any, path: str = INFER, **options: Any) -> tuple[int, str]:
    answer = await served.http.post(path, json=document, **options)
    assert set(answer.json()) == {"error"}
    return answer.status_code, answer.json()["error"]


async def test_a_question_is_answered_and_counted() -> None:
    upstream = FakeUpstream(echo)
    async with in_process(upstream) as served:
        history = str([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
        document = body(history=history) | {"id": "7", "outputs": [{"name": "history"}, {"name": "response"}]}
        answer = await served.http.post(INFER, json=document, headers={"X-Request-Id": "mine"})
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        outputs = answer.json().pop("outputs")
        assert {name: answer.json()[name] for name in ("id", "model_name", "model_version")} == {
            "id": "7",
            "model_name": "glm",
            "model_version": "1",
        }
        assert [(each["name"], each["datatype"], each["shape"]) for each in outputs] == [
            ("history", "BYTES", [1, 1]),
            ("response", "BYTES", [1, 1]),
        ]
        assert outputs[1]["data"] == ["re 你好\nmore"]
        (returned,) = outputs[0]["data"]
        assert ast.literal_eval(returned) == json.loads(returned)
        assert [item["content"] for item in json.loads(returned)] == ["q", "a", "你好", "re 你好\nmore"]
        assert served.metric("requests_total", route=ROUTE, model="glm", status="200") == 1
        assert served.metric("overhead_seconds_count", model="glm") == 1
        assert served.metric("generated_tokens_total", model="glm") == 2
        await served.until_idle()
    (generation,) = upstream.requests
    assert generation.request_id == "mine"
    assert generation.prompt == Turns((Turn("user", "q"), Turn("assistant", "a")), "你好")
    assert (generation.temperature, generation.top_p, generation.max_total_tokens) == (0.3, 0.8, 1024)
    assert (generation.max_tokens, generation.stream, generation.n) == (None, False, 1)


async def test_a_default_for_new_tokens_does_not_shorten_the_clients_own_limit() -> None:
    upstream = FakeUpstream(echo)
    async with in_process(upstream, default_max_tokens=5) as served:
        await served.http.post(INFER, json=body())
    assert upstream.requests[0].max_tokens is None


async def test_rows_are_answered_each_by_itself() -> None:
    upstream = FakeUpstream(echo)
    rows = {
        "inputs": [
            tensor(name, [[value], [value + value] if name == "prompt" else [value]], [2, 1])
            for name, value in VALUES.items()
        ]
    }
    async with in_process(upstream) as served:
        outputs = (await served.http.post(INFER, json=rows)).json()["outputs"]
        assert outputs[0]["shape"] == [2, 1]
        assert outputs[0]["data"] == ["re 你好\nmore", "re 你好你好\nmore"]
        assert [len(json.loads(each)) for each in outputs[1]["data"]] == [2, 2]
        await served.until_idle()


@pytest.mark.parametrize(
    ("error", "status"), [(RateLimitError("full"), 429), (ContextLengthError("too long"), 400)]
)
async def test_the_first_row_that_fails_ends_the_request_and_names_itself(
    error: GatewayError, status: int
) -> None:
    async def fail_second(request: Generation) -> AsyncGenerator[Event, None]:
        assert isinstance(request.prompt, Turns)
        if request.prompt.text == "b":
            raise error
        async for event in say_and_hang("x"):
            yield event

    upstream = FakeUpstream(fail_second)
    rows = {
        "inputs": [
            tensor(name, ["a", "b"] if name == "prompt" else [value] * 2, [2, 1])
            for name, value in VALUES.items()
        ]
    }
    async with in_process(upstream) as served:
        assert await refusal(served, rows) == (status, f"row 1: {error.message}")
        await served.until_idle()


@pytest.mark.parametrize("contract", [["unbatched"], ["other=batched", "glm=unbatched"]])
async def test_the_unbatched_contract(contract: list[str]) -> None:
    upstream = FakeUpstream(echo)
    async with in_process(upstream, contract=contract) as served:
        rounds = str([{"role": role, "content": f"{n}"} for n in range(5) for role in ("user", "assistant")])
        answer = await served.http.post(INFER, json=unbatched(history=rounds, history_len=1))
        response, history = answer.json()["outputs"]
        assert (response["shape"], history["shape"]) == ([1], [1])
        assert len(json.loads(history["data"][0])) == 4
        status, message = await refusal(served, unbatched(max_token=40000))
        assert status == 400
        assert message.startswith("inputs.3.data.0: an element of INT16 is")
        for name, value in (("max_token", 0), ("max_token", -25536), ("history_len", -1)):
            status, message = await refusal(served, unbatched(**{name: value}))
            assert (status, name in message) == (400, True)
        assert (await refusal(served, body()))[0] == 400


async def test_a_chatglm2_takes_flat_lists_unless_it_is_said_otherwise() -> None:
    upstream = FakeUpstream(echo)
    upstream.chat_format = "chatglm2"
    async with in_process(upstream, contract="org/glm-2=batched") as served:
        shapes = {"history": [2]}
        values = VALUES | {"history_len": "5"}
        inputs = [
            tensor(name, ["q", "a"] if name == "history" else [value], shapes.get(name, [1]))
            for name, value in values.items()
        ]
        _, history = (await served.http.post(INFER, json={"inputs": inputs})).json()["outputs"]
        assert (history["shape"], history["data"]) == ([4], ["q", "a", "你好", "re 你好\nmore"])
        _, history = (await served.http.post("/v2/models/org/glm-2/infer", json=body())).json()["outputs"]
        assert json.loads(history["data"][0]) == [["你好", "re 你好\nmore"]]


async def test_a_model_that_was_never_reached_has_no_contract_yet() -> None:
    upstream = FakeUpstream(echo)
    upstream.chat_format, upstream.ready = None, False
    async with in_process(upstream) as served:
        assert (await served.http.get("/v2/models/glm")).status_code == 503
        assert (await refusal(served, body()))[0] == 503
    async with in_process(upstream, contract="unbatched") as served:
        assert (await served.http.get("/v2/models/glm")).json()["inputs"][0]["shape"] == [1]


@pytest.mark.parametrize("contract", [[], ["logits"]])
async def test_who_waits_for_a_model_to_be_reached_may_leave(contract: list[str]) -> None:
    upstream = FakeUpstream(echo)
    upstream.chat_format, upstream.vocabulary, upstream.ready = None, None, False
    upstream.meeting.clear()
    async with on_socket(upstream, contract=contract) as served:
        asking = asyncio.create_task(served.http.post(INFER, json=body()))
        await until(lambda: upstream.awaited == ["glm"])
        assert not asking.done()
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: served.metric("requests_total", route=ROUTE, model="glm", status="499") == 1)
        assert not upstream.awaited
        await served.until_idle()
    assert not upstream.requests


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ContextLengthError("too long"), 400),
        (RateLimitError("full"), 429),
        (UpstreamProtocolError("odd"), 502),
        (UnavailableError("away"), 503),
        (DeadlineError("late"), 504),
        (ZeroDivisionError("a secret"), 500),
    ],
)
async def test_errors_have_tritons_form(error: Exception, status: int) -> None:
    async def fail(_: Generation) -> AsyncGenerator[Event, None]:
        raise error
        yield

    async with in_process(FakeUpstream(fail)) as served:
        found, message = await refusal(served, body())
        assert found == status
        assert "secret" not in message
        await served.until_idle()


async def test_an_answer_that_ends_early_is_an_error() -> None:
    async def cut(_: Generation) -> AsyncGenerator[Event, None]:
        yield Accepted(prompt_tokens=1)
        yield Delta(pieces=("a",), tokens=1)

    async with in_process(FakeUpstream(cut)) as served:
        assert (await refusal(served, body()))[0] == 502


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": "2.1"}, "temperature"),
        ({"max_token": "0"}, "max_token"),
        ({"history": "__import__('os')"}, "neither JSON nor"),
        ({"history": "(" * 100_000}, "nests too deeply"),
        ({"prompt": "\ud800"}, "not valid JSON"),
        ({"prompt": 1}, "inputs.0.data.0"),
        ({"max_token": None}, "max_token missing"),
        ({"surprise": "x"}, "no input 'surprise'"),
    ],
)
async def test_what_cannot_be_meant_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    async with in_process(FakeUpstream(echo)) as served:
        answer = await served.http.post(INFER, content=json.dumps(body(**change)))
        assert answer.status_code == 400
        assert words in answer.json()["error"]


async def test_what_reaches_into_the_server_is_refused() -> None:
    async with in_process(FakeUpstream(echo)) as served:
        shared = body()
        shared["inputs"][0]["parameters"] = {"shared_memory_region": "x"}
        for document in (
            shared,
            body() | {"outputs": [{"name": "response", "parameters": {"classification": 3}}]},
        ):
            status, message = await refusal(served, document)
            assert (status, "not supported" in message) == (400, True)
        packed = await served.http.post(INFER, content=b"x", headers={"Content-Encoding": "br"})
        assert packed.status_code == 415
        config = {"parameters": {"file:1/model.py": "aW1wb3J0IG9z"}}
        status, message = await refusal(served, config, "/v2/repository/models/glm/load", headers=LOOPBACK)
        assert (status, "'file:1/model.py' is not supported" in message) == (400, True)
        assert not served.upstream.changes


async def test_models_and_versions_that_are_not_there() -> None:
    async with in_process(FakeUpstream()) as served:
        for model in ("other", "glm-stream", "glm/versions/2", "a" * 256):
            status, message = await refusal(served, body(), f"/v2/models/{model}/infer")
            assert status == 404
            assert message.startswith("Request for unknown model")
        assert (await served.http.post("/v2/models/glm/versions/1/infer", json=body())).status_code == 200
        assert (await served.http.get("/v2/models/other/ready")).status_code == 400
        assert (await served.http.get("/v2/nowhere")).json() == {"error": "There is nothing at this path."}


async def test_the_clients_own_time_limit_counts() -> None:
    async with in_process(FakeUpstream(lambda _: say_and_hang("a"))) as served:
        document = body() | {"parameters": {"timeout": 100_000}}
        assert (await refusal(served, document))[0] == 504
        for wrong in ("soon", -1, True, 0.5, 10**400):
            assert (await refusal(served, body() | {"parameters": {"timeout": wrong}}))[0] == 400
        await served.until_idle()
    assert served.upstream.cancelled == 1


async def test_statistics_tell_of_what_came_through() -> None:
    upstream = FakeUpstream(echo)
    async with in_process(upstream) as served:
        await served.http.post(INFER, json=body())
        await served.http.post(INFER, json=body(temperature="x"))
        (found,) = (await served.http.get("/v2/models/glm/stats")).json()["model_stats"]
        assert (found["inference_count"], found["execution_count"]) == (1, 1)
        assert found["inference_stats"]["success"]["count"] == found["inference_stats"]["fail"]["count"] == 1
        assert found["inference_stats"]["success"]["ns"] > 0
        assert found["inference_stats"]["compute_infer"]["count"] == 1
        assert (
            0 < found["inference_stats"]["compute_infer"]["ns"] <= found["inference_stats"]["success"]["ns"]
        )
        for name in ("compute_input", "compute_output", "cache_hit", "cache_miss"):
            assert found["inference_stats"][name] == {"count": 0, "ns": 0}
        assert found["batch_stats"] == []
        assert len((await served.http.get("/v2/models/stats")).json()["model_stats"]) == 2


KEYS: list[dict[str, Any]] = [
    {"name": "user", "key": "k"},
    {"name": "boss", "key": "a", "scopes": ["admin"]},
]


async def test_rows_are_answers_of_which_a_model_may_allow_fewer() -> None:
    given: Any = {"models": {"glm": {"limits": {"n": 2}}}}

    def rows(count: int) -> Any:
        return {"inputs": [tensor(name, [value] * count, [count, 1]) for name, value in VALUES.items()]}

    async with in_process(FakeUpstream(echo), **given) as served:
        assert (await served.http.post(INFER, json=rows(2))).status_code == 200
        assert await refusal(served, rows(3)) == (400, "inputs: a request has 1 to 2 rows, not 3.")
        assert (await served.http.get("/v2/models/glm/config")).json()["max_batch_size"] == 2


async def test_keys_and_their_limits() -> None:
    keys = [KEYS[0] | {"requests_per_minute": 1}, KEYS[1]]
    async with in_process(FakeUpstream(echo), api_keys=keys) as served:
        assert (await refusal(served, body()))[0] == 401
        assert (await refusal(served, body(), headers={"Authorization": "Bearer a"}))[0] == 403
        user = {"Authorization": "Bearer k"}
        assert (await served.http.post(INFER, json=body(), headers=user)).status_code == 200
        assert (await refusal(served, body(), headers=user))[0] == 429
        for path in ("/v2", "/v2/models/glm", "/v2/models/glm/ready", "/v2/models/stats"):
            assert (await served.http.get(path)).status_code == 401
            assert (await served.http.get(path, headers=user)).status_code == 200
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert (await served.http.get(path)).status_code == 200
        unload = "/v2/repository/models/glm/unload"
        assert (await served.http.post(unload, headers=user)).status_code == 403
        assert (await served.http.post(unload, headers={"Authorization": "Bearer a"})).status_code == 200


async def test_the_repository() -> None:
    upstream = FakeUpstream(echo)
    async with in_process(upstream) as served:
        path = "/v2/repository/models/glm"
        assert (await served.http.post(path + "/unload", headers=LOOPBACK)).status_code == 200
        assert (await served.http.get("/v2/models/glm/ready")).status_code == 400
        index = (await served.http.post("/v2/repository/index")).json()
        assert index[0] == {"name": "glm", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
        assert len((await served.http.post("/v2/repository/index", json={"ready": True})).json()) == 1
        assert (await served.http.post(path + "/load", headers=LOOPBACK)).status_code == 200
        assert (await served.http.get("/v2/models/glm/ready")).status_code == 200
        assert (await served.http.post("/v2/repository/models/no/load", headers=LOOPBACK)).status_code == 404


async def test_during_a_drain_probes_are_answered_and_requests_refused() -> None:
    async with in_process(FakeUpstream()) as served:
        served.gateway.drain.begin()
        assert (await served.http.get("/v2/health/live")).status_code == 200
        assert (await served.http.get("/v2/health/ready")).status_code == 400
        assert (await refusal(served, body()))[0] == 503


async def test_a_client_that_hangs_up_frees_the_engine_at_once() -> None:
    upstream = FakeUpstream(lambda _: say_and_hang("a"))
    took = []
    async with on_socket(upstream) as served:
        for number in range(1, 5):
            asking = asyncio.create_task(served.http.post(INFER, json=body()))
            await until(lambda count=number: served.metric("generated_tokens_total", model="glm") == count)
            asking.cancel()
            left = time.monotonic()
            await asyncio.wait([asking])
            await until(lambda count=number: upstream.cancelled == count)
            took.append(time.monotonic() - left)
        await served.until_idle()
        await until(lambda: served.metric("client_cancels_total", model="glm") == 4)
    assert min(took) < 0.25  # whatever else the machine did meanwhile


async def test_they_wait_for_admission_like_all_generations() -> None:
    upstream = FakeUpstream(lambda _: say_and_hang("a"))
    async with on_socket(upstream, max_in_flight=1, max_waiting=1) as served:
        tasks = [asyncio.create_task(served.http.post(INFER, json=body())) for _ in range(2)]
        await until(lambda: served.gateway.admission.waiting == 1)
        assert (await served.chat()).status_code == 429
        assert (await refusal(served, body()))[0] == 429
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await served.until_idle()


def texts(values: list[str], shape: tuple[int, ...]) -> Any:
    return np.array([value.encode() for value in values], dtype=np.object_).reshape(shape)


def ask_by_library(client: Any, *, binary: bool, outputs: bool, packed: str | None = None) -> tuple[Any, Any]:
    inputs = []
    for name, value in VALUES.items():
        one = httpclient.InferInput(name, [1, 1], "BYTES")
        one.set_data_from_numpy(texts([value], (1, 1)), binary_data=binary)
        inputs.append(one)
    wanted = [httpclient.InferRequestedOutput("response", binary_data=binary)] if outputs else None
    result = client.infer("glm", inputs, request_id="5", outputs=wanted, request_compression_algorithm=packed)
    return result.as_numpy("response"), result.as_numpy("history")


def use_library(url: str) -> None:
    with httpclient.InferenceServerClient(url, concurrency=2) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("glm")
        assert client.is_model_ready("glm", "1")
        assert not client.is_model_ready("other")
        assert client.get_server_metadata()["name"] == "tritongate"
        assert client.get_model_metadata("glm")["inputs"][0]["name"] == "prompt"
        assert client.get_model_config("glm")["max_batch_size"] == 64
        assert client.get_inference_statistics("glm")["model_stats"][0]["name"] == "glm"
        assert [each["name"] for each in client.get_model_repository_index()] == ["glm", "org/glm-2"]
        client.unload_model("glm")
        client.load_model("glm")
        with pytest.raises(InferenceServerException, match="unknown model"):
            client.get_model_metadata("other")
        for binary in (True, False):
            for outputs in (True, False):
                response, history = ask_by_library(client, binary=binary, outputs=outputs)
                assert response.tolist() == [
                    ["re 你好\nmore".encode() if binary or not outputs else "re 你好\nmore"]
                ]
                assert (history is None) == outputs
        for packed in ("gzip", "deflate"):
            response, _ = ask_by_library(client, binary=True, outputs=True, packed=packed)
            assert response.tolist() == [["re 你好\nmore".encode()]]


async def test_tritons_library() -> None:
    async with on_socket(FakeUpstream(echo)) as served:
        await asyncio.to_thread(use_library, served.http.base_url.netloc.decode())


def packed(value: bytes) -> bytes:
    return len(value).to_bytes(4, "little") + value


@pytest.mark.parametrize(
    ("length", "size", "rest", "words"),
    [
        ("x", 5, packed(b"a"), HEADER_LENGTH),
        ("-1", 5, packed(b"a"), HEADER_LENGTH),
        ("9" * 5000, 5, packed(b"a"), HEADER_LENGTH),
        ("0" * 12 + "9" * 5000, 5, packed(b"a"), HEADER_LENGTH),
        (None, 5, b"", "binary_data_size"),
        ("", 6, packed(b"a"), "binary_data_size"),
        ("", -1, packed(b"a"), "binary_data_size"),
        ("", True, packed(b"a"), "binary_data_size"),
        ("", 5.0, packed(b"a"), "binary_data_size"),
        ("", 2**70, packed(b"a"), "binary_data_size"),
        ("", 5, packed(b"a") + b"x", "belong to no input"),
        ("", 4, packed(b""), ""),
        ("", 5, b"\xff\xff\xff\xffa", "inputs.0.data"),
        ("", 10, packed(b"a") * 2, "inputs.0.shape"),
    ],
)
async def test_wrong_binary_data_is_refused(length: str | None, size: Any, rest: bytes, words: str) -> None:
    one = {"name": "prompt", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [one, *body()["inputs"][1:]]}).encode()
    headers = {} if length is None else {HEADER_LENGTH: length or str(len(head))}
    async with in_process(FakeUpstream(echo)) as served:
        answer = await served.http.post(INFER, content=head + rest, headers=headers)
        assert answer.status_code == (400 if words else 200)
        assert words in answer.text


async def test_binary_integers_are_read() -> None:
    inputs = [tensor("n", [], [1], "INT16") | {"parameters": {"binary_data_size": 2}}]
    head = json.dumps({"inputs": inputs}).encode()
    request, binary = read_infer_request("m", "", head + b"\x00\x80", str(len(head)))
    assert request.inputs[0].values == [-32768]
    assert not binary("response")
