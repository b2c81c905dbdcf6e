"""A packed environment on the real tritonserver: every place that `EXECUTION_ENV_PATH` can name."""

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from triton_models.embedded.installation import find_installation
from triton_models.embedded.server import HOST, Ports, TritonServer
from triton_models.embedded.warden import RunDirectory, environments
from triton_models.environment import build_environment, pack_environment
from wire.strings import unpack_strings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TIMEOUT_S = 100.0
ROOT = Path(__file__).parents[2]

MODEL = """
import json, sys
from importlib.util import find_spec
import numpy, triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        seen = {"prefix": sys.prefix, "numpy": numpy.__file__, "msgspec": bool(find_spec("msgspec"))}
        tensor = pb_utils.Tensor("seen", numpy.array([json.dumps(seen).encode()], dtype=object))
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]
"""
CONFIG = """
backend: "python"
input {{ name: "any" data_type: TYPE_INT32 dims: 1 }}
output {{ name: "seen" data_type: TYPE_STRING dims: 1 }}
instance_group {{ kind: KIND_CPU }}
parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{place}" }} }}
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No more than the stub itself needs, from pip: the engine's packages take minutes."""
    folder = tmp_path_factory.mktemp("pack")
    build_environment(
        folder / "environment",
        python=sys.executable,
        requirements=["numpy<2"],
        constraints=[ROOT / "constraints.txt"],
    )
    pack_environment(folder / "environment", folder / "x.tar.gz")
    return folder / "x.tar.gz"


class Bare:
    """A tritonserver without models, and without a supervisor."""

    def __init__(self, repository: Path, server: TritonServer, channel: grpc.Channel) -> None:
        self.repository = repository
        self.unpacked: set[Path] = set()
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        key, _, value = server.key.partition("=")
        self._metadata = ((f"triton-grpc-protocol-{key}", value),)

    def add(self, name: str, place: str) -> None:
        (self.repository / name / "1").mkdir(parents=True)
        (self.repository / name / "config.pbtxt").write_text(CONFIG.format(place=place))
        (self.repository / name / "1" / "model.py").write_text(MODEL)

    def load(self, name: str) -> None:
        request = pb.RepositoryModelLoadRequest(model_name=name)
        self._stub.RepositoryModelLoad(request, timeout=TIMEOUT_S, metadata=self._metadata)

    def ask(self, name: str) -> dict[str, Any]:
        request = pb.ModelInferRequest(model_name=name)
        request.inputs.add(name="any", datatype="INT32", shape=[1])
        request.raw_input_contents.append(b"\1\0\0\0")
        (raw,) = self._stub.ModelInfer(request, timeout=TIMEOUT_S).raw_output_contents
        seen: dict[str, Any] = json.loads(unpack_strings(raw)[0])
        self.unpacked.add(Path(seen["prefix"]))
        return seen


async def start(server: TritonServer) -> None:
    await (await server.start()).aclose()


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    repository = tmp_path_factory.mktemp("repository")
    run = RunDirectory.create(Path(tempfile.gettempdir()))
    installation = find_installation()
    installation.link_backends(run.backends)
    server = TritonServer(installation, run, repository, Ports())
    unpacked: set[Path] = set()
    try:
        asyncio.run(start(server))
        with grpc.insecure_channel(f"{HOST}:{server.ports.grpc}") as channel:
            bare = Bare(repository, server, channel)
            yield bare
            unpacked = bare.unpacked
    finally:
        server.stop()
        run.remove()
        # A server that is stopped early leaves its own folder. Other workers' servers have theirs beside it.
        for folder in environments() & {path.parent for path in unpacked}:
            shutil.rmtree(folder, ignore_errors=True)


def test_every_place_that_triton_documents(bare: Bare, archive: Path) -> None:
    places = {
        "beside": ("$$TRITON_MODEL_DIRECTORY/../x.tar.gz", bare.repository),
        "absolute": (str(archive), archive.parent),
        "within": ("$$TRITON_MODEL_DIRECTORY/1/x.tar.gz", bare.repository / "within" / "1"),
    }
    seen = {}
    for name, (place, folder) in places.items():
        bare.add(name, place)
        if folder != archive.parent:
            shutil.copy(archive, folder / "x.tar.gz")
        bare.load(name)
        seen[name] = bare.ask(name)
    for answer in seen.values():
        assert answer["prefix"].startswith("/tmp/python_env_")  # noqa: S108 - where Triton unpacks it
        assert answer["numpy"].startswith(answer["prefix"])
        # What runs the server and these tests has it; the archive has not.
        assert answer["msgspec"] is False
    assert len({answer["prefix"] for answer in seen.values()}) == len(places)


def test_entries_with_the_same_archive_share_what_was_unpacked(bare: Bare, archive: Path) -> None:
    for name in ("one", "other"):
        bare.add(name, str(archive))
        bare.load(name)
    assert bare.ask("one")["prefix"] == bare.ask("other")["prefix"]


def test_an_archive_that_is_not_there_is_the_loads_error(bare: Bare) -> None:
    bare.add("absent", "$$TRITON_MODEL_DIRECTORY/nowhere.tar.gz")
    with pytest.raises(grpc.RpcError, match=r"nowhere\.tar\.gz"):
        bare.load("absent")


def test_without_a_place_the_servers_own_environment_runs(bare: Bare) -> None:
    """So that the others prove something."""
    bare.add("own", "")
    bare.load("own")
    assert bare.ask("own")["msgspec"] is True
