import logging
import signal
import subprocess
import sys

import pytest

from triton_models.serving.stub import Stub

STUB = """
import ctypes, subprocess, sys, time
from triton_models.serving import stub
stub.STUCK_S = 2
stub.start_stub("m-stream")
print("begun", file=sys.stderr, flush=True)
time.sleep(5)  # longer than it may be stuck
print("alive", flush=True)
{then}
"""
STUCK = "ctypes.PyDLL(None).sleep(60)  # unlike CDLL's, its calls keep the interpreter lock"


def stub(then: str) -> subprocess.Popen[str]:
    code = STUB.format(then=then)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_process_that_is_stuck_with_the_interpreter_ends() -> None:
    with stub(STUCK) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "alive\n"
        assert process.wait(60) == -signal.SIGALRM


def test_it_ends_with_its_server() -> None:
    # A server that starts a stub and is gone; the pipe stays open until the stub ends, too.
    child = STUB.format(then="time.sleep(60)")
    server = f"import subprocess as s, sys; p = s.Popen([sys.executable, '-c', {child!r}], stderr=s.PIPE)"
    command = [sys.executable, "-c", f"{server}; p.stderr.readline()"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == ""


def test_a_process_at_work_is_left_alone() -> None:
    with stub("") as process:
        assert process.wait(60) == 0


def test_it_says_once_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    said = Stub("m-stream")
    said.initialized()
    said.asked()
    said.asked()
    assert caplog.messages == ["m-stream is initialized", "m-stream has its first request"]
