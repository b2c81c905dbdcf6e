import asyncio
import http.server
import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.generation import Turns
from gateway.timing import (
    GrpcClient,
    HttpClient,
    Input,
    TimingError,
    Work,
    measure,
    percentile,
    read_inputs,
)
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.kserve.legacy import echo, over_grpc
from tests.gateway.serving import on_socket
from tests.gateway.triton.fake_triton import FakeModel, FakeTriton


class Connections:
    """Clients without a server: how many, how many asked at once, which requests fail."""

    def __init__(self, failing: frozenset[int] = frozenset()) -> None:
        self.made = self.closed = self.asked = self.at_once = self.most_at_once = 0
        self._failing = failing
        self._lock = threading.Lock()
        self._all_in = threading.Event()

    def __call__(self) -> Any:
        self.made += 1
        return self

    def ask(self) -> None:
        with self._lock:
            self.asked += 1
            number = self.asked
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            if self.at_once == self.made:
                self._all_in.set()
        self._all_in.wait(10)
        with self._lock:
            self.at_once -= 1
        if number in self._failing:
            raise TimingError(f"number {number}")

    def close(self) -> None:
        self.closed += 1


def test_the_work_is_done_once_by_so_many_clients() -> None:
    connections = Connections()
    timing = measure("x", connections, Work(model="m", concurrency=3, count=10))
    assert (connections.asked, connections.made, connections.closed) == (10, 3, 3)
    assert connections.most_at_once == 3
    assert (timing.protocol, timing.answered, timing.failed, timing.first_failure) == ("x", 10, 0, None)
    assert 0 < timing.min <= timing.p50 <= timing.p90 <= timing.p99 <= timing.max
    assert timing.min <= timing.mean <= timing.max <= 1000 * timing.seconds


def test_no_more_clients_than_requests() -> None:
    connections = Connections()
    measure("x", connections, Work(model="m", concurrency=8, count=2))
    assert (connections.made, connections.asked) == (2, 2)


def test_failures_are_counted_apart() -> None:
    timing = measure("x", Connections(frozenset({2, 4})), Work(model="m", concurrency=1, count=5))
    assert (timing.answered, timing.failed, timing.first_failure) == (3, 2, "number 2")
    nothing = measure("x", Connections(frozenset({1})), Work(model="m", concurrency=1, count=1))
    assert (nothing.answered, nothing.failed) == (0, 1)
    assert math.isnan(nothing.p50)


def test_percentiles_are_of_what_was_measured() -> None:
    ten = [float(number) for number in range(1, 11)]
    assert [percentile(ten, percent) for percent in (0, 50, 90, 99, 100)] == [1, 5, 9, 10, 10]
    assert percentile([7.0], 50) == 7


CONTRACTS = {
    "batched": {
        "history": ((1, 1), ("",)),
        "max_token": ((1, 1), ("128",)),
        "history_len": ((1, 1), ("10",)),
    },
    "unbatched": {"prompt": ((1,), ("你好",)), "max_token": ((1,), (128,)), "history_len": ((1,), (10,))},
    "chatglm2": {"history": ((0,), ()), "history_len": ((1,), ("10",))},
}
KEY = "secret"


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_a_contract_is_read_from_the_model_and_asked_over_grpc_and_http(contract: str) -> None:
    upstream = FakeUpstream(echo)
    limits = {"contract": contract, "api_keys": [{"name": "bench", "key": KEY}]}
    work = Work(model="glm", concurrency=2, count=6, key=KEY)
    async with over_grpc(upstream, **limits) as (_, _, address):
        inputs = await asyncio.to_thread(read_inputs, address, work)
        read = {tensor.name: (tensor.shape, tensor.values) for tensor in inputs}
        assert CONTRACTS[contract].items() <= read.items()
        timing = await asyncio.to_thread(measure, "grpc", lambda: GrpcClient(address, work, inputs), work)
        assert (timing.answered, timing.failed, timing.first_failure) == (6, 0, None)
    async with on_socket(upstream, **limits) as served:
        url = str(served.http.base_url)
        timing = await asyncio.to_thread(measure, "http", lambda: HttpClient(url, work, inputs), work)
        assert (timing.answered, timing.failed, timing.first_failure) == (6, 0, None)
    assert len(upstream.requests) == 12
    assert {request.prompt for request in upstream.requests} == {Turns((), "你好")}


async def test_what_cannot_be_measured_is_told() -> None:
    async with over_grpc(FakeUpstream(echo)) as (_, _, address):
        with pytest.raises(TimingError, match="unknown model"):
            await asyncio.to_thread(read_inputs, address, Work(model="m"))
    with pytest.raises(TimingError, match=address):
        await asyncio.to_thread(read_inputs, address, Work(model="m"))
    triton = FakeTriton()
    await triton.start()
    triton.models["m"] = FakeModel(inputs=("text_input",))
    with pytest.raises(TimingError, match="text_input"):
        await asyncio.to_thread(read_inputs, triton.address, Work(model="m"))
    await triton.stop()


INPUTS = [
    Input(name="prompt", datatype="BYTES", shape=(1, 1), values=("你好",)),
    Input(name="max_token", datatype="INT16", shape=(1, 1), values=(5,)),
]


class TritonHttp(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answers: tuple[tuple[int, Any], ...] = ()
    clients = threading.Barrier(1)
    """Nobody gets a first answer before all have asked."""
    asked: list[tuple[str, Any]]
    connections: set[Any]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        number = len(self.asked)
        self.asked.append((self.path, body))
        if self.client_address not in self.connections:
            self.connections.add(self.client_address)
            self.clients.wait(60)
        status, document = self.answers[number % len(self.answers)]
        answer = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def triton_http() -> Iterator[tuple[str, type[TritonHttp]]]:
    answers = ((200, {"outputs": [{"name": "response", "data": ["hi"]}]}),)
    handler = type("Handler", (TritonHttp,), {"answers": answers, "asked": [], "connections": set()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()
        thread.join()


def test_requests_go_over_http_on_kept_connections(triton_http: Any) -> None:
    url, seen = triton_http
    work = Work(model="m", concurrency=2, count=8)
    seen.clients = threading.Barrier(2)
    timing = measure("http", lambda: HttpClient(url, work, INPUTS), work)
    assert (timing.answered, timing.failed, timing.first_failure) == (8, 0, None)
    assert len(seen.asked) == 8
    assert len(seen.connections) == 2
    path, body = seen.asked[0]
    assert path == "/v2/models/m/infer"
    assert body["inputs"] == [
        {"name": "prompt", "datatype": "BYTES", "shape": [1, 1], "data": ["你好"]},
        {"name": "max_token", "datatype": "INT16", "shape": [1, 1], "data": [5]},
    ]


def test_a_refusal_over_http_is_a_failure_in_its_words(triton_http: Any) -> None:
    url, seen = triton_http
    good = seen.answers[0]
    seen.answers = (good, (400, {"error": "bad shape"}), good, (200, {"outputs": []}))
    work = Work(model="m", concurrency=1, count=4)
    timing = measure("http", lambda: HttpClient(url, work, INPUTS), work)
    assert (timing.answered, timing.failed, timing.first_failure) == (2, 2, "bad shape")


def test_a_server_that_is_away_fails_every_request() -> None:
    work = Work(model="m", concurrency=2, count=3)
    timing = measure("http", lambda: HttpClient("http://127.0.0.1:9", work, INPUTS), work)
    assert (timing.answered, timing.failed) == (0, 3)
    with pytest.raises(TimingError, match="ftp"):
        HttpClient("ftp://x", work, INPUTS)
