"""Tritons as `deploy/kubernetes` has them: the same command, restrictions included, ended by SIGTERM."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import yaml
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.deploy.compose_stack import _TRITONSERVER
from tests.e2e.up_process import GOLDEN, RESTARTS, starved
from tests.ports import free_ports
from tests.processes import START_S, Command

ROOT = Path(__file__).parents[2]
MODEL = "chatglm3-6b"
RESTRICTED_KEY = "s3cret"


def stateful_set() -> Any:
    documents = yaml.safe_load_all((ROOT / "gateway/manifests/base/triton.yaml").read_text(encoding="utf-8"))
    (found,) = [each["spec"] for each in documents if each["kind"] == "StatefulSet"]
    return found


class ManifestTriton:
    """One Triton of the manifest on this machine, with a golden checkpoint; `start` it.

    Args:
        folder: for its log and what it keeps while it runs.
        host: loopback address to listen on.
        grpc_port: None takes a free one.
        changes: arguments of the manifest that are others here, by their name with dashes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        grpc_port: int | None = None,
        changes: dict[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._prefix = f"tritongate_{os.getpid()}_{folder.name}_"
        self._command: Command | None = None
        self._host = host
        port, metrics = free_ports(2)
        port = grpc_port or port
        self.grpc = f"{host}:{port}"
        here = {
            "--grpc-port": str(port),
            "--metrics-port": str(metrics),
        }
        here |= {"--model": f"{MODEL}={GOLDEN / 'chatglm3'}", "--device": "cpu", "--dtype": "float32"}
        self._changes = here | (changes or {})

    def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        # Each has shared memory of its own, as in containers.
        server = self._folder / "tritonserver"
        server.write_text(_TRITONSERVER.format(python=sys.executable, prefix=self._prefix))
        server.chmod(0o755)
        paths = {"PATH": f"{self._folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        paths["TRITONGATE_REPOSITORY_KEY"] = f"admin-key={RESTRICTED_KEY}"
        temporary = {"TMPDIR": str(self._folder), "OMP_NUM_THREADS": "1"}
        program = [sys.executable, str(ROOT / "deploy/docker/start_triton.py")]
        self._command = Command(*program, *self._arguments(), env=paths | temporary)

    def _arguments(self) -> list[str]:
        words = stateful_set()["template"]["spec"]["containers"][0]["args"]
        words = [
            f"{name}={self._changes[name]}" if (name := word.partition("=")[0]) in self._changes else word
            for word in words
        ]
        added = self._changes.keys() - {word.partition("=")[0] for word in words}
        words += [f"{name}={self._changes[name]}" for name in sorted(added)]
        return [*words, *(f"--{name}-address={self._host}" for name in ("grpc", "metrics"))]

    def wait_ready(self, within_s: float = START_S) -> None:
        deadline = time.monotonic() + within_s
        restarts = 0
        while not self.is_ready():
            assert self._command is not None
            if (status := self._command.ended()) is not None:
                assert restarts < RESTARTS, (status, self._command.output)
                assert starved(status, self._command.output), (status, self._command.output)
                restarts += 1
                self.start()  # as the kubelet does
            assert time.monotonic() < deadline, self._command.output
            time.sleep(0.2)

    def is_ready(self) -> bool:
        with grpc.insecure_channel(self.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                return bool(stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=20).ready)
            except grpc.RpcError:
                return False

    def stop(self) -> float:
        """End it by SIGTERM, as an orchestrator does; return the seconds that it took."""
        assert self._command is not None
        began = time.monotonic()
        # The wheel's server aborts at its very end if another one here removed its folder in /tmp: no status.
        self._command.process.send_signal(signal.SIGTERM)
        self._command.process.wait(80)
        return time.monotonic() - began

    def close(self) -> None:
        if self._command is not None:
            self._command.close()
        for region in Path("/dev/shm").glob(f"{self._prefix}*"):  # noqa: S108 - where they are
            region.unlink(missing_ok=True)
