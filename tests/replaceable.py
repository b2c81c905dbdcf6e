"""`tritongate serve` that is replaced by SIGUSR2: whichever process it is by now."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.processes import Command, answers, command_of

TRITONGATE = Path(sys.executable).with_name("tritongate")
WITHIN_S = 60.0


class ReplaceableGateway(Command):
    """A gateway that is ready, and those that take its place.

    Args:
        config: the file for its settings.
        settings: `port` among them.
        variables: of its environment.
    """

    def __init__(self, config: Path, settings: dict[str, Any], **variables: str) -> None:
        self._config = config
        self._settings: dict[str, Any] = {"workers": 1}
        self.configure(settings)
        super().__init__(TRITONGATE, "serve", "--config", config, env=variables)
        self.main = psutil.Process(self.process.pid)
        """The process that takes signals."""
        self.wait_for(self._begins)

    def _begins(self) -> bool:
        workers = int(self._settings["workers"])
        return self.said("listening") == workers and self.said("replica is ready") >= workers

    def configure(self, settings: dict[str, Any]) -> None:
        """Change settings, which the next process will have."""
        self._settings |= settings
        self._config.write_text(json.dumps(self._settings), encoding="utf-8")

    def said(self, message: str) -> int:
        """Return how many lines of its log say this."""
        return self.output.count(f'"message": "{message}"')

    def workers(self) -> list[psutil.Process]:
        return [each for each in self.main.children() if "gateway.process.workers" in command_of(each)]

    async def replace(self) -> list[psutil.Process]:
        """Have another process take its place; return those that serve no more."""
        before, said = [self.main, *self.workers()], self.said("handed over")
        self.main.send_signal(signal.SIGUSR2)
        serving = max(1, len(before) - 1)
        await self.until(lambda: self.said("handed over") == said + serving)
        self.main = psutil.Process(int(re.findall(r'"successor": (\d+)', self.output)[-1]))
        return before

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not holds():  # noqa: ASYNC110 - other processes'
                await asyncio.sleep(0.05)

    def is_ready(self) -> bool:
        return answers(f"http://127.0.0.1:{self._settings['port']}/health/ready")

    def close(self) -> None:
        """End it at once, whichever process it is."""
        self.process.kill()
        self.process.wait()
        self._kill_group()
        super().close()
