"""The services of docker-compose.yml as processes of this machine: its commands, environments and volumes.

What differs, and nothing else: ports are free ones, host names and 0.0.0.0 the loopback, paths in containers
folders of ours, the GPU is the CPU, and `tritonserver` is the one of the wheel. The environment of each
process is what Compose would give it: none of this process's own.
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import psutil

from tests.deploy.compose_file import EXAMPLE_KEYS, ROOT, copied, entrypoint, load_compose, read_env
from tests.e2e.up_process import RESTARTS, starved
from tests.ports import free_ports
from tests.processes import START_S, alive, children_of
from tests.tied import tied
from triton_models.embedded.warden import remove_environments

KEY = "a key of the tests"
STOP_TIMEOUT_S = 20
_ENTRYPOINTS = {"prometheus": ["prometheus"]}
"""Of images that are not ours."""
_TRITONSERVER = """#!{python}
import os, sys, tempfile
from pathlib import Path
from triton_models.embedded.installation import find_installation
found = find_installation()
temporary = Path(tempfile.mkdtemp(prefix="server-"))
found.link_backends(temporary / "backends")
shared_memory = "--backend-config=python,shm-region-prefix-name={prefix}"
here = [f"--backend-directory={{temporary}}/backends", shared_memory]
os.execve(
    found.server, ["tritonserver", *sys.argv[1:], *here], found.environment(os.environ, temporary=temporary)
)
"""


def keys_in(folder: Path) -> Path:
    """Write what deploy/keys.env would be, with `KEY`."""
    keys = folder / "keys.env"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys.write_text(re.sub(r"<.*>", digest, EXAMPLE_KEYS.read_text(encoding="utf-8")))
    return keys


class ComposeStack:
    """Services in `folder`; as a context, what was started is ended with it."""

    def __init__(self, folder: Path, env: dict[str, str], keys: Path) -> None:
        self.folder = folder
        self.document = load_compose(env)
        self.said = ""
        """What health checks said."""
        self._keys = keys
        self._shared_memory = f"tritongate_compose_{os.getpid()}_"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._tree: dict[int, psutil.Process] = {}
        self._hosts = "|".join(
            [r"0\.0\.0\.0", r"127\.0\.0\.1", "triton", *map(re.escape, self.document["services"])]
        )
        self._ports: dict[tuple[str, str], str] = {}
        binaries = folder / "bin"
        binaries.mkdir()
        server = binaries / "tritonserver"
        server.write_text(_TRITONSERVER.format(python=sys.executable, prefix=self._shared_memory))
        server.chmod(0o755)
        self._path = f"{binaries}:{Path(sys.executable).parent}:/usr/bin:/bin"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self._processes)):
            self.stop(name)
        for process in self._tree.values():
            if alive(process):
                process.kill()
        remove_environments()
        for region in Path("/dev/shm").glob(f"{self._shared_memory}*"):  # noqa: S108 - where they are
            region.unlink(missing_ok=True)

    def address(self, name: str, port: str) -> str:
        """Return where a port of a service's container is here."""
        return f"127.0.0.1:{self._port(name, port)}"

    def _port(self, name: str, port: str) -> str:
        owner = "triton" if name.startswith("triton") else name  # the alias of whichever runs
        if (owner, port) not in self._ports:
            self._ports[owner, port] = str(free_ports(1)[0])
        return self._ports[owner, port]

    def start(self, name: str) -> "subprocess.Popen[bytes]":
        service = self.document["services"][name]
        before = entrypoint(service) if "build" in service else _ENTRYPOINTS[name]
        command = [*before, *service["command"]]
        self._processes[name] = self._run(name, command)
        return self._processes[name]

    def healthy(self, name: str, *more: str) -> "subprocess.CompletedProcess[str]":
        """Run the service's health check once."""
        kind, *command = self.document["services"][name]["healthcheck"]["test"]
        assert kind == "CMD"
        done = self._run_to_end(name, [*command, *more])
        self.said += done.stdout
        return done

    def wait_healthy(self, name: str, timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        restarts = 0
        while (done := self.healthy(name)).returncode != 0:
            status = self._processes[name].poll()  # before the log is read, so that all is in it
            said = done.stdout + done.stderr + self.log(name)
            if status is not None:
                assert restarts < RESTARTS, (status, said)
                assert starved(status, said), (status, said)
                restarts += 1
                self.start(name)  # the restart policy
            assert time.monotonic() < deadline, said
            time.sleep(1)  # each check is a process, which takes half a second of a processor
        self._remember()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def process(self, name: str) -> psutil.Process:
        return psutil.Process(self._processes[name].pid)

    def stop(self, name: str) -> int:
        """End a service as Compose does."""
        self._remember()
        process = self._processes[name]
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def kill(self, name: str) -> None:
        """End a service as a container's end does: nothing of it goes on."""
        self._remember()
        self._processes[name].kill()
        self._processes[name].wait()
        for process in self._tree.values():
            if alive(process):
                process.kill()

    def _remember(self) -> None:
        for process in self._processes.values():
            self._tree.update((child.pid, child) for child in children_of(process.pid))

    def _run(self, name: str, command: list[str]) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                tied(*(self.here(name, word) for word in command)),
                env=self._environment(name),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _run_to_end(self, name: str, command: list[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self.here(name, word) for word in command],
            env=self._environment(name),
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

    def _environment(self, name: str) -> dict[str, str]:
        service = self.document["services"][name]
        given = dict(service.get("environment", {}))
        for path in service.get("env_file", []):
            assert path == "deploy/keys.env"
            given = read_env(self._keys) | given
        temporary = self.folder / name / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        values = {
            key: self._port(name, value) if key.endswith("_PORT") else self.here(name, str(value))
            for key, value in given.items()
        }
        return {"PATH": self._path, "HOME": str(temporary), "TMPDIR": str(temporary)} | values

    def here(self, name: str, text: str) -> str:
        """Say with this machine's ports, addresses and paths what `text` says in the container of `name`."""
        service = self.document["services"][name]
        for inside, outside in self._mounts(name, service).items():
            text = re.sub(rf"(?<![\w./-]){re.escape(inside)}(?=$|/)", str(outside), text)
        text = self._addresses(name, text)
        text = re.sub(r"(-port=)(\d+)$", lambda found: found[1] + self._port(name, found[2]), text)
        if text.startswith("--end-process="):
            return f"--end-process={self._processes[name].pid}"
        text = text.replace("--device=cuda:0", "--device=cpu")
        return text.replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - away from it

    def _addresses(self, name: str, text: str) -> str:
        """Replace host:port; an address without a service's name is the own container's."""

        def put(found: re.Match[str]) -> str:
            return self.address(name if found[1][0].isdigit() else found[1], found[2])

        return re.sub(rf"\b({self._hosts}):(\d+)\b", put, text)

    def _mounts(self, name: str, service: dict[str, Any]) -> dict[str, Path]:
        found = copied(service) if "build" in service else {}
        for volume in service.get("volumes", []):
            source, target, *_ = volume.split(":")
            if source.startswith((".", "/")):
                found[target] = self.replaced.get(source, ROOT / source)
            else:
                found[target] = self.folder / name / source
                found[target].mkdir(parents=True, exist_ok=True)
        return dict(sorted(found.items(), key=lambda item: -len(item[0])))

    @property
    def replaced(self) -> dict[str, Path]:
        """Folders of the repository that a service gets a copy of, with addresses that hold here."""
        target = self.folder / "prometheus-config"
        if not target.exists():
            shutil.copytree(ROOT / "deploy" / "prometheus", target)
            config = target / "prometheus.yml"
            text = re.sub(r"_interval: \d+s", "_interval: 1s", config.read_text(encoding="utf-8"))
            config.write_text(self._addresses("prometheus", text), encoding="utf-8")
        return {"./deploy/prometheus": target}
