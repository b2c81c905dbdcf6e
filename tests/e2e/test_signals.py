"""A signal at any moment of `tritongate up`'s start ends it: soon, in a word, and with nothing left."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.up_process import GOLDEN, STOP_TIMEOUT_S, TRITONGATE
from tests.processes import Command, command_of

pytestmark = pytest.mark.e2e


class Start(Command):
    """One start, with a folder for temporary files of its own, by which its processes are known."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = ("--port", "--kserve-http-port", "--kserve-grpc-port", "--metrics-port")
        flags = [word for port in ports for word in (port, "0")]
        model = ("--model", GOLDEN / "chatglm3", "--dtype", "float32", "--device", "cpu")
        super().__init__(TRITONGATE, "up", *flags, *model, env={"TMPDIR": str(folder)})

    def has_child(self) -> bool:
        return any("triton_models.embedded" in command_of(each) for each in self.tree())

    def processes(self) -> list[list[str]]:
        """Return the command line of each living process, orphans included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TMPDIR") == str(self.folder):
                    found.append(process.cmdline())
            except psutil.Error:  # ended by now, or somebody else's
                continue
        return found


@pytest.mark.parametrize(
    ("number", "comes"),
    [
        (signal.SIGINT, lambda start: start.has_child()),
        (signal.SIGTERM, lambda start: "Starting Triton" in start.output),
        (signal.SIGINT, lambda start: "Loading chatglm3" in start.output),
        (signal.SIGTERM, lambda start: "Triton is ready" in start.output),
    ],
    ids=["child", "server", "model", "gateway"],
)
def test_a_signal_at_a_moment_of_a_start(tmp_path: Path, number: int, comes: Callable[[Start], bool]) -> None:
    runs = tmp_path / f"tritongate-{os.getuid()}"
    with Start(tmp_path) as start:
        start.wait_for(lambda: comes(start))
        start.process.send_signal(number)
        # Interrupted after it began to serve, it drains, which is no failure.
        assert start.process.wait(STOP_TIMEOUT_S) in {0, 128 + signal.SIGINT}
        assert not start.processes()
        assert not [path for path in tmp_path.iterdir() if path != runs]
        assert not (runs.exists() and list(runs.iterdir()))
    assert start.output.count("stopping\n") == 1
    assert "Traceback" not in start.output
