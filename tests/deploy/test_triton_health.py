import http.server
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from deploy.docker.triton_health import heartbeat_ages, main

HEARTBEAT = "tritongate_engine_heartbeat_timestamp_seconds"


class FakeTriton(http.server.ThreadingHTTPServer):
    """Triton's metrics, and its gRPC service as far as it tells its health."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ready = self.live = True
        self.metrics = ""
        self.grpc = grpc.server(ThreadPoolExecutor(1))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Health(self), self.grpc)
        port = self.grpc.add_insecure_port("127.0.0.1:0")
        self.arguments = [
            f"--grpc=127.0.0.1:{port}",
            f"--metrics=127.0.0.1:{self.server_address[1]}",
        ]

    def beat(self, model: str, seconds_ago: float) -> None:
        self.metrics += f'{HEARTBEAT}{{model="{model}",version="1"}} {time.time() - seconds_ago}\n'


class Health(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, triton: FakeTriton) -> None:
        self.triton = triton

    def ServerLive(self, *_: object) -> Any:  # noqa: N802
        return pb.ServerLiveResponse(live=self.triton.live)

    def ServerReady(self, *_: object) -> Any:  # noqa: N802
        return pb.ServerReadyResponse(ready=self.triton.ready)


class Handler(http.server.BaseHTTPRequestHandler):
    server: FakeTriton

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(self.server.metrics.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with FakeTriton() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        server.grpc.start()
        yield server
        server.grpc.stop(None).wait()
        server.shutdown()
        thread.join()


@pytest.fixture
def victim() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_all_is_well(triton: FakeTriton, capsys: pytest.CaptureFixture[str]) -> None:
    triton.beat("glm", 0.2)
    assert main(triton.arguments) == 0
    assert not capsys.readouterr().out


def test_a_proxy_for_the_way_out_is_not_asked(triton: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker sets these variables in every container where its client is told of a proxy."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setattr("urllib.request._opener", None)  # it remembers the variables
    triton.beat("glm", 0.2)
    assert main(triton.arguments) == 0


def test_a_triton_that_is_not_ready(triton: FakeTriton, capsys: pytest.CaptureFixture[str]) -> None:
    triton.ready = False
    assert main(triton.arguments) == 1
    assert "not ready" in capsys.readouterr().out


def test_a_live_triton_may_be_without_an_engine(
    triton: FakeTriton, capsys: pytest.CaptureFixture[str]
) -> None:
    """As while an administrator has its model loaded anew, which no restart must interrupt."""
    triton.ready = False
    assert main([*triton.arguments, "--liveness"]) == 0
    triton.metrics = f'{HEARTBEAT}{{model="glm",version="1"}} 0.0\n'
    assert main([*triton.arguments, "--liveness"]) == 0
    triton.beat("glm", 45)
    assert main([*triton.arguments, "--liveness"]) == 1
    assert "45 s ago" in capsys.readouterr().out
    triton.live = False
    assert main([*triton.arguments, "--liveness"]) == 1
    assert "not live" in capsys.readouterr().out


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--grpc=127.0.0.1:1", "--end-process=1"]) == 1
    said = capsys.readouterr().out
    assert "does not answer" in said
    assert "ending" not in said


def test_metrics_that_do_not_come(triton: FakeTriton, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*triton.arguments, "--metrics=127.0.0.1:1", "--end-process=1"]) == 1
    assert "does not answer" in capsys.readouterr().out


def test_a_ready_triton_without_an_engine_is_not_well(
    triton: FakeTriton, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(triton.arguments) == 1
    assert "no engine" in capsys.readouterr().out


def test_a_late_heartbeat_is_told_and_borne_for_a_while(
    triton: FakeTriton, victim: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    triton.beat("well", 0.1)
    triton.beat("glm", 45)
    assert main([*triton.arguments, f"--end-process={victim.pid}"]) == 1
    assert capsys.readouterr().out == "glm: the engine's last heartbeat was 45 s ago\n"
    assert victim.poll() is None


def test_a_dead_engine_ends_the_server(triton: FakeTriton, victim: "subprocess.Popen[bytes]") -> None:
    triton.beat("glm", 61)
    assert main([*triton.arguments, f"--end-process={victim.pid}"]) == 1
    assert victim.wait(60) == -signal.SIGTERM


def test_an_unloaded_engine_does_not_count() -> None:
    exposition = f'{HEARTBEAT}{{model="gone",version="1"}} 0\n{HEARTBEAT}{{model="glm",version="1"}} 1.5e3\n'
    assert dict(heartbeat_ages(exposition, now=1502.0)) == {"glm": 2.0}
