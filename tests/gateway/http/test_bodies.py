import asyncio
import gzip
import json
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.http.middleware import _Decompressor
from gateway.openai.chat_request import ChatRequest
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import CHAT, MESSAGES, Served, on_socket, until

JSON = {"content-type": "application/json"}
LIMIT = 2048


def padded(size: int) -> bytes:
    """Return a valid request body of exactly `size` bytes."""
    empty = len(json.dumps({"model": "glm", "messages": MESSAGES, "user": ""}))
    return json.dumps({"model": "glm", "messages": MESSAGES, "user": "u" * (size - empty)}).encode()


@asynccontextmanager
async def unfinished_post(served: Served) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection on which a body was begun."""
    reader, writer = await asyncio.open_connection(served.http.base_url.host, served.http.base_url.port)
    head = [
        f"POST {CHAT} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Content-Length: 99",
    ]
    writer.write("\r\n".join([*head, "", "{"]).encode())
    await writer.drain()
    try:
        yield reader, writer
    finally:
        writer.close()


async def pieces(body: bytes, pause_s: float = 0.0) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 500):
        await asyncio.sleep(pause_s)
        yield body[start : start + 500]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("size", "status"), [(LIMIT, 200), (LIMIT + 1, 413)])
async def test_body_limit(chunked: bool, size: int, status: int) -> None:
    async with on_socket(FakeUpstream(), max_body_bytes=LIMIT) as served:
        content = pieces(padded(size)) if chunked else padded(size)
        answer = await served.http.post(CHAT, content=content, headers=JSON)
        assert answer.status_code == status
        if status == 413:
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert (await served.chat()).status_code == 200


async def test_a_slow_body_is_given_up() -> None:
    async with on_socket(FakeUpstream(), body_timeout_s=0.2) as served:
        answer = await served.http.post(CHAT, content=pieces(padded(2000), 0.1), headers=JSON)
        assert answer.status_code == 408
        assert answer.headers["connection"] == "close"
        assert set(answer.json()) == {"error"}


async def test_a_client_that_hangs_up_amid_its_body_is_gone() -> None:
    async with on_socket(FakeUpstream()) as served, unfinished_post(served) as (reader, writer):
        await asyncio.sleep(0.1)
        writer.close()
        await until(lambda: served.metric("requests_total", route=CHAT, model="unknown", status="499") == 1)
        assert await reader.read() == b""


async def test_all_bodies_together_are_bounded() -> None:
    limit = 2**20
    async with on_socket(FakeUpstream(), max_held_body_bytes=limit) as served:
        more = asyncio.Event()

        async def unfinished() -> AsyncIterator[bytes]:
            yield padded(limit // 4)[:-1]
            await more.wait()
            yield padded(limit // 4)[-1:]

        first = asyncio.create_task(served.http.post(CHAT, content=unfinished(), headers=JSON))
        await until(lambda: served.gateway.bodies.held > 0)
        half = padded(limit // 2 - 4096)  # with the text that it becomes, almost everything

        async def ask() -> httpx.Response:
            return await served.http.post(CHAT, content=half, headers=JSON)

        refused = await ask()
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        assert (await served.chat()).status_code == 200
        more.set()
        assert (await first).status_code == 200
        await until(lambda: served.gateway.bodies.held == 0)
        assert (await ask()).status_code == 200


async def test_only_large_bodies_are_read_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    read = ChatRequest.read

    def watched(_: type[ChatRequest], *arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return read(*arguments)

    monkeypatch.setattr(ChatRequest, "read", classmethod(watched))
    async with on_socket(FakeUpstream()) as served:
        for size in (200_000, 300_000):
            answer = await served.http.post(CHAT, content=padded(size), headers=JSON)
            assert answer.status_code == 200
    assert [each is threading.main_thread() for each in threads] == [True, False]


async def test_a_body_that_still_arrives_when_a_drain_ends_is_given_up() -> None:
    async with on_socket(FakeUpstream()) as served, unfinished_post(served) as (reader, _):
        await until(lambda: bool(served.gateway.drain._endings))
        served.gateway.drain.begin()
        served.gateway.drain.end()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"error"' in answer


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("X-GZIP", gzip.compress),
        ("deflate", zlib.compress),
        ("gzip", lambda body: gzip.compress(body[:99]) + gzip.compress(b"") + gzip.compress(body[99:])),
        ("identity", bytes),
    ],
)
async def test_compressed_bodies_are_read(
    encoding: str, pack: Callable[[bytes], bytes], chunked: bool
) -> None:
    async with on_socket(FakeUpstream(), max_body_bytes=LIMIT) as served:
        for size, status in ((LIMIT, 200), (LIMIT + 1, 413)):
            body = pack(padded(size))
            answer = await served.http.post(
                CHAT, content=pieces(body) if chunked else body, headers=JSON | {"content-encoding": encoding}
            )
            assert answer.status_code == status
        await until(lambda: served.gateway.bodies.held == 0)


async def test_a_bomb_is_stopped_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    feed = _Decompressor.feed

    def watched(self: _Decompressor, data: bytes, limit: int) -> bytes:
        made.append(feed(self, data, limit))
        return made[-1]

    monkeypatch.setattr(_Decompressor, "feed", watched)
    bomb = gzip.compress(bytes(2**26))
    async with on_socket(FakeUpstream(), max_body_bytes=2**20) as served:
        answer = await served.http.post(CHAT, content=bomb, headers=JSON | {"content-encoding": "gzip"})
        assert answer.status_code == 413
        assert 0 < sum(map(len, made)) <= 2**20 + 1
        assert (await served.chat()).status_code == 200


@pytest.mark.parametrize(
    ("encoding", "body", "status", "words"),
    [
        ("br", b"x", 415, "br"),
        ("gzip, gzip", b"x", 415, "gzip, gzip"),
        ("x" * 1000, b"x", 415, "gzip"),
        ("gzip", b"{}", 400, "Content-Encoding"),
        ("gzip", gzip.compress(padded(200), mtime=0)[:-9], 400, "too early"),
        ("gzip", gzip.compress(padded(200), mtime=0) + b"not gzip", 400, "Content-Encoding"),
        ("gzip", gzip.compress(b"", mtime=0) * 1001, 400, "1,000 compressed members"),
        ("gzip", b"", 400, "no body"),
    ],
)
async def test_what_cannot_be_decompressed_is_refused_by_name(
    encoding: str, body: bytes, status: int, words: str
) -> None:
    async with on_socket(FakeUpstream()) as served:
        headers = JSON | {"content-encoding": encoding}
        answer = await served.http.post(CHAT, content=body, headers=headers)
        assert answer.status_code == status
        message = answer.json()["error"]["message"]
        assert words in message
        assert len(message) < 300
        assert (await served.http.get("/v1/models", headers=headers)).status_code == 200
