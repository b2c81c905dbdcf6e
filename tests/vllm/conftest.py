"""The real vLLM, in an environment of its own, behind the real tritonserver and the gateway."""

import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest
from tokenizers import Tokenizer

from tests.e2e.serve_process import ServeProcess
from tests.e2e.stock_server import StockServer, stock_server
from tests.processes import command_of, wait_ended
from tests.vllm.checkpoint import CONTEXT, write_checkpoint
from triton_models.embedded.installation import find_installation

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-vllm"

MODEL = 'from triton_models.vllm.model import TritonPythonModel\n\n__all__ = ["TritonPythonModel"]\n'
CONFIG = """backend: "{backend}"
instance_group [ {{ count: 1 kind: KIND_MODEL }} ]
parameters {{ key: "REPORT_CUSTOM_METRICS" value {{ string_value: "true" }} }}
"""
ARGUMENTS = {
    "load_format": "dummy",
    "dtype": "float32",
    "enforce_eager": "true",  # as text: the official examples write it so
    "max_model_len": CONTEXT,
    "max_num_seqs": 64,
    "enable_prefix_caching": False,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(600))


@dataclass(frozen=True)
class Served:
    """A served model.

    Attributes:
        tokenizer: its own.
        checkpoint: its folder.
    """

    triton: StockServer
    gateway: ServeProcess
    tokenizer: Tokenizer
    checkpoint: Path

    def finished(self, reason: str) -> float:
        """Return how many requests the engine ended for this reason."""
        return self.triton.gauge("vllm:request_success_total", finished_reason=reason)


def write_repository(folder: Path, name: str, *, backend: str) -> Path:
    """Write a repository with one entry of the checkpoint `folder/checkpoint`, for the official backend."""
    version = folder / "repository" / name / "1"
    version.mkdir(parents=True)
    arguments = {"model": str(folder / "checkpoint")} | ARGUMENTS
    (version / "model.json").write_text(json.dumps(arguments), encoding="utf-8")
    (version.parent / "config.pbtxt").write_text(CONFIG.format(backend=backend), encoding="utf-8")
    return version.parents[1]


def write_backends(folder: Path) -> Path:
    """Make a backend directory with the Python backend, and ours under the name `vllm`.

    Triton takes no link that leads out of the directory where another backend is built on the Python one.
    """
    for name in ("python", "vllm"):
        (folder / name).mkdir(parents=True)
    for file in find_installation().backend:
        shutil.copy(file, folder / "python")
    (folder / "vllm" / "model.py").write_text(MODEL, encoding="utf-8")
    return folder


def variables(temporary: Path) -> dict[str, str]:
    """Return a server's environment whose stubs find our packages, and are told to keep to this machine."""
    found = find_installation().environment(os.environ, temporary=temporary)
    # On a CPU, vLLM computes in a process beside its engine's, and both spin while they wait for each other.
    # With two cores, clients and gateway then get none for seconds, and the streams come late. So the engine
    # computes itself, as it does with one GPU.
    found["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return found | {
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def engines() -> list[psutil.Process]:
    """Return vLLM's engine processes below this one."""
    below = psutil.Process().children(recursive=True)
    return [each for each in below if any("EngineCore" in word for word in command_of(each))]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A user's repository for the official backend, with ours in its place: `backend: "vllm"`."""
    folder = tmp_path_factory.mktemp("vllm")
    tokenizer = write_checkpoint(folder / "checkpoint")
    repository = write_repository(folder, "llama", backend="vllm")
    environment = variables(folder)
    # The stub takes the first python3 on PATH: of the environment that has vLLM.
    environment["PATH"] = f"{ENVIRONMENT / 'bin'}:{environment['PATH']}"
    with stock_server(
        repository,
        temporary=folder,
        backends=write_backends(folder / "backends"),
        environment=environment,
        ready_s=300,
    ) as triton:
        gateway = ServeProcess(triton.grpc, "--tokenizers", str(folder / "checkpoint"))
        running = engines()
        try:
            yield Served(triton, gateway, tokenizer, folder / "checkpoint")
        finally:
            gateway.close()
    assert len(running) == 1
    assert not wait_ended(running, 20)


@pytest.fixture
async def sdk(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served.gateway.sdk() as sdk:
        yield sdk
