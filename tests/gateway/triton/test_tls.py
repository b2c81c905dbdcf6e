"""TLS to Tritons: who is believed, and certificates that change."""

import asyncio
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.settings import load_settings
from gateway.settings.certificates import TlsFiles
from gateway.triton import client as clients
from gateway.triton.client import Client, Tls
from gateway.triton.errors import TritonError
from gateway.triton.resolver import client_tls
from tests.gateway.certificates import Files, self_signed
from tests.gateway.process.two_workers import TRITONGATE
from tests.gateway.triton.fake_triton import FakeTriton, accepted, finished, infer_request, until
from tests.tied import tied


@asynccontextmanager
async def speaking_tls(server: Files | None, client_root: Files | None = None) -> AsyncIterator[FakeTriton]:
    root = None if client_root is None else client_root.root()
    triton = FakeTriton()
    if server is not None:
        triton.credentials = grpc.ssl_server_credentials([server.texts()], root, root is not None)
    await triton.start()
    try:
        yield triton
    finally:
        await triton.stop()


async def reached(triton: FakeTriton, tls: Tls | None) -> bool:
    client = Client(triton.address, tls=tls)
    try:
        return await client.live()
    except TritonError:
        return False
    finally:
        await client.close()


async def test_a_server_must_be_who_it_was_asked_for(tmp_path: Path) -> None:
    server = self_signed(tmp_path, "server", "DNS:triton.internal")
    other = self_signed(tmp_path, "other")
    async with speaking_tls(server) as triton:
        files = TlsFiles(server.cert)
        assert await reached(triton, Tls(files, "triton.internal"))
        assert not await reached(triton, Tls(files, "another.internal"))
        assert not await reached(triton, Tls(files))  # its address is not in the certificate
        assert not await reached(triton, Tls(TlsFiles(other.cert), "triton.internal"))
        assert not await reached(triton, None)


async def test_the_log_has_no_lines_of_grpcs_library(tmp_path: Path) -> None:
    server, other = self_signed(tmp_path, "server", "DNS:localhost"), self_signed(tmp_path, "other")
    async with speaking_tls(server) as triton:
        flags = ("--upstreams", triton.address, "--upstream-ca", other.cert, "--models", "m", "--port", "0")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
        serving = await asyncio.create_subprocess_exec(
            *tied(TRITONGATE, "serve", *flags), env=environment, stderr=asyncio.subprocess.PIPE
        )
        assert serving.stderr is not None
        lines: list[str] = []
        async with asyncio.timeout(60):
            while not any("unreachable" in line for line in lines):
                lines.append((await serving.stderr.readline()).decode())
        serving.terminate()
        rest, _ = (await serving.stderr.read()).decode().splitlines(), await serving.wait()
    assert not [line for line in (*lines, *rest) if not line.startswith("{")]


async def test_a_pool_asks_addresses_of_a_name_for_that_name(tmp_path: Path, serve: Any) -> None:
    server = self_signed(tmp_path, "server", "DNS:triton.internal")
    settings = load_settings(
        {"upstreams": "dns:///triton.internal:1", "upstream_ca": f"dns:triton.internal:1={server.cert}"}
    )
    assert client_tls("dns:///triton.internal:1", settings.tls_of) == Tls(
        TlsFiles(server.cert), "triton.internal"
    )
    assert client_tls("triton.internal:1", settings.tls_of) is None
    async with speaking_tls(server) as triton:

        async def resolve(host: str, port: int) -> list[str]:
            return [triton.address]

        name = "dns:///triton.internal:1"
        await serve(names=[name], resolve=resolve, tls_of=settings.tls_of)


async def test_a_changed_certificate_is_shown_to_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(clients, "_CERTIFICATES_S", 0.0)
    server, known, unknown = (self_signed(tmp_path, name) for name in ("server", "known", "unknown"))
    shown = self_signed(tmp_path, "shown")
    shown.replace_by(unknown)
    async with speaking_tls(server, known) as triton:
        assert not await reached(triton, Tls(TlsFiles(server.cert)))
        client = Client(triton.address, tls=Tls(TlsFiles(server.cert, shown.cert, shown.key)))

        async def live() -> bool:
            try:
                return await client.live()
            except TritonError:
                return False

        assert not await live()
        shown.replace_by(known)
        assert await live()
        shown.spoil()
        assert await live()  # by the connection that there is
        assert "cannot be used" in caplog.text
        shown.replace_by(unknown)
        assert not await live()
        await client.close()


async def test_a_replaced_connection_is_closed_after_its_last_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[grpc.aio.Channel] = []
    secure_channel = grpc.aio.secure_channel

    def noted(*args: Any, **options: Any) -> grpc.aio.Channel:
        opened.append(secure_channel(*args, **options))
        return opened[-1]

    def closed() -> list[bool]:
        return [channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN for channel in opened]

    monkeypatch.setattr(clients, "_CERTIFICATES_S", 0.0)
    monkeypatch.setattr(grpc.aio, "secure_channel", noted)
    server, first, second = (self_signed(tmp_path, name) for name in ("server", "first", "second"))
    shown = self_signed(tmp_path, "shown")
    async with speaking_tls(server) as triton:
        release = asyncio.Event()

        async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
            yield accepted()
            await release.wait()
            yield finished("end", 1)

        triton.model.answer = answer
        client = Client(triton.address, tls=Tls(TlsFiles(server.cert, shown.cert, shown.key)))
        responses = client.stream_infer(infer_request(), deadline=math.inf, idle_timeout_s=60)
        await anext(responses)
        for renewed in (first, second):  # nothing runs on the one between
            shown.replace_by(renewed)
            assert await client.live()
        await until(lambda: closed() == [False, True, False])
        release.set()
        assert len([response async for response in responses]) == 1
        await until(lambda: closed() == [True, True, False])
        assert await client.live()
        await client.close()
        assert all(closed())


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"upstream_cert": "{cert}", "upstream_key": "{key}"}, "upstream_ca is needed"),
        ({"upstream_ca": "{cert}", "upstream_cert": "{cert}"}, "go together"),
        ({"upstream_ca": "{key}"}, "holds no certificates"),
        ({"upstream_ca": "/nowhere.pem"}, "of a file that exists"),
        (
            {"upstreams": "dns:///triton:8001,b:1", "upstream_ca": "triton:8001={cert}"},
            "upstream_ca: no upstream is triton:8001; there are: dns:///triton:8001, b:1",
        ),
        ({"upstream_ca": "dns:triton:8001={cert}"}, "no upstream is dns:///triton:8001"),
        ({"repository_key": "key=value"}, "repository_key: it would go to triton:8001 in clear text"),
        ({"repository_key": "key=value", "upstreams": "127.0.0.1:1,dns:localhost:2"}, None),
        ({"repository_key": "key=value", "plain_repository_key": True}, None),
        ({"repository_key": "key=value", "upstream_ca": "triton:8001={cert}"}, None),
    ],
)
def test_what_settings_must_say(tmp_path: Path, values: dict[str, Any], fault: str | None) -> None:
    files = self_signed(tmp_path, "one")
    values = {
        name: value.format(cert=files.cert, key=files.key) if isinstance(value, str) else value
        for name, value in values.items()
    }
    values = {"upstreams": "triton:8001"} | values
    if fault is None:
        load_settings(values)
        return
    with pytest.raises(Exception, match=fault):
        load_settings(values)
