import asyncio
import json
import socket
from typing import Any

import pytest

from gateway.remote import RemoteError, RemoteGateway
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import on_socket

KEYS = [{"name": "operator", "key": "sk-2", "scopes": ["admin"]}]


async def change(url: str, key: str | None = None, **options: Any) -> dict[str, Any]:
    return await asyncio.to_thread(RemoteGateway(url, key).change_model, "org/glm-2", "load", options)


async def test_a_model_is_changed() -> None:
    upstream = FakeUpstream()
    async with on_socket(upstream, api_keys=KEYS) as served:
        url = str(served.http.base_url)
        answer = await change(url, "sk-2", reload=True, upstream="a:1")
        assert answer["model"]["id"] == "org/glm-2"
        with pytest.raises(RemoteError, match=r"key is not known.* \(401\)"):
            await change(url, "sk-3")
        with pytest.raises(RemoteError, match=r"key is needed.* \(401\)"):
            await change(url)
    assert upstream.changes == [("load", "org/glm-2", True, "a:1")]


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://x", "http://", ""])
def test_what_is_no_url_is_told(url: str) -> None:
    with pytest.raises(RemoteError, match="not a URL"):
        RemoteGateway(url)


async def test_what_is_not_there_is_told() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        for url in (
            f"http://127.0.0.1:{free.getsockname()[1]}",
            "http://127.0.0.1:99999",
            "http://no.invalid",
        ):
            with pytest.raises(RemoteError, match="cannot reach"):
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
        with pytest.raises(RemoteError, match="404"):
            await change(f"http://127.0.0.1:{port}")
