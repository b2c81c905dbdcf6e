"""A supervised Triton whose engine breaks on request, and a gateway in front of it."""

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Self

import psutil

from bench.gpu.servers import READY_S, ServerError, answers, free_port
from triton_models.entries import ModelEntry, write_entry
from wire.events import Failed, Ready, decode_event

MODEL = "glm"
_STOP_S = 30.0
_FAULTY = Path(__file__).with_name("faulty_model.py")


class FaultyServer:
    """A context manager: the server runs inside it. The output of both programs goes to `output`."""

    def __init__(self, checkpoint: Path, device: str, repository: Path, output: IO[bytes]) -> None:
        self._entry = ModelEntry(name=MODEL, checkpoint=str(checkpoint.resolve()), device=device)
        self._repository = repository
        self._output = output
        self._stack = ExitStack()
        self._supervisor: psutil.Process
        self.url = f"http://127.0.0.1:{free_port()}"

    def __enter__(self) -> Self:
        """Start everything.

        Raises:
            ServerError: the server does not become ready.
        """
        write_entry(self._repository, model=self._entry)
        shutil.copy(_FAULTY, self._repository / MODEL / "1" / "model.py")
        with self._stack:
            self._start_gateway(self._start_triton())
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End everything."""
        self._stack.close()

    def stub(self) -> int | None:
        """Return the process id of the model's stub; None while there is none."""
        place = f"/{MODEL}/"
        for each in self._supervisor.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if place in " ".join(each.cmdline()):
                    return each.pid
        return None

    def _start_triton(self) -> Ready:
        command = [sys.executable, "-m", "triton_models.embedded"]
        process = self._stack.enter_context(
            subprocess.Popen(
                [*command, "--repository", str(self._repository)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._output,
            )
        )
        self._supervisor = psutil.Process(process.pid)
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("a pipe that was asked for is missing")
        self._stack.callback(process.stdin.close)
        for line in process.stdout:
            event = decode_event(line)
            if isinstance(event, Ready):
                # Keep reading, so that the process never blocks on a full pipe.
                threading.Thread(target=self._copy, args=(process.stdout,), daemon=True).start()
                return event
            if isinstance(event, Failed):
                raise ServerError(event.message)
        raise ServerError("the supervisor ended before the model was ready")

    def _copy(self, events: IO[bytes]) -> None:
        for line in events:
            self._output.write(line)
            self._output.flush()

    def _start_gateway(self, triton: Ready) -> None:
        port = self.url.rpartition(":")[2]
        command = [str(Path(sys.executable).with_name("tritongate")), "serve", "--port", port]
        process = subprocess.Popen(
            [*command, "--upstreams", triton.grpc, "--log-level", "warning"],
            env=os.environ | {"TRITONGATE_REPOSITORY_KEY": triton.repository_key},
            stdout=self._output,
            stderr=self._output,
        )
        self._stack.callback(process.kill)  # the last of the three: nothing is left of one that hangs
        self._stack.callback(process.wait, _STOP_S)
        self._stack.callback(process.terminate)
        began = time.monotonic()
        while not answers(self.url + "/health/ready"):
            if process.poll() is not None or time.monotonic() - began > READY_S:
                raise ServerError("the gateway is not ready")
            time.sleep(0.2)
