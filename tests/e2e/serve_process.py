"""`tritongate serve` as a process, in front of a Triton that others share."""

from typing import Any

import httpx
import openai

from tests.e2e.up_process import TRITONGATE, metric
from tests.ports import free_ports
from tests.processes import Command, answers


class ServeProcess(Command):
    """One gateway and its address, once every model is ready.

    Args:
        upstream: the Triton's address.
        flags: of `serve`.
        key: the setting `repository_key`; None: as in the environment.
        log_level: of the gateway.
        variables: of its environment.
    """

    def __init__(
        self,
        upstream: str,
        *flags: str,
        key: str | None = None,
        log_level: str = "error",
        **variables: str,
    ) -> None:
        self.port = free_ports(1)[0]
        self.base_url = f"http://127.0.0.1:{self.port}"
        own = ("--upstreams", upstream, "--port", self.port, "--log-level", log_level)
        variables |= {} if key is None else {"TRITONGATE_REPOSITORY_KEY": key}
        super().__init__(TRITONGATE, "serve", *own, *flags, env={"TRITONGATE_WORKERS": "1"} | variables)
        self.wait_for(self.is_ready)

    def is_ready(self) -> bool:
        return answers(self.base_url + "/health/ready")

    def gauge(self, name: str, **labels: str) -> float:
        return metric(httpx.get(self.base_url + "/metrics", timeout=20).text, name, **labels)

    def sdk(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.base_url + "/v1", api_key="unused", max_retries=0, timeout=100, **options
        )

    def close(self) -> None:
        """End it at once, whatever it serves."""
        self.process.kill()
        super().close()
