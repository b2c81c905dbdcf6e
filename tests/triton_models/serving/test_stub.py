import logging
import os
import signal
import subprocess
import sys

import pytest

from triton_models.serving.stub import Stub, is_warmed_up

STUB = """
import ctypes, subprocess, sys, time
from triton_models.serving import stub
stub.STUCK_S = 2
stub.UNASKED_S = 1
said = stub.start_stub({{"model_name": "m-stream", "model_config": '{config}'}})
print("begun", file=sys.stderr, flush=True)
time.sleep(5)  # longer than it may be stuck
print("alive", flush=True)
{then}
"""
STUCK = "ctypes.PyDLL(None).sleep(60)  # unlike CDLL's, its calls keep the interpreter lock"


WARMED_UP = '{"instance_group": [{"count": 1}], "model_warmup": [{}]}'


def stub(then: str, config: str = "{}") -> subprocess.Popen[str]:
    code = STUB.format(then=then, config=config)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_process_that_is_stuck_with_the_interpreter_ends() -> None:
    with stub(STUCK) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "alive\n"
        assert process.wait(60) == -signal.SIGALRM


def test_it_ends_with_its_server() -> None:
    # A server that starts a stub and is gone; the pipe stays open until the stub ends, too.
    child = STUB.format(then="time.sleep(60)", config="{}")
    server = f"import subprocess as s, sys; p = s.Popen([sys.executable, '-c', {child!r}], stderr=s.PIPE)"
    command = [sys.executable, "-c", f"{server}; p.stderr.readline()"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == ""


def test_a_process_at_work_is_left_alone() -> None:
    with stub("") as process:
        assert process.wait(60) == 0


def test_a_process_whose_warm_up_never_comes_ends() -> None:
    with stub("said.initialized()\ntime.sleep(60)", WARMED_UP) as process:
        assert process.stderr is not None
        assert "Triton has given this process up" in process.stderr.read()
        assert process.wait(60) == 1


@pytest.mark.parametrize(
    ("then", "config"), [("said.initialized(); said.asked()", WARMED_UP), ("said.initialized()", "{}")]
)
def test_a_process_that_is_wanted_goes_on(then: str, config: str) -> None:
    with stub(f"{then}\ntime.sleep(4)", config) as process:
        assert process.wait(60) == 0


def test_only_a_single_instance_is_warmed_up_at_once() -> None:
    assert is_warmed_up(WARMED_UP)
    assert not is_warmed_up('{"instance_group": [{"count": 1}]}')
    assert not is_warmed_up('{"instance_group": [{"count": 2}], "model_warmup": [{}]}')
    assert not is_warmed_up('{"instance_group": [{"count": 1, "gpus": [0, 1]}], "model_warmup": [{}]}')


def test_it_says_once_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    said = Stub("m-stream", warmed_up=True)
    said.initialized()
    said.asked()
    said.asked()
    begin = f"m-stream: process {os.getpid()}"
    assert caplog.messages == [f"{begin} is initialized", f"{begin} has its first request"]
