"""Breaks a served model's engine on purpose; checks that every client is answered and the model recovers.

Runs the supervisor and the gateway of `tritongate up`, as two processes, over a repository whose engine has
built-in faults (`faulty_model.py`). Prints a line of JSON for every check, and exits with 1 if one fails.

* `memory`: a step finds the device's memory full.
* `kernel`: a kernel reads out of range, which destroys the process's CUDA context. The model must be
  reloaded.
* `outside`: another process takes nearly all free memory of the GPU, then requests come.

On the CPU the first two are imitated, and there is no `outside`.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from bench.gpu.faulty_clients import Clients
from bench.gpu.faulty_server import FaultyServer
from triton_models.engine.capacity import GIB

KERNEL_SEED, MEMORY_SEED = 7_700_000_002, 7_700_000_001
"""As in `faulty_model.py`, which cannot be imported here, because it patches the engine's classes."""

_LEFT_BYTES = 64 * 2**20
_HOG = f"""
import sys, torch
held, size = [], 2**30
while torch.cuda.mem_get_info()[0] > {_LEFT_BYTES} and size >= 2**20:
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
print(torch.cuda.mem_get_info()[0], flush=True)
sys.stdin.read()
"""


class Checks:
    """Prints the result of each check, and remembers whether any failed."""

    def __init__(self) -> None:
        self.failed = False

    def __call__(self, fault: str, check: str, *, ok: bool, **details: object) -> None:
        """Print one result."""
        self.failed |= not ok
        print(json.dumps({"fault": fault, "check": check, "ok": ok} | details), flush=True)


class Provocation:
    """Provokes faults on one server, one after the other."""

    def __init__(self, server: FaultyServer, clients: Clients, checks: Checks, *, come_back_s: float) -> None:
        self._server = server
        self._clients = clients
        self._checks = checks
        self._come_back_s = come_back_s

    def outside(self) -> None:
        """Let another process hold the memory while requests come; they may fail, but must be answered."""
        with memory_hog() as left:
            flood = self._clients.flood(when_started=lambda: None)
        self._checks("outside", "everybody is answered", **flood.verdict(), free_gib=round(left / GIB, 2))
        self._comes_back("outside")

    def inside(self, fault: str, seed: int, *, reloads: bool) -> None:
        """Let a request break a step while others run; then check the others, and the model's recovery."""
        stub = self._server.stub()
        flood = self._clients.flood(when_started=lambda: self._clients.ask(seed=seed))
        self._checks(fault, "everybody is answered", **flood.verdict())
        self._checks(fault, "the fault was felt", ok=flood.errors > 0, errors=flood.errors)
        self._comes_back(fault)
        changed = self._server.stub() != stub
        self._checks(fault, "loaded anew" if reloads else "not loaded anew", ok=changed == reloads)

    def _comes_back(self, fault: str) -> None:
        began = time.monotonic()
        answer = ""
        while time.monotonic() - began < self._come_back_s:
            answer = self._clients.ask()
            if answer == "200":
                break
            time.sleep(0.5)
        seconds = round(time.monotonic() - began, 1)
        self._checks(fault, "a new request is answered", ok=answer == "200", answer=answer, after_s=seconds)


@contextmanager
def memory_hog() -> Iterator[int]:
    """Hold nearly all free memory of the first GPU; yields the number of bytes that are still free."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as hog:
        if hog.stdout is None or hog.stdin is None:
            raise RuntimeError("a pipe that was asked for is missing")
        yield int(hog.stdout.readline())
        hog.stdin.close()


@click.command(help=__doc__)
@click.option("--checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--device", default="cuda:0", show_default=True)
@click.option("--requests", default=24, show_default=True, help="open at once when the fault comes")
@click.option("--prompt", default=200, show_default=True, help="tokens of each prompt")
@click.option("--out", default=200, show_default=True, help="tokens of each answer")
@click.option("--deadline-s", default=60.0, show_default=True, help="for an answer of whatever kind")
@click.option("--come-back-s", default=240.0, show_default=True, help="for the first good answer afterwards")
@click.option("--log", type=click.Path(dir_okay=False, path_type=Path), help="where the servers' output goes")
def main(
    *,
    checkpoint: Path,
    device: str,
    requests: int,
    prompt: int,
    out: int,
    deadline_s: float,
    come_back_s: float,
    log: Path | None,
) -> None:
    """Run all checks that the device allows."""
    checks = Checks()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="provoke-")))
        output = stack.enter_context((log or folder / "servers.log").open("wb"))
        server = stack.enter_context(FaultyServer(checkpoint, device, folder / "repository", output))
        clients = Clients(server.url, requests=requests, prompt=prompt, out=out, deadline_s=deadline_s)
        answer = clients.ask()
        checks("none", "a request is answered", ok=answer == "200", answer=answer)
        provocation = Provocation(server, clients, checks, come_back_s=come_back_s)
        provocation.inside("memory", MEMORY_SEED, reloads=False)
        provocation.inside("kernel", KERNEL_SEED, reloads=True)
        if device != "cpu":
            provocation.outside()
    sys.exit(int(checks.failed))


if __name__ == "__main__":
    main()
