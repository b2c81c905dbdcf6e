from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from gateway.commands.check import check
from gateway.commands.endpoint import ClientError
from gateway.commands.models import models_of
from gateway.commands.reach import cause_of
from gateway.process.listeners import bind
from tests.gateway.certificates import Files, expired, self_signed
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.kserve.legacy import over_grpc
from tests.gateway.serving import settings
from tests.gateway.triton.test_tls import speaking_tls


async def test_nobody_answers() -> None:
    with bind("127.0.0.1", 0) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        findings = await check(settings(upstreams=[address]), timeout_s=2)
    (found,) = findings  # nothing was asked for its models, so nothing is said of them
    assert (found.ok, found.text) == (False, f"upstream {address}: unreachable (connection refused)")
    (found,) = await check(settings(upstreams=["nobody.invalid:8001"]), timeout_s=10)
    assert found.text == "upstream nobody.invalid:8001: unreachable (no such host)"


class _LikeTriton(BaseHTTPRequestHandler):
    """Ends a connection that is no HTTP/1 without a word, as the HTTP and metrics ports of Triton 2.51 do."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        if code != HTTPStatus.HTTP_VERSION_NOT_SUPPORTED:
            super().send_error(code, message, explain)


@pytest.mark.parametrize("handler", [BaseHTTPRequestHandler, _LikeTriton])
async def test_tritons_http_port(handler: type[BaseHTTPRequestHandler]) -> None:
    with HTTPServer(("127.0.0.1", 0), handler) as server:
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


async def test_why_tls_fails_is_told(tmp_path: Path) -> None:
    names = ("server", "other", "elsewhere")
    server, other, elsewhere = (self_signed(tmp_path, name) for name in names)
    named = self_signed(tmp_path, "named", "DNS:another.internal")
    old = expired(tmp_path, "old")

    async def said(served: Files | None, wanted: Files | None = None, **values: str) -> str:
        async with speaking_tls(served, wanted) as triton:
            (found,) = await check(settings(upstreams=[triton.address], **values), timeout_s=10)
        return found.text.partition(": unreachable ")[2]

    closed = "(it closes the connection: it may want TLS, with upstream_ca, or another upstream_cert)"
    assert await said(server) == closed
    assert await said(server, other, upstream_ca=server.cert) == closed
    shown = {"upstream_cert": elsewhere.cert, "upstream_key": elsewhere.key}
    assert await said(server, other, upstream_ca=server.cert, **shown) == closed
    assert await said(server, upstream_ca=other.cert) == "(upstream_ca does not vouch for its certificate)"
    assert await said(named, upstream_ca=named.cert) == "(its certificate is for another name)"
    assert await said(old, upstream_ca=old.cert) == "(its certificate has expired)"
    assert await said(None, upstream_ca=server.cert) == "(it does not speak TLS: leave out upstream_ca)"


def test_of_a_cause_that_is_not_known_grpc_is_quoted() -> None:
    assert cause_of("failed to connect to all addresses; last error: UNKNOWN: a\nb") == "UNKNOWN: a b"
    assert len(cause_of("x" * 1000)) == 500
