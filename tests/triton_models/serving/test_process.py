import os
import signal
import subprocess
from pathlib import Path

import pytest

from triton_models.serving.process import is_running, process_name


def test_a_process_runs_until_it_ends_even_if_nobody_takes_note() -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        name = process_name(process.pid)
        assert is_running(name)
        os.kill(process.pid, signal.SIGSTOP)
        assert is_running(name)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{process.pid}").exists()
        assert not is_running(name)
    assert not is_running(name)
    with pytest.raises(ProcessLookupError):
        process_name(process.pid)


def test_a_number_that_was_given_again_is_another_process() -> None:
    name = process_name()
    assert is_running(name)
    assert not is_running(name + "1")


def test_a_program_may_have_any_name(tmp_path: Path) -> None:
    program = tmp_path / ") Z 1 ("
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "600"]) as process:
        assert is_running(process_name(process.pid))
        process.kill()
