import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from gateway.http import protocol
from gateway.limits import admission
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import CHAT, MESSAGES, Served, on_socket, until


async def record(served: Served, *pieces: bytes, pause_s: float = 0.0) -> tuple[bytes, bytes]:
    """Send raw bytes; return the head and the body of all that comes back until the close."""
    reader, writer = await asyncio.open_connection(served.http.base_url.host, served.http.base_url.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(20):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    except ConnectionError:
        head, body = b"", b""
    finally:
        writer.close()
    return head, body


async def test_what_is_no_http_is_told_so_in_the_one_error_shape() -> None:
    async with on_socket(FakeUpstream()) as served:
        head, body = await record(served, b"\x16\x03\x01 what\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_endless_headers_are_refused() -> None:
    line = b"X-Filler: " + b"x" * 1000 + b"\r\n"
    async with on_socket(FakeUpstream()) as served:
        head, body = await record(
            served, b"GET /health HTTP/1.1\r\nHost: localhost\r\n", *[line] * 70, pause_s=0.001
        )
        assert head.startswith(b"HTTP/1.1 431 ")
        assert set(json.loads(body)) == {"error"}
        assert (await served.chat()).status_code == 200


async def test_one_endless_header_is_refused_too() -> None:
    async with on_socket(FakeUpstream()) as served:
        pieces = [b"GET /health HTTP/1.1\r\nX-Filler: ", *[b"x" * 4000] * 20]
        head, _ = await record(served, *pieces, pause_s=0.001)
        assert head.startswith(b"HTTP/1.1 431 ")


async def test_what_is_refused_before_it_is_a_request_has_a_line_and_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(protocol, "HEAD_LIMIT_BYTES", 1000)
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    caplog.set_level("INFO")
    begun = b"GET /health HTTP/1.1\r\nX-Filler: "
    cases = ((b"no request\r\n\r\n", 400), (begun + b"x" * 1000, 431), (begun, 408))
    async with on_socket(FakeUpstream()) as served:
        for sent, status in cases:
            head, _ = await record(served, sent)
            assert head.startswith(b"HTTP/1.1 %d " % status)
            (line,) = (each for each in caplog.records if getattr(each, "status", None) == status)
            told = vars(line)
            assert (told["client"], told["route"]) == ("127.0.0.1", "unknown")
            assert f"x-request-id: {told['request_id']}".encode() in head
            labels = {"route": "unknown", "model": "unknown", "status": str(status)}
            assert served.metric("requests_total", **labels) == 1
        assert not [
            each for each in caplog.records if each.levelname == "WARNING"
        ]  # uvicorn's, without client


async def test_a_body_does_not_count_as_headers() -> None:
    async with on_socket(FakeUpstream()) as served:
        answer = await served.chat(user="u" * (2 * protocol.HEAD_LIMIT_BYTES))
        assert answer.status_code == 200


async def test_nor_does_what_came_before_it_in_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that is read may have the end of a body, or whole requests, and a head that is not complete."""
    monkeypatch.setattr(protocol, "HEAD_LIMIT_BYTES", 1000)
    body = json.dumps({"model": "glm", "prompt": "u" * 2000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    asked = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with on_socket(FakeUpstream()) as served:
        _, answers = await record(
            served,
            asked + b"GET /health HTTP/1.1\r\nHost: loca",
            b"lhost\r\nConnection: close\r\n\r\n",
            pause_s=0.2,
        )
        assert answers.count(b"HTTP/1.1 200 ") == 1
        assert b"HTTP/1.1 431 " not in answers


async def test_slow_headers_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.3)
    async with on_socket(FakeUpstream()) as served:
        head, _ = await record(served, b"GET /health HTTP/1.1\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert await record(served) == (b"", b""), "a connection that says nothing is closed without a word"


async def test_a_later_request_on_the_connection_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.3)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with on_socket(FakeUpstream()) as served:
        head, body = await record(served, request, request, b"GET /hea", pause_s=0.5)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert body.count(b"HTTP/1.1 200 ") == 1
        assert b"HTTP/1.1 408 " in body


async def test_http_1_0_gets_its_stream_without_chunks() -> None:
    body = json.dumps({"model": "glm", "messages": MESSAGES, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    async with on_socket(FakeUpstream()) as served:
        # The connection's end is the body's.
        answered, stream = await record(served, head.encode() + body)
        assert answered.startswith(b"HTTP/1.1 200 ")
        assert b"transfer-encoding" not in answered.lower()
        assert answered.lower().count(b"\r\nconnection:") == answered.lower().count(b"connection: close") == 1
        events = stream.decode().split("\r\n\r\n" if b"\r\n" in stream else "\n\n")
        assert events[-1] == ""
        assert all(event.startswith("data: ") for event in events[:-1])
        assert events[-2] == "data: [DONE]"
        answered, whole = await record(served, b"GET /version HTTP/1.0\r\n\r\n")
        assert f"content-length: {len(whole)}".encode() in answered.lower()
        answered, nothing = await record(served, b"HEAD /version HTTP/1.0\r\n\r\n")
        assert answered.startswith(b"HTTP/1.1 200 ")
        assert nothing == b""


UPGRADE = b"Connection: %s, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
"""As Java's HTTP client says it with every request by plain HTTP."""


def asked_by_java(*, chunked: bool, connection: bytes = b"Upgrade") -> tuple[bytes, bytes]:
    """Head and body of a chat."""
    body = json.dumps({"model": "glm", "messages": MESSAGES}).encode()
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    head = b"POST %b HTTP/1.1\r\n" % CHAT.encode() + UPGRADE % connection + length
    head += b"\r\nHost: localhost\r\nContent-Type: application/json\r\n\r\n"
    return head, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body


@pytest.mark.parametrize("chunked", [False, True])
async def test_whoever_asks_for_another_protocol_is_answered_in_this_one(
    chunked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    head, body = asked_by_java(chunked=chunked)
    last, _ = asked_by_java(chunked=chunked, connection=b"Upgrade, close")
    within = head.index(b"Upgrade: h2c") + 4
    async with on_socket(FakeUpstream()) as served:
        for pieces in (
            [last + body],
            [last, body],
            [last[:within], last[within:], body[:5], body[5:]],
            [head, body, last, body],
            [head + body + head + body[:5], body[5:] + last + body],
        ):
            asked = b"".join(pieces).count(b"POST ")
            answered, rest = await record(served, *pieces, pause_s=0.05)
            answers = answered + rest
            assert answers.count(b"HTTP/1.1 200 OK") == answers.count(b"HTTP/1.1 ") == asked, pieces
        web_socket = (
            b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade%b\r\nUpgrade: websocket\r\n\r\n"
        )
        for path, status in ((b"/health", b"200"), (CHAT.encode(), b"405"), (b"/v1/realtime", b"404")):
            answered, _ = await record(served, web_socket % (path, b", close"))
            assert answered.startswith(b"HTTP/1.1 %b " % status)
        answered, _ = await record(served, b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: elsewhere\r\n\r\n")
        assert answered.startswith(b"HTTP/1.1 400 ")
    assert "pgrade" not in caplog.text


def ask_and_never_read(served: Served, **parameters: object) -> socket.socket:
    """Ask for a chat; whatever comes stays in the kernel's small buffer."""
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    deaf.connect((served.http.base_url.host, served.http.base_url.port))
    body = json.dumps({"model": "glm", "messages": MESSAGES, **parameters}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return deaf


@pytest.mark.parametrize("stream", [True, False])
async def test_clients_that_never_read_leave_their_places_to_others(stream: bool) -> None:
    upstream = FakeUpstream(lambda _: say(*["x" * 100_000] * 80))
    async with on_socket(upstream, send_timeout_s=1, max_connections=10) as served:
        assert served.server is not None
        connections = served.server.server_state.connections
        deaf = [ask_and_never_read(served, stream=stream) for _ in range(10)]
        await until(lambda: len(upstream.requests) == 10 and len(connections) == 10)
        await until(lambda: not connections)
        assert (await served.chat()).status_code == 200
        for each in deaf:
            each.close()


async def test_tls_on_the_plain_port_is_named_in_the_log_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(protocol.BoundedHttpProtocol, "_tls_seen", False)
    async with on_socket(FakeUpstream()) as served:
        await record(served, b"\x00\x01 garbage\r\n\r\n")
        assert "TLS" not in caplog.text
        for _ in range(3):
            await record(served, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64)))
        assert caplog.text.count("speaks TLS") == 1
        assert (await served.chat()).status_code == 200


ASK = b"%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


async def test_connections_are_bounded_and_health_is_answered_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_SPARE_CONNECTIONS", 1)
    async with on_socket(FakeUpstream(), max_connections=2) as served:
        url = served.http.base_url
        idle = [await asyncio.open_connection(url.host, url.port) for _ in range(2)]
        for path in (b"/health", b"/health/ready", b"/metrics", b"/v2/health/ready"):
            assert (await record(served, ASK % (b"GET", path)))[0].startswith(b"HTTP/1.1 200 "), path
        for method, path in ((b"POST", CHAT.encode()), (b"GET", b"/v1/models"), (b"GET", b"/")):
            head, body = await record(served, ASK % (method, path))
            assert head.startswith(b"HTTP/1.1 503 "), path
            assert b"retry-after: 1" in head.lower()
            assert b"connection: close" in head.lower()
            assert json.loads(body)["error"]["code"] == "service_unavailable"
        assert served.metric("requests_rejected_total", model="unknown", reason="connections") == 3
        idle.append(await asyncio.open_connection(url.host, url.port))
        assert await record(served, ASK % (b"GET", b"/health")) == (b"", b""), "closed without a word"
        for _, writer in idle:
            writer.close()
        assert served.server is not None
        connections = served.server.server_state.connections
        await until(lambda: not connections)
        assert (await served.chat()).status_code == 200


async def test_a_connection_beyond_the_bound_has_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SPARE_HEAD_TIMEOUT_S", 0.3)
    async with on_socket(FakeUpstream(), max_connections=1) as served:
        idle = await asyncio.open_connection(served.http.base_url.host, served.http.base_url.port)
        assert await record(served) == (b"", b"")
        assert not idle[0].at_eof()
        idle[1].close()


GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass
class Kept:
    """A connection that lasts."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, request: bytes = GET) -> bytes:
        """Return the status line."""
        self.writer.write(request)
        async with asyncio.timeout(20):
            head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
            length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await self.reader.readexactly(int(length))
        return head.partition(b"\r\n")[0]

    async def ended(self) -> bool:
        async with asyncio.timeout(20):
            return not await self.reader.read()


@asynccontextmanager
async def kept(served: Served) -> AsyncIterator[Kept]:
    one = Kept(*await asyncio.open_connection(served.http.base_url.host, served.http.base_url.port))
    yield one
    one.writer.close()


async def test_at_the_bound_whoever_is_idle_makes_room() -> None:
    async with (
        on_socket(FakeUpstream(), max_connections=2) as served,
        kept(served) as first,
        kept(served) as second,
    ):
        assert b" 200 " in await second.ask()
        assert b" 200 " in await first.ask()
        assert b" 200 " in await second.ask()
        async with kept(served) as third:
            assert b" 200 " in await third.ask()
            assert await first.ended(), "it was idle for longest"
            second.writer.write(GET[:10])
            third.writer.write(GET[:10])
            await asyncio.sleep(0.2)
            async with kept(served) as late:
                assert b" 503 " in await late.ask(), "nobody is idle"
            assert b" 200 " in await second.ask(GET[10:])
            assert b" 200 " in await third.ask(GET[10:])


async def test_a_connection_beyond_the_bound_ends_with_its_answer() -> None:
    async with on_socket(FakeUpstream(), max_connections=1) as served, kept(served), kept(served) as prober:
        assert b" 200 " in await prober.ask(GET.replace(b"/v1/models", b"/health"))
        assert await prober.ended()


async def test_a_body_that_comes_after_its_answer_keeps_nothing_open() -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    async with on_socket(FakeUpstream(), max_in_flight=1, max_waiting=0, idle_connection_s=0.5) as served:
        await served.gateway.admission.acquire()
        async with kept(served) as early:
            assert b" 429 " in await early.ask(f"{head}Content-Type: application/json\r\n\r\n".encode())
            early.writer.write(b"too l")
            assert await early.ended()
        served.gateway.admission.release()
