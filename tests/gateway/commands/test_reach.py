from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

from gateway.commands.check import check
from gateway.commands.reach import cause_of
from gateway.process.listeners import bind
from tests.gateway.serving import settings


async def test_nobody_answers() -> None:
    with bind("127.0.0.1", 0) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        findings = await check(settings(upstreams=[address]), timeout_s=2)
    (found,) = findings  # nothing was asked for its models, so nothing is said of them
    assert (found.ok, found.text) == (False, f"upstream {address}: unreachable (connection refused)")
    (found,) = await check(settings(upstreams=["nobody.invalid:8001"]), timeout_s=10)
    assert found.text == "upstream nobody.invalid:8001: unreachable (no such host)"


async def test_tritons_http_port() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        (found,) = await check(settings(upstreams=[f"127.0.0.1:{server.server_port}"]), timeout_s=10)
        server.shutdown()
    assert found.text.endswith(
        ": unreachable (this is no gRPC port; Triton's is 8001 by default, 8000 is its HTTP)"
    )


def test_a_cause_that_is_not_known_is_not_told() -> None:
    assert cause_of("Socket closed") == ""
