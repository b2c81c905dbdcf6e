import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from triton_models.serving.process import is_running, process_name


@contextlib.contextmanager
def sleeper(program: str = "/bin/sleep") -> Iterator[int]:
    with subprocess.Popen([program, "600"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_process_runs_until_it_ends_even_if_nobody_takes_note() -> None:
    with sleeper() as pid:
        name = process_name(pid)
        assert is_running(name)
        os.kill(pid, signal.SIGSTOP)
        assert is_running(name)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{pid}").exists()
        assert not is_running(name)
    assert not is_running(name)
    with pytest.raises(ProcessLookupError):
        process_name(pid)


def test_a_number_that_was_given_again_is_another_process() -> None:
    name = process_name()
    assert is_running(name)
    assert not is_running(name + "1")


def test_a_process_that_is_hidden_counts_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError

    name = process_name()
    monkeypatch.setattr(Path, "read_text", refuse)
    assert is_running(name)


def test_a_program_may_have_any_name(tmp_path: Path) -> None:
    program = tmp_path / ") Z 1 ("
    program.symlink_to("/bin/sleep")
    with sleeper(str(program)) as pid:
        assert is_running(process_name(pid))
