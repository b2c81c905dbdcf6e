import asyncio
import http.server
import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from bench.bursts import Timing, longest_gap, main, probes_behind, summarise, through_gateway
from wire.request import Generation, Probe, decode_request
from wire.strings import unpack_strings


class Gateway(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "http.server.ThreadingHTTPServer"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = asked["model"] == "glm" and self.path == "/v1/completions" and asked["max_tokens"] == 1
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Refuses every fifth generation."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, type, bool]] = []
        self._numbers = itertools.count()

    def ModelStreamInfer(self, requests: Iterator[Any], _context: object) -> Iterator[Any]:  # noqa: N802
        for request in requests:
            kind = type(decode_request(unpack_strings(request.raw_input_contents[2])[0]))
            self.asked.append((request.model_name, kind, "priority" in request.parameters))
            refused = kind is Generation and not next(self._numbers) % 5
            yield pb.ModelStreamInferResponse(error_message="tritongate:queue_full: full" if refused else "")


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def triton() -> Iterator[tuple[Triton, str]]:
    server = grpc.server(ThreadPoolExecutor(4))
    servicer = Triton()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_late_requests_and_stalled_bursts_are_counted() -> None:
    bursts = [
        [Timing(0.0, 0.01), Timing(0.0, 0.02)],
        [Timing(0.0, 0.09), Timing(0.0, 0.12)],  # late, but there was an answer meanwhile
        [Timing(0.0, 0.6), None],
    ]
    row = summarise("completion", 2, bursts)
    assert (row.bursts, row.requests, row.failed) == (3, 6, 1)
    assert (row.over_100_ms, row.stalled) == (2, 1)
    assert (row.p50, row.p99, row.max, row.longest_gap) == (90, 600, 600, 600)


def test_gaps_are_between_answers_and_before_the_first() -> None:
    burst = [Timing(1.0, 5.0), Timing(0.0, 2.0), Timing(0.5, 2.5)]
    assert longest_gap(burst) == 2.5
    assert longest_gap(burst[1:]) == 2.0


def test_nothing_may_have_been_answered() -> None:
    row = summarise("completion", 1, [[None]])
    assert (row.failed, row.over_100_ms, row.max, row.stalled, row.longest_gap) == (1, 0, 0, 0, 0)


def test_bursts_through_the_gateway(url: str) -> None:
    row = asyncio.run(through_gateway(url, "glm", 3, 0.05))
    assert row.failed == 0
    assert row.requests == 3 * row.bursts > 0
    assert 0 < row.p50 <= row.max
    assert asyncio.run(through_gateway(url, "other", 2, 0)).failed == 2


@pytest.mark.parametrize(("entry", "first"), [("glm", False), ("glm-stream", True)])
def test_probes_behind_generations(
    triton: tuple[Triton, str], capsys: pytest.CaptureFixture[str], entry: str, *, first: bool
) -> None:
    servicer, address = triton
    row = asyncio.run(probes_behind(address, entry, 10, 1, first=first))
    assert (row.failed, row.bursts) == (0, 1)
    generations = [asked for asked in servicer.asked if asked[1] is Generation]
    assert generations == [(entry, Generation, False)] * 10
    probes = [asked for asked in servicer.asked if asked[1] is Probe]
    assert probes == [(entry, Probe, first)] * row.requests
    assert "2 of 10 generations failed" in capsys.readouterr().err


def test_the_table(url: str, triton: tuple[Triton, str]) -> None:
    options = ["--url", url, "--model", "glm", "--grpc", triton[1], "--sizes", "1,2", "--seconds", "0"]
    result = CliRunner().invoke(main, [*options, "--behind", "4", "--bursts", "1"])
    assert result.exit_code == 0, result.output
    rows = [line.split("|")[1:4] for line in result.stdout.splitlines()[2:]]
    assert [(what.strip(), int(size)) for what, size, _ in rows] == [
        ("completion", 1),
        ("completion", 2),
        ("probe behind generations", 4),
    ]
