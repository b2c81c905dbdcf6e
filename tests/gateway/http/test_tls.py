import asyncio
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.app import create_app
from gateway.http.tls import Certificate
from gateway.kserve.grpc import GrpcServer
from gateway.process.listeners import base_url, bind
from gateway.process.server import make_server
from gateway.settings import follow, reload
from gateway.settings.certificates import untimely, validity
from tests.gateway.certificates import Files, expired, self_signed
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import CHAT, MESSAGES, settings, until
from tests.ports import free_ports


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "LOOK_EVERY_S", 0.01)


@asynccontextmanager
async def serving(
    files: Files, upstream: FakeUpstream | None = None, **values: Any
) -> AsyncIterator[tuple[str, str]]:
    """Serve by TLS; yield the URL, and the address for gRPC."""
    upstream = upstream or FakeUpstream()
    upstream.settings = settings(tls_cert=files.cert, tls_key=files.key, **values)
    app = create_app(upstream.settings, upstream)
    certificate = Certificate(files.cert, files.key)
    listener = bind("127.0.0.1", 0)
    (port,) = free_ports(1)
    server = make_server(app, certificate)
    grpc_server = GrpcServer(app.state.door, app.state.records, certificate)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await server.up.wait()
    await grpc_server.start(f"127.0.0.1:{port}")
    assert server.config.ssl is not None
    certificate.follow(server.config.ssl)
    try:
        yield base_url(listener, tls=True), f"127.0.0.1:{port}"
    finally:
        await grpc_server.stop(0)
        server.should_exit = True
        await task


async def live(url: str, address: str, root: Files) -> tuple[bool, bool]:
    """Whether whoever trusts `root` alone is answered over HTTP, and over gRPC."""
    try:
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=root.cert)) as http:
            answer = await http.post(url + CHAT, json={"model": "glm", "messages": MESSAGES})
            by_http = answer.status_code == 200
    except httpx.ConnectError:
        by_http = False
    async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root.root())) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            by_grpc = (await stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=20)).live
        except grpc.aio.AioRpcError as error:
            by_grpc = error.code() is not grpc.StatusCode.UNAVAILABLE
    return by_http, by_grpc


async def test_a_new_certificate_is_for_new_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    served, first, second = (self_signed(tmp_path, name) for name in ("served", "first", "second"))
    served.replace_by(first)
    async with serving(served) as (url, address):
        assert await live(url, address, first) == (True, True)
        assert await live(url, address, second) == (False, False)
        served.spoil()
        await until_logged(caplog, "certificate refused")
        assert await live(url, address, first) == (True, True)
        served.replace_by(second)
        await until_logged(caplog, "certificate applied")
        assert await live(url, address, second) == (True, True)
        assert await live(url, address, first) == (False, False)
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(url.replace("https", "http") + "/health")


async def test_an_expired_certificate_does_not_replace_a_valid_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served, first = (self_signed(tmp_path, name) for name in ("served", "first"))
    served.replace_by(first)
    async with serving(served) as (url, address):
        served.replace_by(expired(tmp_path, "old"))
        await until_logged(caplog, "certificate refused")
        assert "expired on" in caplog.records[-1].detail  # type: ignore[attr-defined]
        assert await live(url, address, first) == (True, True)


async def test_an_expired_certificate_is_told_and_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The gateway starts: some clients do not look, and the next certificate may be on its way."""
    caplog.set_level("INFO")
    served, good = expired(tmp_path, "served"), self_signed(tmp_path, "good")

    def told() -> int:
        return sum("expired on" in getattr(record, "detail", "") for record in caplog.records)

    async with serving(served) as (url, address):
        assert told() == 1
        served.replace_by(expired(tmp_path, "another"))
        await until_logged(caplog, "certificate applied")
        assert told() == 2
        served.replace_by(good)
        await until(lambda: caplog.text.count("certificate applied") == 2)
        assert await live(url, address, good) == (True, True)


def test_a_certificate_is_valid_from_one_moment_to_another(tmp_path: Path) -> None:
    text = self_signed(tmp_path, "one").root()
    begin, end = validity(text)
    assert end - begin == timedelta(days=2)
    assert untimely(text) is None
    assert "is not valid before" in str(untimely(text, begin - timedelta(seconds=1)))
    assert "expired on" in str(untimely(text, end + timedelta(seconds=1)))
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "20000", "-subj", "/CN=a"]
    made = subprocess.run([*command, "-keyout", "/dev/null"], check=True, capture_output=True).stdout
    begin, end = validity(b"a comment\n" + made + text)
    assert end - begin == timedelta(days=20000)  # after 2049 it is a GeneralizedTime


async def test_what_is_no_request_is_answered_by_tls_as_well(tmp_path: Path) -> None:
    files = self_signed(tmp_path, "served")
    async with serving(files) as (url, _):
        host, port = url.removeprefix("https://").split(":")
        context = ssl.create_default_context(cafile=files.cert)
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        writer.write(b"GARBAGE\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_never_reads_is_gone_by_tls_as_well(tmp_path: Path, stream: bool) -> None:
    files, upstream = self_signed(tmp_path, "served"), FakeUpstream(lambda _: say(*["x" * 100_000] * 80))
    context = ssl.create_default_context(cafile=files.cert)
    async with serving(files, upstream, send_timeout_s=1, max_connections=1) as (url, _):
        host, port = url.removeprefix("https://").split(":")
        body = json.dumps({"model": "glm", "messages": MESSAGES, "stream": stream}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        _, deaf = await asyncio.open_connection(host, int(port), ssl=context, limit=1000)
        deaf.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await until(lambda: len(upstream.requests) == 1)
        statuses = [503]
        async with asyncio.timeout(20):
            while statuses[-1] != 200:
                async with httpx.AsyncClient(verify=context) as http:  # by another connection each time
                    statuses.append((await http.get(url + "/v1/models")).status_code)
                await asyncio.sleep(0.1)
        assert set(statuses) == {503, 200}
        deaf.transport.abort()


async def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    await until(lambda: text in caplog.text)


def test_settings_that_cannot_be_used(tmp_path: Path) -> None:
    one, other = (self_signed(tmp_path, name) for name in ("one", "other"))
    broken: list[tuple[dict[str, Any], str]] = [
        ({"tls_cert": one.cert}, "go together"),
        ({"tls_cert": one.cert, "tls_key": other.key}, "no certificate with its key"),
        ({"tls_cert": one.cert, "tls_key": "/nowhere"}, "No such file"),
    ]
    for values, fault in broken:
        with pytest.raises(Exception, match=fault):
            settings(**values)


def test_certificates_in_renewal_do_not_keep_keys_from_changing(tmp_path: Path) -> None:
    files, keys = self_signed(tmp_path, "served"), tmp_path / "keys.yaml"
    keys.write_text("api_keys: [{name: a, key: secret}]")
    before = settings(tls_cert=files.cert, tls_key=files.key, keys_file=str(keys))
    files.spoil()
    keys.write_text("api_keys: [{name: b, key: secret}]")
    assert [key.name for key in reload(before, "api_keys").api_keys] == ["b"]
