import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.processes import Command, alive, children_of, wait_ended

ORPHANING = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
"""It ends at once, and its child is nobody's."""
WITH_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


def test_a_zombie_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    try:
        assert alive(child.pid)
        assert alive(process)
        assert process in children_of(os.getpid())
        assert wait_ended([child.pid], 0) == [child.pid]
    finally:
        child.kill()
    assert not wait_ended([child.pid, process], 20)  # nobody has reaped it
    assert psutil.pid_exists(child.pid)
    assert process not in children_of(os.getpid())
    child.communicate()
    assert not alive(child.pid)
    assert not children_of(child.pid)


def test_children_are_those_at_any_depth() -> None:
    with subprocess.Popen([sys.executable, "-c", WITH_CHILD], stdin=subprocess.PIPE) as parent:
        while not (below := children_of(parent.pid)):
            assert parent.poll() is None
        assert {process.pid for process in below} <= {process.pid for process in children_of(os.getpid())}
        parent.communicate(b"\n")
    assert not wait_ended(below, 20)


def test_what_a_command_left_to_nobody_is_ended_with_it() -> None:
    command = Command(sys.executable, "-c", ORPHANING)
    command.process.wait(60)
    while "\n" not in command.output:
        assert command._reader.is_alive()
    orphan = int(command.output)
    assert alive(orphan)
    assert orphan not in {process.pid for process in command.tree()}
    command.close()
    assert not wait_ended([orphan], 20)


def test_a_command_outlives_the_thread_that_asked_for_it() -> None:
    """As where a server is started again on a thread of an event loop, which ends with its test."""
    program = "import time; print('begun', flush=True); time.sleep(600)"

    def begin() -> Command:
        command = Command(sys.executable, "-c", program)
        command.wait_for(lambda: "begun" in command.output)
        return command

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(begin)
    # The kernel would have told it by now: the thread has been joined.
    with asked.result() as command, pytest.raises(subprocess.TimeoutExpired):
        command.process.wait(0.5)
