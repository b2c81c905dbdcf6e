"""Sockets that pass from one process to another, by themselves and of a gateway before a scripted Triton."""

import asyncio
import os
import shutil
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gateway.errors import ListenError
from gateway.process import handover
from gateway.process.handover import Inherited, hand_over, notify, until_stopped
from gateway.process.listeners import bind_gateway
from tests.gateway.certificates import self_signed
from tests.gateway.serving import CHAT, MESSAGES, settings
from tests.gateway.triton.fake_triton import FakeTriton, accepted, finished, until
from tests.ports import free_ports
from tests.processes import Command, alive, wait_ended
from tests.replaceable import TRITONGATE, WITHIN_S, ReplaceableGateway

CLIENTS = 4
PAUSE_S = 0.02
"""Between two requests of one: what starts beside them needs a processor, too."""


def command(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Have this process be one that was started as `script`, of a shell."""
    program = folder / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(program), "an argument"])


@pytest.mark.filterwarnings("ignore:subprocess:ResourceWarning")  # it outlives this process
async def test_the_successor_has_the_sockets_as_systemd_passes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    script = (
        f'echo "$1 $(($LISTEN_PID == $$)) $LISTEN_FDS $LISTEN_FDNAMES" > {said}\n'
        f"readlink /proc/$$/fd/3 /proc/$$/fd/4 /proc/$$/fd/5 >> {said}\necho >&3; exec sleep 60"
    )
    command(monkeypatch, tmp_path, script)
    with (
        socket.socket() as first,
        socket.socket() as second,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        manager.bind(str(tmp_path / "manager"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "manager"))
        assert await hand_over([first, second])
        words, pipe, *sockets = said.read_text().splitlines()
        assert words == "an argument 1 3 ready:socket:socket"
        assert pipe.startswith("pipe:")
        assert sockets == [f"socket:[{os.fstat(each.fileno()).st_ino}]" for each in (first, second)]
        successor = psutil.Process(int(manager.recv(99).removeprefix(b"MAINPID=")))
    assert alive(successor)
    successor.kill()


@pytest.mark.parametrize(
    ("script", "reason"),
    [("exit 3", "the successor ended"), ("exec sleep 60", "the successor was not ready in time")],
)
async def test_a_successor_that_is_not_ready(
    script: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(handover, "READY_WITHIN_S", 1.0 if "sleep" in script else 60.0)
    command(monkeypatch, tmp_path, script)
    before = set(psutil.Process().children())
    assert not await hand_over([])
    assert f"not handed over: {reason}" in caplog.text
    assert set(psutil.Process().children()) <= before


async def test_a_successor_that_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_before = psutil.Process().num_fds()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert not await hand_over([])
    assert "could not be started" in caplog.text
    assert psutil.Process().num_fds() == open_before


async def test_the_first_process_of_a_container_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command(monkeypatch, tmp_path, "echo >&3")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert not await hand_over([])


async def test_a_signal_while_the_successor_starts_ends_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command(monkeypatch, tmp_path, f"touch {tmp_path / 'begun'}; exec sleep 60")
    signals: asyncio.Queue[int] = asyncio.Queue()
    before = set(psutil.Process().children())
    waiting = asyncio.create_task(until_stopped(signals, lambda: hand_over([])))
    signals.put_nowait(signal.SIGUSR2)
    await until((tmp_path / "begun").exists, within_s=WITHIN_S)
    signals.put_nowait(signal.SIGUSR2)  # is under way
    signals.put_nowait(signal.SIGTERM)
    assert not await waiting
    assert set(psutil.Process().children()) <= before


async def test_a_signal_as_the_successor_fails_is_not_lost() -> None:
    async def fails() -> bool:
        return False

    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signals.put_nowait(number)
    async with asyncio.timeout(5):
        assert not await until_stopped(signals, fails)


async def test_one_that_has_failed_may_be_tried_again() -> None:
    signals: asyncio.Queue[int] = asyncio.Queue()
    results = iter([False, True])

    async def leave() -> bool:
        return next(results)

    stopped = asyncio.create_task(until_stopped(signals, leave))
    for _ in range(2):
        signals.put_nowait(signal.SIGUSR2)
        await until(signals.empty)
        await asyncio.sleep(0.05)
    assert await stopped


def test_sockets_are_taken_by_their_address(caplog: pytest.LogCaptureFixture) -> None:
    ports = free_ports(2)
    named = {"port": ports[0], "kserve_http_port": ports[1], "kserve_grpc_port": 0}
    (before,) = bind_gateway(settings(**named, workers=1))
    assert before.reserved is not None
    grpc_port = before.reserved.getsockname()[1]
    inherited = Inherited([*before.http, before.http[0].dup(), before.reserved], ready=0)
    listeners = bind_gateway(settings(port=ports[0], kserve_grpc_port=grpc_port, workers=2), inherited)
    assert [each.http for each in listeners] == [listeners[0].http] * 2
    assert listeners[0].http[0].getsockname() == ("127.0.0.1", ports[0])
    assert listeners[0].reserved is before.reserved
    assert all(each.shared and not each.unheld for each in listeners)
    assert "an inherited socket is not used" in caplog.text
    assert before.http[1].fileno() == -1
    with pytest.raises(ListenError, match="cannot be taken over"):
        bind_gateway(settings(), inherited)
    for each in listeners:
        each.close()


def test_fewer_processes_have_several_sockets_each() -> None:
    before = bind_gateway(settings(port=free_ports(1)[0], workers=3))
    sockets = [each.http[0] for each in before]
    port = sockets[0].getsockname()[1]
    after = bind_gateway(settings(port=port, workers=2), Inherited(sockets))
    assert [len(each.http) for each in after] == [2, 1]
    assert {each.fileno() for own in after for each in own.http} == {each.fileno() for each in sockets}
    assert not any(each.shared for each in after)
    for each in after:
        each.close()


def test_variables_for_another_process_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", "1")
    monkeypatch.setenv("LISTEN_FDS", "1")
    inherited = Inherited.from_environment()
    assert not inherited.succeeds
    assert "LISTEN_FDS" not in os.environ


def test_readiness_is_told_to_whoever_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"tritongate-test-{os.getpid()}"
        manager.bind(f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        reading, writing = os.pipe()
        os.close(reading)  # the process before has ended
        Inherited(ready=writing).tell_ready()
        assert manager.recv(99) == b"READY=1"
    assert not caplog.text
    notify("READY=1")
    assert "could not be told" in caplog.text


@dataclass
class Asking:
    """Clients that ask almost without a pause, each over one connection, or each time over a new one."""

    url: str
    verify: ssl.SSLContext
    statuses: list[object] = field(default_factory=list)
    """What they got: a status, or how the connection failed."""
    over: bool = False

    async def client(self, *, keeps: bool) -> None:
        body = {"model": "m", "messages": MESSAGES, "stream": keeps}
        while not self.over:
            async with httpx.AsyncClient(base_url=self.url, timeout=WITHIN_S, verify=self.verify) as http:
                try:
                    self.statuses.append((await http.post(CHAT, json=body)).status_code)
                    while keeps and not self.over:
                        await asyncio.sleep(PAUSE_S)
                        self.statuses.append((await http.post(CHAT, json=body)).status_code)
                except httpx.TransportError as error:
                    self.statuses.append(repr(error))
            await asyncio.sleep(PAUSE_S)

    async def more(self) -> None:
        """Wait for some more answers."""
        count = len(self.statuses) + 2 * CLIENTS
        await until(lambda: len(self.statuses) >= count, within_s=WITHIN_S)


@pytest.mark.parametrize("tls", [False, True])
async def test_each_successor_may_have_another_number_of_workers(
    triton: FakeTriton, tmp_path: Path, tls: bool
) -> None:
    (port,) = free_ports(1)
    settings: dict[str, Any] = {"upstreams": [triton.address], "port": port}
    url, verify = f"http://127.0.0.1:{port}", ssl.create_default_context()
    if tls:
        files = self_signed(tmp_path, "own")
        settings |= {"tls_cert": files.cert, "tls_key": files.key}
        url, verify = f"https://127.0.0.1:{port}", ssl.create_default_context(cafile=files.cert)
    gateway = await asyncio.to_thread(ReplaceableGateway, tmp_path / "config.yaml", settings)
    load = Asking(url, verify)
    with gateway:
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(load.client(keeps=number % 2 == 0))
            left = []
            await load.more()
            for workers in (2, 3, 1) if not tls else (2,):
                gateway.configure({"workers": workers})
                left += await gateway.replace()
                assert len(gateway.workers()) == (workers if workers > 1 else 0)
                await load.more()
            # Also those whose clients keep asking over the same connection.
            assert not await asyncio.to_thread(wait_ended, left, WITHIN_S)
            load.over = True
        assert set(load.statuses) == {200}


@asynccontextmanager
async def replaced_in_an_answer(
    triton: FakeTriton, folder: Path
) -> AsyncIterator[tuple[ReplaceableGateway, list[psutil.Process], Callable[[], Awaitable[int]]]]:
    """A gateway in the place of others that have an answer to end; yields what ends it, with its status."""
    go_on = asyncio.Event()

    async def answer(_request: Any, _context: Any) -> AsyncIterator[Any]:
        yield accepted()
        await go_on.wait()
        yield finished("end", 1)

    (port,) = free_ports(1)
    # The answer shows no sign of life while the gateways change, however long a busy machine takes for that.
    settings = {"upstreams": [triton.address], "port": port, "drain_s": 100, "idle_timeout_s": 100}
    gateway = await asyncio.to_thread(ReplaceableGateway, folder / "config.yaml", settings)
    with gateway:
        triton.model.answer = answer
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WITHIN_S) as http:
            asked = asyncio.create_task(http.post(CHAT, json={"model": "m", "messages": MESSAGES}))
            await until(lambda: len(triton.requests) == 1, within_s=WITHIN_S)

            async def end() -> int:
                go_on.set()
                return (await asked).status_code

            yield gateway, await gateway.replace(), end


async def test_a_gateway_ends_with_its_last_answer(triton: FakeTriton, tmp_path: Path) -> None:
    async with replaced_in_an_answer(triton, tmp_path) as (_, before, end):
        await asyncio.sleep(2)
        assert alive(before[0])
        assert await end() == 200
        assert not await asyncio.to_thread(wait_ended, before, WITHIN_S)


async def test_one_that_is_stopped_does_not_end_before_it(triton: FakeTriton, tmp_path: Path) -> None:
    """A service manager kills whatever is left when the process that it knows has ended."""
    async with replaced_in_an_answer(triton, tmp_path) as (gateway, before, end):
        gateway.main.terminate()
        await gateway.until(lambda: gateway.said("draining") == 1)
        await asyncio.sleep(2)
        assert alive(gateway.main)
        assert await end() == 200
        assert not await asyncio.to_thread(wait_ended, [*before, gateway.main], WITHIN_S)


async def test_a_successor_accepts_nothing_before_it_is_ready(triton: FakeTriton, tmp_path: Path) -> None:
    """Its Triton is not there: the gateway goes on, and ends both when it is told to."""
    ports = free_ports(2)
    settings: dict[str, Any] = {"upstreams": [triton.address], "port": ports[0]}
    gateway = await asyncio.to_thread(ReplaceableGateway, tmp_path / "config.yaml", settings)
    with gateway:
        gateway.configure({"upstreams": [f"127.0.0.1:{ports[1]}"], "workers": 2})
        gateway.main.send_signal(signal.SIGUSR2)
        await gateway.until(lambda: len(gateway.main.children(recursive=True)) == 3)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}", timeout=WITHIN_S) as http:
            for _ in range(100):
                asked = await http.get("/health/ready", headers={"Connection": "close"})
                assert asked.status_code == 200
                await asyncio.sleep(0.05)
        assert len(gateway.main.children(recursive=True)) == 3
        assert await asyncio.to_thread(gateway.stop) == 0  # and that none is left


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="systemd is not installed")
async def test_sockets_of_systemd_are_taken(triton: FakeTriton) -> None:
    (port,) = free_ports(1)
    serve = (TRITONGATE, "serve", "--port", port, "--upstreams", triton.address, "--workers", "2")
    variables = ("-E", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}")
    with Command("systemd-socket-activate", "-l", f"127.0.0.1:{port}", *variables, *serve) as started:
        await until(lambda: "Listening on" in started.output, within_s=WITHIN_S)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WITHIN_S) as http:
            asked = await http.post(CHAT, json={"model": "m", "messages": MESSAGES})
            assert asked.status_code == 200, started.output
        assert await asyncio.to_thread(started.stop) == 0
