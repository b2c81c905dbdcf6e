"""Whoever dies first, nothing is left: by pid, shared memory and folder."""

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import wait_ended
from triton_models.embedded.client import TritonClient
from triton_models.embedded.models import BUILT_IN_CHECKPOINT
from triton_models.embedded.warden import RunDirectory
from wire import events

pytestmark = pytest.mark.e2e

UP = """
import signal, sys, threading
from gateway.up import plan_replicas, run_up

def serve(addresses, ready, on_stop):
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    print("serving", flush=True)
    while not stopped.wait(0.2):  # a signal just before a wait does not end it
        pass
    return 0

replicas = plan_replicas("cpu", None, metrics_port=0, models=(), repository=sys.argv[1])
sys.exit(run_up(replicas, serve, sys.stderr))
"""


def test_the_supervisor_killed(embedded: Callable[..., Any], fake_repository: tuple[Path, Path]) -> None:
    started = embedded("--repository", str(fake_repository[0]))
    started.wait_for(events.Ready)
    assert len(started.living()) == 3  # warden, server, stub
    started.process.kill()
    started.wait_gone()


def test_supervisor_and_warden_killed_together(
    embedded: Callable[..., Any], fake_repository: tuple[Path, Path]
) -> None:
    """The kernel ends the server; the next start ends the stub and removes what is left."""
    started = embedded("--repository", str(fake_repository[0]))
    started.wait_for(events.Ready)
    os.kill(started.process.pid, signal.SIGSTOP)  # it must not repair anything between the two kills
    started.find("warden.py").kill()
    started.process.kill()
    started.process.wait(60)
    assert not wait_ended([each for each in started.living() if each.name() == "tritonserver"], 60)
    RunDirectory.create(started.folder).remove()
    started.wait_gone()


@pytest.mark.parametrize("victim", [signal.SIGINT, signal.SIGKILL])
def test_the_gateway_ends(
    tree: Callable[[list[str]], Any], fake_repository: tuple[Path, Path], victim: signal.Signals
) -> None:
    up = tree([sys.executable, "-c", UP, str(fake_repository[0])])
    assert up.process.stdout.readline() == b"serving\n"
    assert len(up.living()) == 4
    up.note_run()
    os.killpg(up.process.pid, victim)  # as a terminal's Ctrl-C: the whole foreground group
    up.wait_gone()
    assert up.process.returncode == (0 if victim is signal.SIGINT else -victim)


def test_the_supervisor_killed_is_replaced(
    tree: Callable[[list[str]], Any], fake_repository: tuple[Path, Path]
) -> None:
    """What it left is removed at once, or the next one could not have its server's ports."""
    up = tree([sys.executable, "-c", UP, str(fake_repository[0])])
    assert up.process.stdout.readline() == b"serving\n"
    former = {each.pid for each in up.living()}
    up.note_run()
    up.find("triton_models.embedded").kill()
    deadline = time.monotonic() + 60
    while len(now := {each.pid for each in up.living()}) < len(former) or now & former:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    up.note_run()
    up.process.terminate()
    up.wait_gone()
    assert up.process.returncode == 0


def test_a_broken_checkpoint_is_one_clear_line(
    embedded: Callable[..., Any], fake_repository: tuple[Path, Path]
) -> None:
    repository, checkpoint = fake_repository
    (checkpoint / "broken").touch()
    started = embedded("--repository", str(repository))
    failed = started.wait_for(events.Failed)
    assert failed.message.startswith(
        f"fake: CheckpointError: {checkpoint}/model.safetensors: tensor 'a.b' is cut short (log: "
    )
    assert "\n" not in failed.message
    log = Path(failed.message.rpartition("(log: ")[2].removesuffix(")"))
    assert "is cut short" in log.read_text()
    assert started.process.wait(60) == 1
    RunDirectory.create(started.folder).remove()  # as the next start would
    assert log.exists()
    assert not started.living()


def test_a_broken_config_is_one_clear_line(
    embedded: Callable[..., Any], fake_repository: tuple[Path, Path]
) -> None:
    (fake_repository[0] / "fake" / "config.pbtxt").write_text("max_batch_size: many")
    started = embedded("--repository", str(fake_repository[0]))
    failed = started.wait_for(events.Failed)
    assert "failed to read text proto from" in failed.message
    assert "\n" not in failed.message
    assert started.process.wait(60) == 1


def test_a_port_in_use(embedded: Callable[..., Any], fake_repository: tuple[Path, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        started = embedded("--repository", str(fake_repository[0]), "--grpc-port", str(port))
        failed = started.wait_for(events.Failed)
        assert failed.message.startswith(f"Triton's grpc port {port} is not available on 127.0.0.1: Address")
        assert started.process.wait(60) == 1
        assert time.monotonic() - began < 45


def test_a_missing_model(embedded: Callable[..., Any]) -> None:
    started = embedded("--model", "/no/such/folder", "--device", "cpu")
    failed = started.wait_for(events.Failed)
    assert failed.message == "--model /no/such/folder: /no/such/folder is not a directory"
    assert started.process.wait(60) == 1


def test_a_repository_without_models(embedded: Callable[..., Any], tmp_path: Path) -> None:
    failed = embedded("--repository", str(tmp_path)).wait_for(events.Failed)
    assert failed.message == f"{tmp_path} holds no model: no folder with a config.pbtxt"


def test_a_folder_with_a_chinese_name(embedded: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = tmp_path / "模型"
    shutil.copytree(BUILT_IN_CHECKPOINT, checkpoint)
    argument = ("--model", f"m={checkpoint}", "--device", "cpu")
    started = embedded(*argument)
    assert started.wait_for(events.Ready).models == ["m"]
    started.process.terminate()
    started.wait_gone()
    (checkpoint / "model.safetensors").write_bytes(b"broken")
    assert f"{checkpoint}/model.safetensors" in embedded(*argument).wait_for(events.Failed).message


async def test_the_built_in_model(embedded: Callable[..., Any]) -> None:
    """With the real engine, as the one above."""
    started = embedded("--device", "cpu")
    notices = [started.wait_for(events.Notice), started.wait_for(events.Notice)]
    assert "a few pages by heart" in notices[1].message
    assert started.wait_for(events.Ready).models == ["chatglm3-demo"]
    async with contextlib.aclosing(TritonClient(started.ready.grpc)) as client:
        assert (await client.probe("chatglm3-demo", 30)).format == "chatglm3"
    started.process.terminate()
    started.wait_gone()
    assert started.process.returncode == 0
