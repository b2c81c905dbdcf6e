"""A tritonserver of anybody's on a repository of ours: everything loaded as it starts, no supervisor."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.e2e.up_process import GOLDEN, metric
from tests.ports import free_ports
from tests.processes import START_S, Command, answers
from triton_models.embedded.installation import find_installation
from triton_models.entries import ModelEntry, write_entry

REPOSITORY = Path(__file__).parents[2] / "triton_models" / "repository"
CONFIG = """backend: "python"
parameters {{ key: "checkpoint" value {{ string_value: "{checkpoint}" }} }}
version_policy {{ specific {{ versions: [1, 2] }} }}
"""


@dataclass(frozen=True)
class StockServer:
    """A running server."""

    grpc: str
    http: str
    metrics: str
    shared_memory_prefix: str

    def gauge(self, name: str, **labels: str) -> float:
        """Return the sum of an engine metric's samples that have these labels."""
        return metric(httpx.get(f"http://{self.metrics}/metrics", timeout=20).text, name, **labels)

    def shared_memory_bytes(self) -> int:
        """Return what the server and its stub hold of the memory that they share."""
        regions = Path("/dev/shm").glob(f"{self.shared_memory_prefix}*")  # noqa: S108 - where they are
        return sum(region.stat().st_blocks * 512 for region in regions)


def by_hand(folder: Path) -> Path:
    """Write a repository with an entry `glm` that names its checkpoint only, another one for each version."""
    for version, name in (("1", "chatglm3"), ("2", "chatglm2")):
        (folder / "checkpoints" / version).mkdir(parents=True)
        (folder / "checkpoints" / version / "model").symlink_to(GOLDEN / name)
    write_entry(folder / "written", model=ModelEntry(name="glm", checkpoint="unused"))
    code = (folder / "written" / "glm" / "1" / "model.py").read_text()
    for version in ("1", "2"):
        (folder / "repository" / "glm" / version).mkdir(parents=True)
        (folder / "repository" / "glm" / version / "model.py").write_text(code)
    config = CONFIG.format(checkpoint="../../checkpoints/{version}/model")
    (folder / "repository" / "glm" / "config.pbtxt").write_text(config)
    return folder / "repository"


def built(folder: Path) -> Path:
    """Have `tritongate build` write a model `built`, without its packages, and move what it wrote."""
    model = ("--model", f"built={GOLDEN}/chatglm3", "--device", "cpu", "--dtype", "float32")
    command = (Path(sys.executable).with_name("tritongate"), "build", *model, "--no-environment")
    subprocess.run((*command, "--out", folder / "out"), check=True, capture_output=True)
    return (folder / "out").rename(folder / "moved") / "repository"


@contextlib.contextmanager
def stock_server(
    *repositories: Path,
    temporary: Path,
    backends: Path | None = None,
    environment: Mapping[str, str] | None = None,
    ready_s: float = START_S,
    flags: Sequence[str] = (),
) -> Iterator[StockServer]:
    """Run a server from when it says that it is ready until the block ends.

    Args:
        repositories: its models.
        temporary: a folder of its own.
        backends: its backend directory; None: it gets the Python backend alone.
        environment: as `Installation.environment` makes it; None: that of this Python.
        ready_s: longest time until it is ready.
        flags: more of its command line.

    Triton (2.51) takes a stub for dead that has not run for a second while it starts, and then waits for its
    end for ever. A virtual machine that its host pauses meets that. `up` starts such a server again, and so
    does this, once.
    """
    found = find_installation()
    if backends is None:
        backends = temporary / "backends"
        found.link_backends(backends)
    http, grpc, metrics = free_ports(3)
    prefix = f"tritongate_stock_{os.getpid()}_{http}_"
    command = [found.server, f"--backend-directory={backends}"]
    command += [f"--model-repository={repository}" for repository in repositories]
    command += [f"--backend-config=python,shm-region-prefix-name={prefix}", "--exit-timeout-secs=2"]
    command += flags
    for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics)):
        command += [f"--{name}-address=127.0.0.1", f"--{name}-port={port}"]
    environment = environment or found.environment(os.environ, temporary=temporary)

    def start() -> Command:
        server = Command(*command, env=environment)
        try:
            server.wait_for(lambda: answers(f"http://127.0.0.1:{http}/v2/health/ready"), ready_s)
        except AssertionError:
            server.close()
            raise
        return server

    try:
        try:
            server = start()
        except AssertionError:
            server = start()
        with server:
            local = "127.0.0.1:{}".format
            yield StockServer(local(grpc), local(http), local(metrics), prefix)
            status = server.process.poll()
            assert status is None, f"it ended by itself: {status}\n{server.output}"
    finally:
        for region in Path("/dev/shm").glob(f"{prefix}*"):  # noqa: S108 - as above
            region.unlink(missing_ok=True)
