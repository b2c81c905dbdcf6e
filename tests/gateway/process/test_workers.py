"""Several processes on one port, before a scripted Triton."""

import asyncio
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import psutil
import pytest
from tritonclient.grpc import service_pb2_grpc

from gateway.http.tls import Certificate
from gateway.process import workers
from gateway.process.listeners import base_url, bind_gateway
from gateway.settings import load_settings
from gateway.telemetry import metrics as worker_metrics
from tests.gateway.certificates import self_signed
from tests.gateway.kserve.legacy import body, question
from tests.gateway.process.two_workers import STARTED_S, TRITONGATE, Gateway, gateway_of_two, is_whole, stream
from tests.gateway.serving import CHAT, MESSAGES
from tests.gateway.triton.fake_triton import FakeTriton, accepted, finished, reply, until
from tests.ports import free_ports
from tests.processes import wait_ended
from tests.tied import tied
from wire.meta import Meta

CLIENTS = 24


class Held:
    """Answers that begin, and end when told to."""

    def __init__(self) -> None:
        self.begun = 0
        self.go_on = asyncio.Event()

    async def answer(self, _request: Any, _context: Any) -> AsyncIterator[Any]:
        self.begun += 1
        yield accepted()
        await self.go_on.wait()
        yield finished("end", 1)


@pytest.fixture
async def gateway(triton: FakeTriton, tmp_path: Path, request: Any) -> AsyncIterator[Gateway]:
    async with gateway_of_two(triton, tmp_path, getattr(request, "param", {})) as gateway:
        yield gateway


@pytest.fixture
def place() -> Iterator[worker_metrics.Place]:
    with workers.new_places(1) as (place,):
        yield place


KSERVE_PORTS = free_ports(2)


@pytest.mark.parametrize(
    "gateway",
    [{"--kserve-http-port": KSERVE_PORTS[0], "--kserve-grpc-port": KSERVE_PORTS[1]}],
    indirect=True,
)
async def test_both_serve_also_clients_of_triton_and_each_tells_of_both(gateway: Gateway) -> None:
    answers = await asyncio.gather(*(stream(gateway.url) for _ in range(CLIENTS)))
    assert all(map(is_whole, answers))
    served = await gateway.series("tritongate_requests_total")
    assert sorted(served) == ["0", "1"]
    assert sum(served.values()) >= CLIENTS

    async def ask_over_grpc() -> bool:
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        address = f"127.0.0.1:{KSERVE_PORTS[1]}"
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            answer = await stub.ModelInfer(question("m"), timeout=60)
            return b"Hello" in answer.raw_output_contents[0]

    async def ask_over_http() -> bool:
        async with httpx.AsyncClient(timeout=60) as http:
            url = f"http://127.0.0.1:{KSERVE_PORTS[0]}/v2/models/m/infer"
            return "Hello" in (await http.post(url, json=body())).text

    for ask in (ask_over_grpc, ask_over_http):
        assert all(await asyncio.gather(*(ask() for _ in range(CLIENTS))))
    served = await gateway.series("tritongate_requests_total")
    assert sum(served.values()) >= 3 * CLIENTS
    for route in ("ModelInfer", "/v2/models/{model:path}/infer"):
        served = await gateway.series(f'tritongate_requests_total(?={{[^}}]*{re.escape(route)}"?)')
        assert sorted(served) == ["0", "1"], route


ONE_OF_TWO = """
import os, pathlib, socket, sys, time
folder = pathlib.Path(__file__).parent
if "gateway.process.workers" in sys.orig_argv:
    mine = set()
    for number in range(3, 40):
        link = f"/proc/self/fd/{number}"
        if os.path.islink(link) and os.readlink(link).startswith("socket"):
            if socket.socket(fileno=os.dup(number)).family == socket.AF_INET:
                mine.add(os.readlink(link))
    (folder / str(os.getpid())).write_text("\\n".join(mine))
    try:
        os.link(folder / str(os.getpid()), folder / "first")
    except FileExistsError:
        pass
    if mine & set((folder / "first").read_text().split()):
        ACTION
"""
"""A `sitecustomize` in which one of the workers, known by its listener, does something before it imports."""


