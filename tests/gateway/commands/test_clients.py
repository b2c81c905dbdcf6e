import asyncio
import http.server
import json
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner

import gateway.commands.clients
from gateway.cli import main
from gateway.commands.clients import (
    Timing,
    Work,
    grpc_client,
    http_client,
    measure,
    read_inputs,
)
from gateway.commands.endpoint import ClientError, fetch
from gateway.core.request import PlainText, TokenIds, Turns
from gateway.process.listeners import bind
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.kserve.legacy import echo, over_grpc
from tests.gateway.kserve.test_logits import telling
from tests.gateway.serving import on_socket
from tests.gateway.triton.fake_triton import FakeModel, FakeTriton


@pytest.fixture
def gateway_asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a gateway would have been asked; it has `m`, on two Tritons."""
    asked: list[Any] = []

    def change(url: str, key: str | None, path: str, options: Any) -> Any:
        model, action = path.removeprefix("/v1/models/").split("/")
        asked.append((url, key, model, action, options))
        if model != "m":
            raise ClientError("no such model (404)")
        changes = [{"upstream": "a:1", "entries": ["m"]}, {"upstream": "b:1", "entries": []}]
        unloaded = {"unloaded": True} if action == "unload" else {}
        return {"model": {"ready": action == "load", **unloaded}, "changes": changes}

    monkeypatch.setattr(gateway.commands.clients, "fetch", change)
    return asked


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments, env=environment)
    return result.exit_code, result.output


def test_load(gateway_asked: list[Any]) -> None:
    status, text = run("load", "m", "--url", "http://g", "--key", "k", "--reload", "--upstream", "a:1")
    assert (status, text) == (0, "a:1: loaded m\nb:1: nothing to load\nm is ready\n")
    assert gateway_asked == [("http://g", "k", "m", "load", {"reload": True, "upstream": "a:1"})]


def test_unload_with_the_key_of_the_environment(gateway_asked: list[Any]) -> None:
    status, text = run("unload", "m", TRITONGATE_KEY="secret")
    assert (status, text.splitlines()[-1]) == (0, "m is unloaded")
    assert gateway_asked == [("http://127.0.0.1:8080", "secret", "m", "unload", {"upstream": None})]


@pytest.mark.parametrize("command", ["load", "unload"])
def test_a_refusal_is_status_1_in_one_line(command: str, gateway_asked: list[Any]) -> None:
    assert run(command, "x") == (1, "Error: no such model (404)\n")
    assert run(command)[0] == 2
    assert run(command, "m", "--url", "http://g", "--reloadd")[0] == 2


def timing(protocol: str, failed: int = 0) -> Timing:
    return Timing(
        protocol=protocol,
        seconds=1.5,
        times_ms=[20.25] * 40,
        failures=["bad shape"] * failed,
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def measure(protocol: str, connect: Any, work: Any) -> Timing:
        calls.append((protocol, work))
        return timing(protocol, failed=int(work.model == "bad"))

    def read_inputs(address: str, work: Any) -> list[Any]:
        if work.model == "absent":
            raise ClientError("unknown model: absent")
        return []

    monkeypatch.setattr(gateway.commands.clients, "measure", measure)
    monkeypatch.setattr(gateway.commands.clients, "read_inputs", read_inputs)
    return calls


def test_bench_shows_protocols_side_by_side(measured: list[Any]) -> None:
    status, text = run(
        "bench-kserve", "--model", "m", "--concurrency", "2", "--count", "3", "--max-token", "9"
    )
    assert status == 0
    lines = [line.split() for line in text.splitlines()[1:]]
    assert lines[0] == ["protocol", "grpc", "http"]
    assert ["mean", "20.2", "20.2"] in lines
    assert ["answered", "40", "40"] in lines
    assert len({len(line) for line in text.splitlines()[1:]}) == 1
    assert [protocol for protocol, _ in measured] == ["grpc", "http"]
    assert (measured[0][1].concurrency, measured[0][1].count, measured[0][1].max_token) == (2, 3, 9)
    assert run("bench-kserve", "--model", "m", "--protocol", "http")[0] == 0
    assert measured[2][0] == "http"


def test_bench_fails_loudly(measured: list[Any]) -> None:
    status, text = run("bench-kserve", "--model", "bad", "--protocol", "grpc")
    assert status == 1
    assert "bad shape" in text
    assert run("bench-kserve", "--model", "absent") == (1, "Error: unknown model: absent\n")
    assert run("bench-kserve")[0] == 2


def test_bench_that_reaches_nobody_names_the_flag() -> None:
    with bind("127.0.0.1", 0) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        status, text = run("bench-kserve", "--model", "m", "--grpc", address)
    assert (status, text.splitlines()[0].startswith(f"Error: cannot reach {address}: ")) == (1, True), text
    assert text.endswith(
        "Connection refused; `tritongate up` starts a gateway, --grpc names another address\n"
    )


KEYS = [{"name": "operator", "key": "sk-2", "scopes": ["admin"]}]


async def change(url: str, key: str | None = None, **options: Any) -> Any:
    return await asyncio.to_thread(fetch, url, key, "/v1/models/org/glm-2/load", options)


async def test_a_model_is_changed() -> None:
    upstream = FakeUpstream()
    async with on_socket(upstream, api_keys=KEYS) as served:
        url = str(served.http.base_url)
        answer = await change(url, "sk-2", reload=True, upstream="a:1")
        assert answer["model"]["id"] == "org/glm-2"
        with pytest.raises(ClientError, match="does not know this key"):
            await change(url, "sk-3")
        with pytest.raises(ClientError, match="needs a key"):
            await change(url)
    assert upstream.changes == [("load", "org/glm-2", True, "a:1")]


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://x", "http://", ""])
def test_what_is_no_url_is_told(url: str) -> None:
    with pytest.raises(ClientError, match="not a URL"):
        fetch(url, None, "/v1/models/m/load", {})


async def test_what_is_not_there_is_told() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        for url, why in (
            (f"http://127.0.0.1:{free.getsockname()[1]}", "refused; `tritongate up` starts a gateway"),
            ("http://127.0.0.1:99999", ""),
            ("http://no.invalid", ""),
        ):
            with pytest.raises(ClientError, match=f"cannot reach {url}: .*{why}$"):
                await change(url)


@pytest.mark.parametrize("answer", [b"hello", b"[]", json.dumps({"error": "text"}).encode()])
async def test_what_is_no_gateway_is_told(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 X\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ClientError, match="404"):
            await change(f"http://127.0.0.1:{port}")


class Connections:
    """Clients without a server: how many, how many asked at once, which requests fail."""

    def __init__(self, failing: frozenset[int] = frozenset()) -> None:
        self.made = self.closed = self.asked = self.at_once = self.most_at_once = 0
        self._failing = failing
        self._lock = threading.Lock()
        self._all_in = threading.Event()

    @contextmanager
    def __call__(self) -> Iterator[Any]:
        self.made += 1
        yield self.ask
        self.closed += 1

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
            raise ClientError(f"number {number}")


def test_the_work_is_done_once_by_so_many_clients() -> None:
    connections = Connections()
    timing = measure("x", connections, Work(model="m", concurrency=3, count=10))
    assert (connections.asked, connections.made, connections.closed) == (10, 3, 3)
    assert connections.most_at_once == 3
    rows: dict[str, Any] = {**timing.rows()}
    assert (rows["protocol"], rows["answered"], rows["failed"]) == ("x", 10, 0)
    assert 0 < rows["min"] <= rows["p50"] <= rows["p90"] <= rows["p99"] <= rows["max"]
    assert rows["min"] <= rows["mean"] <= rows["max"] <= 1000 * rows["seconds"]


def test_no_more_clients_than_requests() -> None:
    connections = Connections()
    measure("x", connections, Work(model="m", concurrency=8, count=2))
    assert (connections.made, connections.asked) == (2, 2)


def test_failures_are_counted_apart() -> None:
    timing = measure("x", Connections(frozenset({2, 4})), Work(model="m", concurrency=1, count=5))
    assert (len(timing.times_ms), timing.failures) == (3, ["number 2", "number 4"])
    nothing = measure("x", Connections(frozenset({1})), Work(model="m", concurrency=1, count=1))
    assert (nothing.rows()["answered"], nothing.rows()["failed"]) == (0, 1)
    assert math.isnan(nothing.rows()["p50"])
    assert math.isnan(nothing.rows()["mean"])


CONTRACTS: dict[str, dict[str, Any]] = {
    "batched": {
        "history": ([1, 1], [""]),
        "max_token": ([1, 1], ["128"]),
        "history_len": ([1, 1], ["10"]),
    },
    "unbatched": {"prompt": ([1], ["你好"]), "max_token": ([1], [128]), "history_len": ([1], [10])},
    "chatglm2": {"history": ([0], []), "history_len": ([1], ["10"])},
}
KEY = "secret"


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_a_contract_is_read_from_the_model_and_asked_over_grpc_and_http(contract: str) -> None:
    upstream = FakeUpstream(echo)
    limits = {"contract": contract, "api_keys": [{"name": "bench-kserve", "key": KEY}]}
    work = Work(model="glm", concurrency=2, count=6, key=KEY)
    async with over_grpc(upstream, **limits) as (_, _, address):
        inputs = await asyncio.to_thread(read_inputs, address, work)
        read = {tensor["name"]: (tensor["shape"], tensor["data"]) for tensor in inputs}
        assert CONTRACTS[contract].items() <= read.items()
        timing = await asyncio.to_thread(measure, "grpc", lambda: grpc_client(address, work, inputs), work)
        assert (len(timing.times_ms), timing.failures) == (6, [])
    async with on_socket(upstream, **limits) as served:
        url = str(served.http.base_url)
        timing = await asyncio.to_thread(measure, "http", lambda: http_client(url, work, inputs), work)
        assert (len(timing.times_ms), timing.failures) == (6, [])
    assert len(upstream.requests) == 12
    assert {request.prompt for request in upstream.requests} == {Turns((), "你好")}


@pytest.mark.parametrize("json_numbers", [False, True])
@pytest.mark.parametrize("model", ["glm", "glm_tokenizer"])
async def test_logits_and_their_tokenizer_are_asked_over_grpc_and_http(
    model: str, json_numbers: bool
) -> None:
    upstream = FakeUpstream(telling(300))
    upstream.vocabulary = 300
    work = Work(
        model=model, concurrency=2, count=4, rows=2, positions=3, json_numbers=json_numbers, prompt="ab"
    )
    async with over_grpc(upstream, contract="glm=logits") as (_, _, address):
        inputs = await asyncio.to_thread(read_inputs, address, work)
        timing = await asyncio.to_thread(measure, "grpc", lambda: grpc_client(address, work, inputs), work)
        assert (len(timing.times_ms), timing.failures) == (4, [])
    async with on_socket(upstream, contract="glm=logits") as served:
        url = str(served.http.base_url)
        timing = await asyncio.to_thread(measure, "http", lambda: http_client(url, work, inputs), work)
        assert (len(timing.times_ms), timing.failures) == (4, [])
    # Each row is asked for by itself, in both protocols.
    asked = upstream.requests if model == "glm" else upstream.tokenizations
    assert len(asked) == 2 * 2 * 4
    expected = TokenIds((5, 6, 7)) if model == "glm" else PlainText("ab")
    assert {each.prompt for each in asked} == {expected}


async def test_what_cannot_be_measured_is_told() -> None:
    async with over_grpc(FakeUpstream(echo)) as (_, _, address):
        with pytest.raises(ClientError, match="unknown model"):
            await asyncio.to_thread(read_inputs, address, Work(model="m"))
    with pytest.raises(ClientError, match=address):
        await asyncio.to_thread(read_inputs, address, Work(model="m"))
    triton = FakeTriton()
    await triton.start()
    triton.models["m"] = FakeModel(inputs=("text_input",))
    with pytest.raises(ClientError, match="text_input"):
        await asyncio.to_thread(read_inputs, triton.address, Work(model="m"))
    await triton.stop()


INPUTS = [
    {"name": "prompt", "datatype": "BYTES", "shape": [1, 1], "data": ["你好"]},
    {"name": "max_token", "datatype": "INT16", "shape": [1, 1], "data": [5]},
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
    timing = measure("http", lambda: http_client(url, work, INPUTS), work)
    assert (len(timing.times_ms), timing.failures) == (8, [])
    assert len(seen.asked) == 8
    assert len(seen.connections) == 2
    path, body = seen.asked[0]
    assert path == "/v2/models/m/infer"
    assert body["inputs"] == INPUTS


def test_a_refusal_over_http_is_a_failure_in_its_words(triton_http: Any) -> None:
    url, seen = triton_http
    good = seen.answers[0]
    seen.answers = (good, (400, {"error": "bad shape"}), good, (200, {"outputs": []}))
    work = Work(model="m", concurrency=1, count=4)
    timing = measure("http", lambda: http_client(url, work, INPUTS), work)
    assert (len(timing.times_ms), timing.failures[0], len(timing.failures)) == (2, "bad shape", 2)


def test_a_server_that_is_away_fails_every_request() -> None:
    work = Work(model="m", concurrency=2, count=3)
    timing = measure("http", lambda: http_client("http://127.0.0.1:9", work, INPUTS), work)
    assert (len(timing.times_ms), len(timing.failures)) == (0, 3)
    with pytest.raises(ClientError, match="ftp"):
        measure("http", lambda: http_client("ftp://x", work, INPUTS), work)


async def test_what_speaks_no_http_is_told_without_its_bytes() -> None:
    """Such as gRPC's port, 8001: its bytes would reach the terminal."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x00\x00\x18\x04\x00\x1b[2J\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(ClientError, match=f"^cannot reach {url}: what answers there is not HTTP$"):
            await change(url)
