import subprocess
import sys
from pathlib import Path

import psutil

from tests.e2e.up_process import wait_until
from tests.processes import alive

PARENT = """
import subprocess, time
from tests.tied import tied
print(subprocess.Popen(tied("sleep", 600)).pid, flush=True)
time.sleep(600)
"""


def test_what_is_tied_ends_with_whoever_was_killed() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        wait_until(lambda: child.name() == "sleep")
        parent.kill()
    wait_until(lambda: not alive(child))