async def test_it_is_ready_once_each_process_is(triton: FakeTriton, tmp_path: Path) -> None:
    waits = "while not (folder / 'go_on').exists(): time.sleep(0.05)"
    (tmp_path / "sitecustomize.py").write_text(ONE_OF_TWO.replace("ACTION", waits))
    async with gateway_of_two(triton, tmp_path, {}, wait=False) as gateway:
        async with asyncio.timeout(STARTED_S):
            text = ""
            while "other processes of this gateway are starting" not in text:
                text = (await gateway.readiness())[1]
        assert {(await gateway.readiness())[0] for _ in range(4)} <= {0, 503}
        (tmp_path / "go_on").touch()
        await gateway.wait_ready()
        assert await gateway.all_serve()
        assert all(map(is_whole, await asyncio.gather(*(stream(gateway.url) for _ in range(CLIENTS)))))


async def test_it_does_not_wait_for_one_that_ends_again_and_again(triton: FakeTriton, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ONE_OF_TWO.replace("ACTION", "os._exit(1)"))
    async with gateway_of_two(triton, tmp_path, {}) as gateway:
        assert all(map(is_whole, await asyncio.gather(*(stream(gateway.url) for _ in range(CLIENTS)))))
        assert (tmp_path / "log").read_text().count("a worker ended") >= 2


async def test_a_killed_worker_takes_its_own_streams_along_and_is_replaced(
    gateway: Gateway, triton: FakeTriton
) -> None:
    """Clients who come before its replacement wait for it."""
    killed = asyncio.Event()
    begun = 0

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        nonlocal begun
        begun += 1
        yield accepted()
        yield reply("Hel", Meta(tokens=1))
        await killed.wait()
        yield finished("lo", 1)

    triton.model.answer = answer
    before = gateway.workers()
    streams = [asyncio.create_task(stream(gateway.url)) for _ in range(CLIENTS)]
    await until(lambda: begun == CLIENTS, within_s=60)
    victim = next(iter(before))
    before[victim].kill()
    await until(triton.cancelled.is_set)  # its requests are given up
    killed.set()
    texts = await asyncio.gather(*streams)
    assert 0 < sum(map(is_whole, texts)) < CLIENTS
    await gateway.wait_serving()
    assert len(gateway.workers()) == 2
    assert victim not in gateway.workers()
    assert all(map(is_whole, await asyncio.gather(*(stream(gateway.url) for _ in range(CLIENTS)))))
    next(iter(gateway.workers().values())).kill()
    assert all(map(is_whole, await asyncio.gather(*(stream(gateway.url) for _ in range(CLIENTS)))))


@pytest.mark.parametrize("gateway", [{"--max-in-flight": CLIENTS, "--max-waiting": 0}], indirect=True)
async def test_limits_hold_for_all_together(gateway: Gateway, triton: FakeTriton) -> None:
    held = Held()

    async def status() -> int:
        body = {"model": "m", "messages": MESSAGES, "stream": True}
        async with (
            httpx.AsyncClient(timeout=60) as http,
            http.stream("POST", gateway.url + CHAT, json=body) as refused,
        ):
            if refused.status_code == 429:
                message = json.loads(await refused.aread())["error"]["message"]
                assert "0 requests wait" in message
            return refused.status_code

    triton.model.answer = held.answer
    # The kernel hardly ever divides them evenly, and nobody waits: each takes what it needs of the whole.
    streams = [asyncio.create_task(stream(gateway.url)) for _ in range(CLIENTS)]
    await until(lambda: held.begun == CLIENTS, within_s=60)
    assert [await status() for _ in range(4)] == [429] * 4
    next(iter(gateway.workers().values())).kill()
    async with asyncio.timeout(60):
        while await status() == 429:  # noqa: ASYNC110 - until what the killed one held is free
            await asyncio.sleep(0.05)
    held.go_on.set()
    assert 0 < sum(map(is_whole, await asyncio.gather(*streams))) < CLIENTS


