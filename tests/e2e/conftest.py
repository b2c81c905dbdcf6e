"""A real tritonserver under the golden checkpoints, started once for all end-to-end tests."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stream_client import StreamClient
from wire.events import Failed, Ready, decode_event

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="session")
def embedded() -> Iterator[Ready]:
    command = [sys.executable, "-m", "triton_models.embedded", "--exit-with-stdin", "--dtype", "float32"]
    for model in ("chatglm3", "chatglm2"):
        command += ["--model", str(GOLDEN / model)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        for line in process.stdout:
            event = decode_event(line)
            assert not isinstance(event, Failed), event
            if isinstance(event, Ready):
                yield event
                break
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(20)


@pytest.fixture(scope="session")
def triton(embedded: Ready) -> Iterator[StreamClient]:
    client = StreamClient(embedded.grpc)
    yield client
    client.close()
