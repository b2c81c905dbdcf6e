from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from gateway.commands.check import check
from gateway.commands.endpoint import ClientError
from gateway.commands.models import models_of
from gateway.commands.reach import cause_of
from gateway.process.listeners import bind
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.kserve.legacy import over_grpc
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


async def test_a_gateway_is_no_triton() -> None:
    """`up` has its own KServe port where a Triton is looked for by default."""
    async with over_grpc(FakeUpstream()) as (_, _, address):
        (found,) = await check(settings(upstreams=[address], warn_of_faults=False), timeout_s=10)
        for names in ([], ["glm"]):
            with pytest.raises(ClientError) as refused:
                await models_of(settings(upstreams=[address], models=names), timeout_s=5)
            assert refused.value.message == found.text
    assert not found.ok
    assert found.text == (
        f"upstream {address} is a tritongate gateway, not a Triton; "
        "`tritongate models --url http://127.0.0.1:8080` lists a gateway's models"
    )


def test_a_cause_that_is_not_known_is_not_told() -> None:
    assert cause_of("Socket closed") == ""