async def test_one_that_cannot_be_replaced_leaves_all_connections_to_the_others(
    gateway: Gateway, tmp_path: Path
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('broken by now')")
    next(iter(gateway.workers().values())).kill()
    await until(lambda: (tmp_path / "log").read_text().count("a worker ended") >= 2, within_s=STARTED_S)
    async with asyncio.timeout(STARTED_S):
        answers = await asyncio.gather(*(stream(gateway.url) for _ in range(CLIENTS)))
    assert all(map(is_whole, answers))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to_all", [False, True])
async def test_a_signal_lets_running_requests_of_all_end(
    gateway: Gateway, triton: FakeTriton, tmp_path: Path, number: signal.Signals, *, to_all: bool
) -> None:
    """Also one that each process gets, as a terminal or systemd sends it."""
    held = Held()
    triton.model.answer = held.answer
    streams = [asyncio.create_task(stream(gateway.url)) for _ in range(CLIENTS)]
    await until(lambda: held.begun == CLIENTS, within_s=60)
    gateway.process.send_signal(number)
    for worker in gateway.workers().values() if to_all else ():
        worker.send_signal(number)
    await gateway.wait_draining()
    assert len(gateway.workers()) == 2
    held.go_on.set()
    assert all(map(is_whole, await asyncio.gather(*streams)))
    async with asyncio.timeout(60):
        assert await gateway.process.wait() == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {line["worker"] for line in lines if line["message"] == "request"} == {0, 1}


async def test_a_second_signal_ends_all_at_once(gateway: Gateway, triton: FakeTriton) -> None:
    begun = 0

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        nonlocal begun
        begun += 1
        yield accepted()
        await asyncio.Event().wait()

    triton.model.answer = answer
    streams = [asyncio.create_task(stream(gateway.url)) for _ in range(CLIENTS)]
    await until(lambda: begun == CLIENTS, within_s=60)
    gateway.process.terminate()
    await gateway.wait_draining()
    gateway.process.terminate()
    async with asyncio.timeout(60):
        assert await gateway.process.wait() == 128 + signal.SIGTERM
    assert not any(map(is_whole, await asyncio.gather(*streams)))


@pytest.mark.parametrize(("gateway", "signals"), [({"--drain-s": 1}, 1), ({}, 2)], indirect=["gateway"])
async def test_a_stuck_worker_does_not_keep_the_others_from_ending(gateway: Gateway, signals: int) -> None:
    stuck, other = gateway.workers().values()
    stuck.suspend()
    gateway.process.terminate()
    assert not await asyncio.to_thread(wait_ended, [other], 30)
    if signals > 1:
        gateway.process.terminate()
    async with asyncio.timeout(60):
        assert await gateway.process.wait() == (128 + signal.SIGTERM if signals > 1 else 0)


def test_the_parent_does_without_what_serves() -> None:
    """It would take the memory of one more worker, and the time that one takes to import, before they do."""
    names = "{'fastapi', 'grpc', 'uvicorn', 'jinja2'}"
    program = f"import sys, gateway.cli, gateway.process.workers as w; print({names} & {{*sys.modules}}, "
    program += f"w.prepare([1]), {names} - {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set() None set()\n"


async def test_a_signal_while_workers_start_ends_them() -> None:
    process = await asyncio.create_subprocess_exec(
        *tied(TRITONGATE, "serve", "--port", "0", "--workers", "4", "--upstreams", "127.0.0.1:1"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    parent = psutil.Process(process.pid)
    while not parent.children():  # noqa: ASYNC110 - another process's
        await asyncio.sleep(0)
    process.terminate()
    children = parent.children()
    async with asyncio.timeout(60):
        assert await process.wait() == 0
    assert not wait_ended(children, 20)


async def test_workers_take_no_modules_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('not mine')")
    process = await asyncio.create_subprocess_exec(
        *tied(TRITONGATE, "serve", "--port", "0", "--workers", "2", "--upstreams", "127.0.0.1:1"),
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
    )
    async with asyncio.timeout(STARTED_S):
        lines = [await process.stderr.readline()]
        while lines[-1] and b"listening" not in lines[-1]:
            lines.append(await process.stderr.readline())
    process.terminate()
    async with asyncio.timeout(60):
        await process.communicate()
    assert b"listening" in lines[-1], lines


async def test_workers_end_with_a_killed_parent(gateway: Gateway) -> None:
    workers = gateway.workers().values()
    gateway.process.kill()
    await gateway.process.wait()
    assert not await asyncio.to_thread(wait_ended, workers, 30)


async def test_they_need_no_temporary_folder(triton: FakeTriton, tmp_path: Path) -> None:
    """Which someone may remove while they run, or which may be full."""
    nothing = "import tempfile\ntempfile.gettempdir = tempfile.mkdtemp = lambda *_, **__: 1 / 0"
    (tmp_path / "sitecustomize.py").write_text(nothing)
    async with gateway_of_two(triton, tmp_path, {}) as gateway:
        assert await gateway.all_serve()
        for worker in gateway.workers().values():
            assert not [each for each in worker.net_connections("unix") if each.laddr]


def test_one_that_dies_again_before_it_listened_leaves_a_good_listener(place: worker_metrics.Place) -> None:
    settings = load_settings({"upstreams": ("127.0.0.1:1",), "port": 0, "workers": 1})
    (listeners,) = bind_gateway(settings)
    (listener,) = listeners.http
    worker = workers._Worker(settings, listeners, place)
    listener.listen()
    for _ in range(3):
        worker._turn_away()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname())
    listener.listen()  # as the next process does
    with listener, socket.create_connection(listener.getsockname()) as client:
        client.sendall(b"hello")
        with listener.accept()[0] as served:
            assert served.recv(5) == b"hello"


async def test_one_that_is_replaced_has_the_last_good_certificate(
    triton: FakeTriton, tmp_path: Path, place: worker_metrics.Place
) -> None:
    files = self_signed(tmp_path, "served")
    tls = {"tls_cert": files.cert, "tls_key": files.key}
    settings = load_settings({"upstreams": (triton.address,), "port": 0, "workers": 1, **tls})
    certificate = Certificate(files.cert, files.key)
    root = ssl.create_default_context(cafile=files.cert)
    (listeners,) = bind_gateway(settings)
    url = base_url(listeners.http[0], tls=True)
    worker = workers._Worker(settings, listeners, place, certificate=certificate)
    files.spoil()
    keeping = asyncio.create_task(worker.keep())
    async with asyncio.timeout(STARTED_S), httpx.AsyncClient(verify=root) as http:
        await worker.ready.wait()
        assert (await http.get(url + "/health")).status_code == 200
        worker.end()
        await keeping


async def test_one_that_hangs_is_replaced(
    triton: FakeTriton, place: worker_metrics.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch itself, without a process in between: it looks more often here."""
    monkeypatch.setattr(workers, "_ASK_EVERY_S", 0.05)
    monkeypatch.setattr(workers, "_MISSES", 2)
    monkeypatch.setattr(workers, "_MISSES_AT_START", 10**6)  # looks; a start takes seconds
    settings = load_settings({"upstreams": (triton.address,), "port": 0, "workers": 1})
    (listeners,) = bind_gateway(settings)
    worker = workers._Worker(settings, listeners, place)
    keeping = asyncio.create_task(worker.keep())
    async with asyncio.timeout(STARTED_S):
        await worker.ready.wait()
        while not await worker_metrics.answers(place):  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # ten looks
    hung = worker._process
    hung.send_signal(signal.SIGSTOP)
    await until(lambda: worker._process is not hung, within_s=60)
    assert hung.returncode == -signal.SIGKILL
    await until(lambda: worker._process.returncode is None)
    worker.end()
    async with asyncio.timeout(60):
        await keeping
