"""The committed repository on a tritonserver of anybody's: all entries loaded as it starts, no supervisor."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.field_client import ask_batched, conversation
from tests.e2e.stream_client import StreamClient
from tests.e2e.up_process import wait_until
from tests.ports import free_ports
from tests.tied import tied
from triton_models.embedded.environments import EnvironmentClaim, remove_empty
from triton_models.embedded.installation import find_installation

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2] / "triton_models" / "repository"
START_S = 100.0


@pytest.fixture
def stock(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """HTTP and gRPC addresses of the server, once it says that it is ready."""
    found = find_installation()
    found.link_backends(tmp_path / "backends")
    http, grpc, metrics = free_ports(3)
    prefix = f"tritongate_stock_{os.getpid()}_"
    command = [found.server, f"--model-repository={REPOSITORY}", f"--backend-directory={tmp_path}/backends"]
    command += [f"--backend-config=python,shm-region-prefix-name={prefix}", "--exit-timeout-secs=2"]
    for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics)):
        command += [f"--{name}-address=127.0.0.1", f"--{name}-port={port}"]
    environments: set[str] = set()
    with EnvironmentClaim(environments.update) as claim:
        process = subprocess.Popen(tied(*command), env=found.environment(os.environ, temporary=tmp_path))
        claim.wait(START_S)
    tree = [psutil.Process(process.pid)]
    try:
        wait_until(lambda: process.poll() is not None or ready(http), START_S)
        assert process.poll() is None, "tritonserver did not start"
        tree += tree[0].children(recursive=True)
        yield f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for each in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        for region in Path("/dev/shm").glob(f"{prefix}*"):  # noqa: S108 - where they are
            region.unlink(missing_ok=True)
        remove_empty(environments)


def ready(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5).status_code == 200
    return False


def test_it_starts_with_every_entry_and_answers_through_both(stock: tuple[str, str]) -> None:
    http, grpc = stock
    client = StreamClient(grpc)
    assert client.ask("chatglm3-demo", "Who are you?", max_tokens=8).last.usage.completion_tokens > 0
    client.close()
    answer, history = ask_batched(f"http://{http}", "你好", model="chatglm3-demo")
    assert conversation(history) == [("user", "你好"), ("assistant", answer)]
