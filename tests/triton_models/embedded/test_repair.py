"""The running server under everything that can die or be stuck. The tests share one server, in order."""

import queue
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.e2e.up_process import ABORTED, lives
from triton_models.embedded.client import CallError, TritonClient
from wire import events, names, strings

pytestmark = pytest.mark.e2e

ENTRY = names.stream_entry("fake")
_BOUND_S = 60.0


def test_every_port_is_bound_to_loopback_only(shared: Any) -> None:
    listening = [
        connection.laddr
        for process in shared.living()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    ready = shared.ready
    announced = {int(address.rpartition(":")[2]) for address in (ready.http, ready.grpc, ready.metrics)}
    assert {address.port for address in listening} == announced
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def test_probe_and_generation(shared: Any) -> None:
    with TritonClient(shared.ready.grpc) as client:
        assert client.probe(ENTRY, _BOUND_S).heartbeat_age_s == 0
        client.generate(ENTRY, _BOUND_S)
        with pytest.raises(CallError, match="unknown model"):
            client.probe("no-such-entry", _BOUND_S)


def test_a_stub_killed_under_load_is_replaced(shared: Any) -> None:
    with grpc.insecure_channel(shared.ready.grpc) as channel:
        streams = [_hanging_stream(channel) for _ in range(8)]
        for stream in streams:
            next(stream)  # accepted
        old, server = shared.find("triton_python_backend_stub"), shared.find("tritonserver")
        killed = time.monotonic()
        old.send_signal(signal.SIGKILL)
        said = _await_repair(shared, server)
        assert not said or (said[0].model == "fake" and ENTRY in said[0].reason)
        assert time.monotonic() - killed < 45
        for stream in streams:
            stream.cancel()
    assert shared.find("triton_python_backend_stub").pid != old.pid
    with TritonClient(shared.ready.grpc) as client:
        client.generate(ENTRY, _BOUND_S)


def test_a_stuck_engine_is_replaced(shared: Any) -> None:
    stopped, server = shared.folder / "checkpoint" / "stopped", shared.find("tritonserver")
    stopped.touch()
    down, *_ = _await_repair(shared, server)
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


def test_a_process_that_triton_gave_up_is_replaced(shared: Any) -> None:
    checkpoint, server = shared.folder / "checkpoint", shared.find("tritonserver")
    (checkpoint / "slow").touch()
    shared.find("triton_python_backend_stub").kill()
    process = _await_loading(checkpoint)
    process.suspend()  # as on a machine that is busy with something else
    time.sleep(4)
    process.resume()
    (checkpoint / "slow").unlink()
    said = _await_repair(shared, server)
    assert not said or said[-1].reason.endswith("Triton gave its process up while that was starting")
    assert not lives(process)


def test_an_entry_that_somebody_unloaded_is_left_alone(shared: Any) -> None:
    with TritonClient(shared.ready.grpc) as client:
        client.unload(ENTRY, _BOUND_S)
        with pytest.raises(queue.Empty):
            shared.wait_for(events.ModelDown, timeout_s=4)
        call = client.load(ENTRY)
        assert call.wait(30)
        client.generate(ENTRY, _BOUND_S)


@pytest.mark.parametrize("victim", ["tritonserver", "warden"])
def test_a_killed_server_or_warden_is_replaced_on_the_same_ports(shared: Any, victim: str) -> None:
    before = shared.living()
    killed = time.monotonic()
    shared.find(victim).kill()
    down = shared.wait_for(events.ServerDown)
    assert "killed by signal 9" in down.reason
    shared.wait_for(events.ServerUp)
    assert time.monotonic() - killed < 45
    with TritonClient(shared.ready.grpc) as client:
        _await_generation(client)
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


def _await_repair(shared: Any, server: psutil.Process) -> list[events.ModelDown]:
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
            assert not lives(server)
            shared.wait_for(events.ServerUp)
            with TritonClient(shared.ready.grpc) as client:
                _await_generation(client)
            # The supervisor asks for a token of its own before it takes the entry to be up.
            time.sleep(2)
            return downs


def _await_generation(client: TritonClient) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            client.generate(ENTRY, _BOUND_S)
        except CallError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
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
    request = pb.ModelInferRequest(model_name=ENTRY)
    for name, value in ((names.PROMPT, b"hang"), (names.HISTORY, b"[]"), (names.SAMPLING, b"{}")):
        request.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
        request.raw_input_contents.append(strings.pack_strings([value]))
    return service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request]), timeout=60)
