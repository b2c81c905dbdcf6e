import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

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
    head = [f"POST {CHAT} HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 99"]
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
            yield padded(limit)[:-1]
            await more.wait()
            yield padded(limit)[-1:]

        first = asyncio.create_task(served.http.post(CHAT, content=unfinished(), headers=JSON))

        async with asyncio.timeout(20):
            while (answer := await served.chat()).status_code == 200:
                pass
        assert answer.status_code == 429
        assert answer.headers["retry-after"]
        more.set()
        assert (await first).status_code == 200
        assert (await served.chat()).status_code == 200


async def test_a_body_that_still_arrives_when_a_drain_ends_is_given_up() -> None:
    async with on_socket(FakeUpstream()) as served, unfinished_post(served) as (reader, _):
        await until(lambda: bool(served.gateway.drain._endings))
        served.gateway.drain.begin()
        served.gateway.drain.end()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"error"' in answer
