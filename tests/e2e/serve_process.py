"""`tritongate serve` as a process, in front of a Triton that others share."""

import contextlib
import os
import subprocess
import threading
from typing import Any

import httpx
import openai

from tests.e2e.up_process import TRITONGATE, metric, wait_until
from tests.ports import free_ports
from tests.tied import tied


class ServeProcess:
    """One gateway, its address and what it wrote."""

    def __init__(self, upstream: str, *flags: str, log_level: str = "error", **variables: str) -> None:
        self.port = free_ports(1)[0]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.output = ""
        own = ("--upstreams", upstream, "--port", self.port, "--log-level", log_level)
        self.process = subprocess.Popen(
            tied(TRITONGATE, "serve", *own, *flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TRITONGATE_WORKERS": "1"} | variables,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        wait_until(self.is_ready, 60)

    def _read(self) -> None:
        for line in self.process.stdout:
            self.output += line.decode()

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self.base_url + "/health/ready", timeout=20).status_code == 200
        return False

    def gauge(self, name: str, **labels: str) -> float:
        return metric(httpx.get(self.base_url + "/metrics", timeout=20).text, name, **labels)

    def sdk(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.base_url + "/v1", api_key="unused", max_retries=0, timeout=100, **options
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
