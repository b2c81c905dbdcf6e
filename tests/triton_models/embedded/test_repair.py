"""The running server under everything that can die or be stuck. The tests share one server, in order."""

import asyncio
import contextlib
import queue
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.e2e.up_process import ABORTED
from tests.processes import alive, wait_ended
from tests.triton_models.embedded.conftest import MODEL
from triton_models.embedded.client import TritonClient
from triton_models.embedded.errors import ModelError
from wire import events, names, strings

pytestmark = pytest.mark.e2e

_BOUND_S = 60.0


@contextlib.asynccontextmanager
async def connected(shared: Any, key: str | None = None) -> AsyncIterator[TritonClient]:
    async with contextlib.aclosing(TritonClient(shared.ready.grpc, key)) as client:
        yield client


def test_every_port_is_bound_to_loopback_only(shared: Any) -> None:
    listening = [
        connection.laddr
        for process in shared.living()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    ready = shared.ready
    announced = {int(address.rpartition(":")[2]) for address in (ready.grpc, ready.metrics)}
    assert {address.port for address in listening} == announced
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


async def test_without_the_key_models_can_be_asked_but_neither_loaded_nor_unloaded(shared: Any) -> None:
    assert shared.ready.models == [MODEL]
    async with connected(shared) as client:
        assert await client.live(_BOUND_S)
        assert (await client.probe(MODEL, _BOUND_S)).heartbeat_age_s == 0
        with pytest.raises(ModelError, match="unknown model"):
            await client.probe("no-such-entry", _BOUND_S)
        for refused in (client.unload(MODEL, _BOUND_S), client.load(MODEL)):
            with pytest.raises(ModelError, match="restricted"):
                await refused


async def test_a_stub_killed_under_load_is_replaced(shared: Any) -> None:
    with grpc.insecure_channel(shared.ready.grpc) as channel:
        streams = [_hanging_stream(channel) for _ in range(8)]
        for stream in streams:
            next(stream)  # accepted
        old, server = shared.find("triton_python_backend_stub"), shared.find("tritonserver")
        killed = time.monotonic()
        old.send_signal(signal.SIGKILL)
        said = await _await_repair(shared, server)
        assert not said or said[0].model == MODEL
        assert time.monotonic() - killed < 45
        for stream in streams:
            stream.cancel()
    assert shared.find("triton_python_backend_stub").pid != old.pid
    async with connected(shared) as client:
        await client.probe(MODEL, _BOUND_S)


async def test_a_stuck_engine_is_replaced(shared: Any) -> None:
    stopped, server = shared.folder / "checkpoint" / "stopped", shared.find("tritonserver")
    stopped.touch()
    down, *_ = await _await_repair(shared, server)
    stopped.unlink()
    assert "has not moved" in down.reason


def test_a_reload_that_fails_is_tried_again(shared: Any) -> None:
    broken = shared.folder / "checkpoint" / "broken"
    broken.touch()
    shared.find("triton_python_backend_stub").kill()
    shared.wait_for(events.ModelDown)
    down = shared.wait_for(events.ModelDown)
    broken.unlink()
    assert down.reason.endswith("model.safetensors: tensor 'a.b' is cut short")
    shared.wait_for(events.ModelUp)


async def test_a_process_that_triton_gave_up_is_replaced(shared: Any) -> None:
    checkpoint, server = shared.folder / "checkpoint", shared.find("tritonserver")
    for _ in range(3):  # a Triton that did not get to run either gives nothing up
        (checkpoint / "slow").touch()
        shared.find("triton_python_backend_stub").kill()
        process = _await_loading(checkpoint)
        process.suspend()  # as on a machine that is busy with something else
        await asyncio.sleep(4)
        process.resume()
        (checkpoint / "slow").unlink()
        said = await _await_repair(shared, server)
        if not said or said[-1].reason.startswith("its process died while loading"):
            break
    else:
        pytest.fail("it was never given up")
    assert not wait_ended([process], 20), "its end is seen to, but not before another is up"


async def test_a_model_that_somebody_unloaded_is_left_alone(shared: Any) -> None:
    await _await_probe(shared)  # of what the tests before did, Triton may still die
    async with connected(shared, shared.ready.repository_key) as client:
        shared.pass_over()  # or it is said late
        await client.unload(MODEL, _BOUND_S)
        with pytest.raises(queue.Empty):
            shared.wait_for(events.ModelDown, timeout_s=4)
        (shared.folder / "checkpoint" / "broken").touch()
        with pytest.raises(ModelError, match="cut short"):
            await client.load(MODEL)
        with pytest.raises(queue.Empty):  # who asked for it was told
            shared.wait_for(events.ModelDown, timeout_s=4)
        (shared.folder / "checkpoint" / "broken").unlink()
        await client.load(MODEL)
        await client.probe(MODEL, _BOUND_S)


@pytest.mark.parametrize("victim", ["tritonserver", "warden.py"])
async def test_a_killed_server_or_warden_is_replaced_on_the_same_ports(shared: Any, victim: str) -> None:
    before = shared.living()
    killed = time.monotonic()
    shared.find(victim).kill()
    down = shared.wait_for(events.ServerDown)
    assert "killed by signal 9" in down.reason
    shared.wait_for(events.ServerUp)
    assert time.monotonic() - killed < 45
    await _await_probe(shared)
    assert not {process.pid for process in before} & {process.pid for process in shared.living()}


def test_a_server_that_crashes_before_it_is_ready_has_two_more_attempts(
    embedded: Callable[..., Any], fake_repository: tuple[Path, Path]
) -> None:
    repository, checkpoint = fake_repository
    (checkpoint / "slow").touch()
    started = embedded("--repository", str(repository))
    for _ in range(2):
        _await_loading(checkpoint)
        started.find("tritonserver").kill()
        assert "killed by signal 9" in started.wait_for(events.ServerDown).reason
        started.wait_for(events.ServerUp)
    _await_loading(checkpoint)
    started.find("tritonserver").kill()
    assert "killed by signal 9" in started.wait_for(events.Failed).message
    assert started.process.wait(60) == 1
    assert not started.living()


def test_sigterm_leaves_nothing(shared: Any) -> None:
    shared.process.terminate()
    shared.wait_gone()
    assert shared.process.returncode == 0


async def _await_repair(shared: Any, server: psutil.Process) -> list[events.ModelDown]:
    """Wait until a model whose process was killed is up again; return what was said of its being down.

    That may be nothing if `server` died of it, too (divergence 16), and only then.
    """
    downs: list[events.ModelDown] = []
    while True:
        event = shared.wait_for(events.ModelDown, events.ModelUp, events.ServerDown)
        if isinstance(event, events.ModelDown):
            downs.append(event)
        elif isinstance(event, events.ModelUp):
            assert downs
            return downs
        else:
            assert event.reason == ABORTED
            assert not alive(server)
            shared.wait_for(events.ServerUp)
            await _await_probe(shared)
            # The supervisor probes it, too, before it takes the model to be up.
            await asyncio.sleep(2)
            return downs


async def _await_probe(shared: Any) -> None:
    deadline = time.monotonic() + 30
    async with connected(shared) as client:
        while True:
            try:
                await client.probe(MODEL, _BOUND_S)
            except ModelError:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)
            else:
                return


def _await_loading(checkpoint: Path) -> psutil.Process:
    """Wait until an entry is being loaded, which takes as long as `slow` is there; return its process."""
    loading, deadline = checkpoint / "loading", time.monotonic() + 60
    while not (loading.exists() and loading.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process = psutil.Process(int(loading.read_text()))
    loading.unlink()
    return process


def _hanging_stream(channel: grpc.Channel) -> Any:
    request = pb.ModelInferRequest(model_name=MODEL)
    for name, value in ((names.PROMPT, b"hang"), (names.HISTORY, b"[]"), (names.SAMPLING, b"{}")):
        request.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
        request.raw_input_contents.append(strings.pack_strings([value]))
    return service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request]), timeout=60)
