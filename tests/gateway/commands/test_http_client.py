"""The client against a server that writes exactly what a test says, cut where it says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from gateway.commands.http_client import Client, HttpError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = (b"data: one\n\n", b": ping\n\ndata: two\n\n", b"data: thr", b"ee\n\n")
STREAM = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS) + b"0\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n{...}\r\n"


@asynccontextmanager
async def serving(answer: Callable[[], Sequence[bytes]]) -> AsyncIterator[tuple[Client, list[bytes]]]:
    """Answer every request with these pieces; the second part lists the connections' first lines."""
    requests: list[bytes] = []
    handlers: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.current_task())
        requests.append(b"connection")
        while head := await reader.readline():
            requests.append(head)
            await reader.readuntil(b"\r\n\r\n{}")
            for piece in answer():
                writer.write(piece)
                await asyncio.sleep(0)
            if not answer():
                break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = Client(f"http://127.0.0.1:{port}")
    try:
        yield client, requests
    finally:
        client.close()
        server.close()
        await asyncio.wait(handlers)


async def ask(client: Client, timeout_s: float = 20) -> tuple[list[bytes], bytes]:
    events: list[bytes] = []
    rest = await client.post("/x", b"{}", lambda _at, data: events.append(data), timeout_s=timeout_s)
    return events, rest


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_a_stream_is_read_however_it_is_cut(size: int) -> None:
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    async with serving(lambda: pieces) as (client, requests):
        for _ in range(2):
            assert await ask(client) == ([b"one", b"two", b"three"], b"")
    assert requests == [b"connection", *[b"POST /x HTTP/1.1\r\n"] * 2]


@pytest.mark.parametrize("size", [1, 2, 1000])
async def test_events_are_read_however_a_server_writes_lines(size: int) -> None:
    events = b"data: one\r\n\r\n: ping\r\n\r\ndata:two\n\ndata:  three\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(events), events)
    pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
    async with serving(lambda: pieces) as (client, _):
        assert await ask(client) == ([b"one", b"two", b"three"], b"")


@pytest.mark.parametrize("size", [1, 1000])
async def test_a_plain_answer_is_returned(size: int) -> None:
    pieces = [WHOLE[at : at + size] for at in range(0, len(WHOLE), size)]
    async with serving(lambda: pieces) as (client, _):
        assert await ask(client) == ([], b"{...}\r\n")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"full", "full"),
        (b'{"error": {"message": "full", "type": "x"}}', "full"),
        (b'{"error": "full"}', '{"error": "full"}'),
        (b"[]", "[]"),
        (b"x" * 1000, "x" * 300),
    ],
)
async def test_a_status_is_an_error_with_its_message_or_the_body(body: bytes, said: str) -> None:
    answer = b"HTTP/1.1 429 Too Many\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    async with serving(lambda: [answer]) as (client, _):
        with pytest.raises(HttpError) as failed:
            await ask(client)
    assert str(failed.value) == f"status 429: {said}"


async def test_an_answer_cut_short_is_an_error() -> None:
    async with serving(list) as (client, _):
        with pytest.raises(HttpError, match="closed before"):
            await ask(client)


async def test_silence_is_an_error() -> None:
    async with serving(lambda: [HEAD]) as (client, requests):
        with pytest.raises(HttpError, match=r"within 0\.1 s"):
            await ask(client, timeout_s=0.1)
        with pytest.raises(HttpError, match=r"within 0\.1 s"):
            await ask(client, timeout_s=0.1)
    assert requests.count(b"connection") == 2


async def test_nobody_there_is_an_error() -> None:
    with pytest.raises(HttpError, match="cannot connect"):
        await ask(Client("http://127.0.0.1:1"))
    with pytest.raises(ValueError, match="no http://"):
        Client("ftp://x")


@pytest.mark.parametrize(("address", "host"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
async def test_host_key_and_path_are_sent(address: str, host: str) -> None:
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n{}"))
        writer.write(WHOLE)
        writer.close()

    server = await asyncio.start_server(serve, address, 0)
    place = f"{host}:{server.sockets[0].getsockname()[1]}"
    client = Client(f"http://{place}/behind/v1/", "sk-1")
    await ask(client)
    client.close()
    server.close()
    assert heads[0].startswith(b"POST /behind/x HTTP/1.1\r\n")
    assert b"\r\nHost: %b\r\n" % place.encode() in heads[0]
    assert b"\r\nAuthorization: Bearer sk-1\r\n" in heads[0]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nnot a header\r\n\r\n",
        HEAD + b"-5\r\n",
        HEAD + b"length\r\n",
    ],
)
async def test_what_is_no_answer_is_an_error_at_once(answer: bytes) -> None:
    async with serving(lambda: [answer]) as (client, _):
        with pytest.raises(HttpError, match="cannot be read"):
            await ask(client)
