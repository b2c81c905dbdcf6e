import asyncio
import signal
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import uvicorn
from sse_starlette.sse import AppStatus

from gateway.app import create_app
from gateway.http.sse import EventStream, frame
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import settings, until


class Client:
    """One HTTP client as ASGI sees it; `stuck` lets it stop reading, `leave` hangs up."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.leave = asyncio.Event()
        self.gone = 0

    async def receive(self) -> Any:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message)

    def on_gone(self) -> None:
        self.gone += 1

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def ended(self) -> bool:
        return self.sent[-1].get("more_body") is False

    async def run(
        self, events: AsyncGenerator[bytes, None], *, ping: float = 60, send_timeout: float = 60
    ) -> None:
        stream = EventStream(events, on_gone=self.on_gone, ping_interval_s=ping, send_timeout_s=send_timeout)
        await asyncio.wait_for(stream({"type": "http", "method": "POST"}, self.receive, self.send), 20)


def left_beside() -> list[str]:
    """Return the tasks beside the test's own and the one that sse-starlette has for all streams of a loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    names = [task.get_coro().__name__ for task in others]
    assert names.count("_shutdown_watcher") <= 1
    return [name for name in names if name != "_shutdown_watcher"]


class Events:
    """A stream that says when it was closed."""

    def __init__(self, *data: bytes, hold: asyncio.Event | None = None) -> None:
        self.closed = False
        self.data = data
        self.hold = hold

    async def run(self) -> AsyncGenerator[bytes, None]:
        try:
            for piece in self.data:
                yield piece
            if self.hold is not None:
                await self.hold.wait()
        finally:
            self.closed = True


async def test_a_stream_is_its_head_its_events_and_an_end() -> None:
    client, events = Client(), Events(frame([b"1"]), frame([b"2", b"3"]))
    await client.run(events.run())
    head = client.sent[0]
    headers = dict(head["headers"])
    assert head["status"] == 200
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-store"
    assert headers[b"x-accel-buffering"] == b"no"
    assert b"content-length" not in headers
    assert client.body == b"data: 1\n\ndata: 2\n\ndata: 3\n\n"
    assert client.ended
    assert client.gone == 0
    assert not left_beside()


async def test_comments_keep_a_quiet_stream_open_and_end_with_it() -> None:
    client, hold = Client(), asyncio.Event()
    running = asyncio.create_task(client.run(Events(b"data: 1\n\n", hold=hold).run(), ping=0.02))
    await until(lambda: client.body.count(b": ping\n\n") >= 3)
    hold.set()
    await running
    assert client.ended
    count = len(client.sent)
    await asyncio.sleep(0.1)
    assert len(client.sent) == count


async def test_a_client_that_hangs_up_is_told_of_once() -> None:
    client, hold = Client(), asyncio.Event()
    running = asyncio.create_task(client.run(Events(b"data: 1\n\n", hold=hold).run()))
    await until(lambda: bool(client.body))
    client.leave.set()
    for _ in range(3):  # turns of the loop: at once, not at the next look
        await asyncio.sleep(0)
    assert client.gone == 1
    hold.set()  # as a running does that was ended
    await running
    assert client.gone == 1


@pytest.mark.parametrize("what", ["a piece", "a ping"])
async def test_a_client_that_does_not_read_is_gone_and_its_events_are_closed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, hold = Client(), asyncio.Event()
    pieces = [b"data: 1\n\n"] if what == "a ping" else [b"data: 1\n\n", b"data: 2\n\n"]
    events = Events(*pieces, hold=hold)
    original = client.send

    async def send(message: Any) -> None:
        await original(message)
        if message.get("body") == pieces[0]:
            client.reads.clear()

    monkeypatch.setattr(client, "send", send)
    await client.run(events.run(), ping=0.05 if what == "a ping" else 60, send_timeout=0.3)
    assert client.gone == 1
    assert events.closed
    assert client.body == pieces[0]
    assert not client.ended
    assert not left_beside()


async def test_a_client_that_reads_slowly_but_reads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    original = client.send

    async def send(message: Any) -> None:
        await asyncio.sleep(0.1)
        await original(message)

    monkeypatch.setattr(client, "send", send)
    await client.run(Events(*[b"data: x\n\n"] * 8).run(), send_timeout=0.4)
    assert client.gone == 0
    assert client.ended


async def test_cancelling_the_stream_closes_its_events() -> None:
    client, events = Client(), Events(b"data: 1\n\n", hold=asyncio.Event())
    running = asyncio.create_task(client.run(events.run()))
    await until(lambda: bool(client.body))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert events.closed
    assert client.gone == 0


async def test_after_a_hang_up_the_events_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they release then takes a moment, and nothing cancels it."""
    client, gone = Client(), asyncio.Event()
    released = False

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal released
        yield b"data: 1\n\n"
        await gone.wait()
        for _ in range(5):
            await asyncio.sleep(0.01)
        released = True

    monkeypatch.setattr(client, "on_gone", gone.set)
    running = asyncio.create_task(client.run(events()))
    await until(lambda: bool(client.body))
    client.leave.set()
    await running
    assert released
    assert not left_beside()


async def test_a_servers_shutdown_does_not_cut_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself, sse-starlette would: a drain is what ends streams here."""
    monkeypatch.setattr(AppStatus, "enable_automatic_graceful_drain", True)
    monkeypatch.setattr(AppStatus, "should_exit", False)
    create_app(settings(), FakeUpstream())
    server = uvicorn.Server(uvicorn.Config("nowhere"))
    before = signal.signal(signal.SIGTERM, server.handle_exit)
    try:
        client, hold = Client(), asyncio.Event()
        running = asyncio.create_task(client.run(Events(b"data: 1\n\n", hold=hold).run()))
        await until(lambda: bool(client.body))
        server.handle_exit(signal.SIGTERM, None)
        assert server.should_exit
        await asyncio.sleep(0.8)  # it looks every half a second
        assert not running.done()
        hold.set()
        await running
        assert client.ended
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_a_chunk_has_no_timer_and_no_task_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    made = 0

    def counted(name: str) -> None:
        original = getattr(loop, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal made
            made += 1
            return original(*arguments, **keywords)

        monkeypatch.setattr(loop, name, call)

    counted("call_at")
    counted("create_task")
    costs = []
    for chunks in (1, 1, 50):  # a loop's first stream starts what all of its streams share
        made = 0
        await Client().run(Events(*[b"data: x\n\n"] * chunks).run())
        costs.append(made)
    assert costs[1] > 0, "the watch of the whole stream is counted"
    assert costs[1] == costs[2]


async def test_chunks_pass_middleware_by_but_their_head_does_not() -> None:
    client, server = Client(), Client()
    stream = EventStream(
        Events(b"data: 1\n\n").run(),
        on_gone=client.on_gone,
        ping_interval_s=60,
        send_timeout_s=60,
        send_body=server.send,
    )
    await stream({"type": "http", "method": "POST"}, client.receive, client.send)
    assert [message["type"] for message in client.sent] == ["http.response.start", "http.response.body"]
    assert client.ended
    assert (client.body, server.body) == (b"", b"data: 1\n\n")
