import contextlib
import os
import select
import signal
import subprocess
import sys
import time

from triton_models.serving.stub import is_warmed_up

STUB = """
import subprocess, sys, time
from triton_models.serving import stub
stub.UNREQUESTED_LIMIT_S = {limit_s}
made = stub.Stub({{"model_config": '{config}'}})
print("started", file=sys.stderr, flush=True)
{then}
"""
WARMED_UP = '{"instance_group": [{"count": 1}], "model_warmup": [{}]}'


def stub(then: str, config: str = "{}", limit_s: float = 1.0) -> subprocess.Popen[str]:
    code = STUB.format(then=then, config=config, limit_s=limit_s)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


COLLECTIONS = """
import gc
from triton_models.serving.stub import keep_what_is_loaded, uncollected
with uncollected():
    assert not gc.isenabled()
assert gc.isenabled()
kept = [[] for _ in range(1000)]
keep_what_is_loaded()
assert gc.isenabled()
looked_at = {id(found) for found in gc.get_objects()}
assert not any(id(found) in looked_at for found in kept)
"""


def test_what_is_loaded_is_never_looked_through_again() -> None:
    subprocess.run([sys.executable, "-c", COLLECTIONS], check=True)


def test_it_ends_with_its_server() -> None:
    # A server that starts a stub and is gone; the pipe stays open until the stub ends, too.
    child = STUB.format(then="time.sleep(60)", config="{}", limit_s=1)
    server = f"import subprocess as s, sys; p = s.Popen([sys.executable, '-c', {child!r}], stderr=s.PIPE)"
    command = [sys.executable, "-c", f"{server}; p.stderr.readline()"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == ""


SERVER = """
import subprocess, sys, threading
def start():
    # Its pipe stays open until it ends.
    process = subprocess.Popen([sys.executable, "-c", {child!r}], stderr=subprocess.PIPE)
    process.stderr.readline()
loading = threading.Thread(target=start)
loading.start()
loading.join()
print("loaded", flush=True)
sys.stdin.read()
"""


def test_it_ends_with_its_server_whoever_holds_the_interpreter_lock() -> None:
    """A call into the shared memory of a dead server never returns, and keeps the lock.

    As in Triton, the thread that starts it ends before the server does.
    """
    stuck = "time.sleep(1.5); import ctypes, os; print(os.getpid(), flush=True); ctypes.PyDLL(None).sleep(99)"
    server = SERVER.format(child=STUB.format(then=stuck, config="{}", limit_s=1))
    with subprocess.Popen(
        [sys.executable, "-c", server], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loaded\n"
        pid = process.stdout.readline()
        assert pid, "the end of that thread has killed it"
        time.sleep(1)
        process.kill()
        # The pipe's end: nobody has it any more.
        ended, _, _ = select.select([process.stdout], [], [], 10)
        if not ended:
            os.kill(int(pid), signal.SIGKILL)
        assert ended, "it lives on, without its server"


def test_a_process_whose_warm_up_never_comes_ends() -> None:
    with stub("made.initialized()\ntime.sleep(60)", WARMED_UP) as process:
        assert process.stderr is not None
        assert "Triton has given this process up" in process.stderr.read()
        assert process.wait(60) == 1


WANTED = [
    ("made.initialized(); made.requested()", WARMED_UP),
    ("made.requested(); made.initialized()", WARMED_UP),
    ("made.initialized()", "{}"),
    ("pass", WARMED_UP),
]


def test_a_process_that_is_wanted_goes_on() -> None:
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(stub(f"{then}\ntime.sleep(3)", config)) for then, config in WANTED]
        assert [process.wait(60) for process in processes] == [0] * len(WANTED)


def test_a_process_that_was_stopped_for_longer_than_the_limit_goes_on() -> None:
    """By SIGSTOP or a debugger: it has not waited meanwhile, and no timer of its own ends it."""
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(stub(f"{then}\nsys.stdin.readline()", WARMED_UP, limit_s=2.5))
            for then in ("made.initialized()", "made.initialized(); made.requested()")
        ]
        for process in processes:
            assert process.stderr is not None
            assert process.stderr.readline() == "started\n"
            process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        for process in processes:
            process.send_signal(signal.SIGCONT)
        time.sleep(0.7)
        assert [process.poll() for process in processes] == [None] * 2
        for process in processes:
            process.kill()


def test_a_stopped_process_has_no_alarm() -> None:
    with stub("import signal; print(signal.alarm(0))\ntime.sleep(1)\nprint(signal.alarm(0))") as process:
        assert process.stdout is not None
        assert process.stdout.read() == "0\n0\n"


def test_only_a_single_instance_is_warmed_up_at_once() -> None:
    assert is_warmed_up(WARMED_UP)
    assert not is_warmed_up('{"instance_group": [{"count": 1}]}')
    assert not is_warmed_up('{"instance_group": [{"count": 2}], "model_warmup": [{}]}')
    assert not is_warmed_up('{"instance_group": [{"count": 1, "gpus": [0, 1]}], "model_warmup": [{}]}')
