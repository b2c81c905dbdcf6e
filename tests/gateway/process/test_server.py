"""Signals and drains, on a real process with the fake upstream."""

import http.client
import json
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.process.server import _connections_allowed
from tests.gateway.kserve.legacy import body, question
from tests.gateway.serving import CHAT, MESSAGES
from tests.ports import free_ports

ROOT = Path(__file__).parents[3]


class Process:
    """The server as a child process."""

    def __init__(self, prefix: Sequence[str] = (), **settings: Any) -> None:
        program = [sys.executable, "-m", "tests.gateway.process.fake_server"]
        self.process = subprocess.Popen(
            [*prefix, *program, json.dumps({"port": 0, **settings})],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, self.process.communicate()[1]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def end(self, timeout: float = 40) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, errors


class Stream:
    """A streamed request of `tokens` tokens, 50 ms each, read by a thread."""

    def __init__(self, url: str, tokens: int) -> None:
        self.text = ""
        self._begun = threading.Event()
        body = {"model": "glm", "messages": MESSAGES, "stream": True, "max_tokens": tokens}
        self._thread = threading.Thread(target=self._read, args=(url + CHAT, body))
        self._thread.start()
        assert self._begun.wait(60)

    def _read(self, url: str, body: Any) -> None:
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            for piece in answer.iter_text():
                self.text += piece
                self._begun.set()

    def whole(self) -> list[str]:
        self._thread.join(60)
        return [event for event in self.text.split("\n\n") if event]


@contextmanager
def running(**settings: Any) -> Iterator[Process]:
    process = Process(**settings)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.communicate()


@pytest.fixture(autouse=True)
def _hang_ups_end() -> Iterator[None]:
    """As for a process of a terminal; this run itself may have been told to ignore them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_running_requests_end_and_new_ones_are_refused(number: signal.Signals) -> None:
    with running(drain_s=60) as server:
        stream = Stream(server.url, tokens=100)  # five seconds, for what happens meanwhile
        server.process.send_signal(number)
        deadline = time.monotonic() + 60
        while server.get("/health/ready").status_code != 503:
            assert time.monotonic() < deadline
        refusal = httpx.post(server.url + CHAT, json={"model": "glm", "messages": MESSAGES}, timeout=60)
        assert (refusal.status_code, refusal.headers["retry-after"]) == (503, "1")
        assert refusal.headers["connection"] == "close"
        events = stream.whole()
        assert events[-1] == "data: [DONE]"
        assert '"finish_reason":"stop"' in events[-2]
        status, errors = server.end()
        assert status == 0
        assert "Traceback" not in errors


def test_what_outlasts_the_grace_ends_with_an_error() -> None:
    with running(drain_s=0.3) as server:
        stream = Stream(server.url, tokens=1000)
        server.process.send_signal(signal.SIGTERM)
        events = stream.whole()
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "service_unavailable"
        assert events[-1] == "data: [DONE]"
        status, errors = server.end()
        assert status == 0
        assert "Traceback" not in errors


def test_what_only_the_server_can_end_gets_an_error_too() -> None:
    with running(drain_s=0.3) as server, ThreadPoolExecutor(1) as pool:
        unload = pool.submit(httpx.post, server.url + "/v2/repository/models/glm/unload", timeout=60)
        assert server.process.stdout is not None
        assert server.process.stdout.readline() == "unloading glm\n"
        server.process.send_signal(signal.SIGTERM)
        answer = unload.result()
        assert (answer.status_code, answer.json()) == (503, {"error": "The gateway is shutting down."})
        status, errors = server.end()
        assert status == 0
        assert "Traceback" not in errors


def test_a_second_signal_ends_at_once_and_in_order() -> None:
    with running(drain_s=60, log_level="warning") as server:
        stream = Stream(server.url, tokens=400)
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while server.get("/health/ready").status_code != 503:
            assert time.monotonic() < deadline
        server.process.send_signal(signal.SIGTERM)
        status, errors = server.end()
        assert status == 128 + signal.SIGTERM
        line = json.loads(errors)  # nothing but the stream that was cut short
        assert (line["message"], line["status"], line["reason"]) == ("request", 503, "draining")
        assert stream.whole()[-1] == "data: [DONE]"


def test_a_lost_terminal_lets_requests_end_however_often_it_says_so() -> None:
    with running(drain_s=60) as server:
        stream = Stream(server.url, tokens=40)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.get("/health/ready").status_code == 503)
        server.process.send_signal(signal.SIGHUP)
        assert stream.whole()[-1] == "data: [DONE]"
        assert server.end()[0] == 0


def test_under_nohup_a_lost_terminal_is_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with running(drain_s=60) as server:
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert server.get("/health/ready").status_code == 200


def test_an_idle_server_ends_at_once() -> None:
    with running(drain_s=60) as server:
        assert server.get("/health/ready").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.end()[0] == 0


@contextmanager
def with_triton_ports(**settings: Any) -> Iterator[tuple[Process, str, Any]]:
    """A gateway that also listens where Triton would; yields the second URL and a stub, too."""
    http, port = free_ports(2)
    with (
        running(kserve_http_port=http, kserve_grpc_port=port, **settings) as server,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield server, f"http://127.0.0.1:{http}", service_pb2_grpc.GRPCInferenceServiceStub(channel)


def is_draining(stub: Any) -> bool:
    return not stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=60).ready


def test_clients_of_triton_are_served_on_ports_of_their_own() -> None:
    with with_triton_ports() as (server, url, stub):
        for base in (server.url, url):
            answer = httpx.post(base + "/v2/models/glm/infer", json=body(max_token="2"), timeout=60)
            assert answer.json()["outputs"][0]["data"] == ["word word"]
            assert httpx.get(base + "/health/ready", timeout=60).status_code == 200
        answer = stub.ModelInfer(question(max_token="3"), timeout=60)
        assert b"word word word" in answer.raw_output_contents[0]
        server.process.send_signal(signal.SIGTERM)
        status, errors = server.end()
        assert status == 0
        assert "Traceback" not in errors


def test_a_drain_lets_calls_over_grpc_end_and_refuses_new_ones() -> None:
    with with_triton_ports(drain_s=60) as (server, _, stub):
        call = stub.ModelInfer.future(question(max_token="100"), timeout=60)
        until(lambda: 'in_flight{model="glm"} 1.0' in server.get("/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: is_draining(stub))
        with pytest.raises(grpc.RpcError) as raised:
            stub.ModelInfer(question(), timeout=60)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert call.result().model_name == "glm"
        assert server.end()[0] == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_calls_over_grpc_end_with_the_grace(signals: int) -> None:
    with with_triton_ports(drain_s=0.3 if signals == 1 else 60) as (server, _, stub):
        call = stub.ModelInfer.future(question(max_token="1000"), timeout=60)
        until(lambda: 'in_flight{model="glm"} 1.0' in server.get("/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        if signals == 2:
            until(lambda: is_draining(stub))
            server.process.send_signal(signal.SIGTERM)
        assert call.exception().code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        status, errors = server.end()
        assert status == (0 if signals == 1 else 128 + signal.SIGTERM)
        assert signals == 2 or "Traceback" not in errors


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((1024, 20_000), (4608, 20_000)),
        ((1024, resource.RLIM_INFINITY), (4608, resource.RLIM_INFINITY)),
        ((1024, 2048), (2048, 2048)),
        ((128, 128), None),
        ((6000, 20_000), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_it_may_open_as_many_descriptors_as_it_needs(
    limits: tuple[int, int],
    expected: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: found.append(both))
    # Of few, a quarter is for connections: those that only probes get are as many again, and it has files.
    allowed = {128: 32, 2048: 1536}.get(limits[1], 4096)
    assert _connections_allowed(4096) == allowed
    assert found == ([] if expected is None else [expected])
    told = [record.max_connections for record in caplog.records if "open files" in record.message]  # type: ignore[attr-defined]
    assert told == ([allowed] if allowed < 4096 else [])


def test_too_few_descriptors_leave_fewer_connections() -> None:
    """It would have no descriptor for each new one; so idle ones make room, as at any bound."""
    with ExitStack() as stack:
        server = stack.enter_context(running(prefix=("sh", "-c", 'ulimit -n 128; exec "$@"', "sh")))
        host = server.url.removeprefix("http://")
        for _ in range(300):
            connection = stack.enter_context(closing(http.client.HTTPConnection(host, timeout=60)))
            connection.request("GET", "/health")
            assert connection.getresponse().read()
