"""A gateway of two processes, started by its command line, and clients that stream from it."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil

from tests.gateway.serving import CHAT, MESSAGES
from tests.gateway.triton.fake_triton import FakeTriton
from tests.ports import free_ports
from tests.processes import wait_ended
from tests.tied import tied

TRITONGATE = Path(sys.executable).with_name("tritongate")
STARTED_S = 60.0


class Gateway:
    """`tritongate serve --workers 2`."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    def workers(self) -> dict[int, psutil.Process]:
        """Return the living ones by process id."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return {each.pid: each for each in children if "gateway.process.workers" in each.cmdline()}

    async def series(self, name: str) -> dict[str, float]:
        """Return a metric's sums by worker."""
        sums: dict[str, float] = {}
        up = [f'tritongate_worker_up{{worker="{number}"}} 1.0' for number in range(2)]
        text = ""
        async with httpx.AsyncClient(timeout=30) as http:
            while not all(line in text for line in up):  # one that is slow to answer the other is left out
                await asyncio.sleep(0.05)
                text = (await http.get(self.url + "/metrics")).text
        for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE):
            worker = re.search(r'worker="(\d+)"', labels).group(1)
            sums[worker] = sums.get(worker, 0.0) + float(value)
        return sums

    async def wait_ready(self) -> None:
        """Wait until it says that it is."""
        async with asyncio.timeout(STARTED_S):
            while (await self.readiness())[0] != 200:  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.1)

    async def readiness(self) -> tuple[int, str]:
        """Return what a process says of it; 0 while none accepts connections, or the one asked starts."""
        async with httpx.AsyncClient(timeout=1) as http:
            try:
                answer = await http.get(self.url + "/health/ready")
            except httpx.TransportError:
                return 0, ""
        return answer.status_code, answer.text

    async def wait_serving(self) -> None:
        """Wait until each process serves, also one that was replaced."""
        async with asyncio.timeout(STARTED_S):
            while not await self.all_serve():  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.1)

    async def all_serve(self) -> bool:
        """Whether each process reaches the Triton."""
        return await self.series("tritongate_upstream_healthy") == {"0": 1, "1": 1}

    async def wait_draining(self) -> None:
        """Wait until a worker drains, which it does once the parent has taken a signal."""
        status = 200
        while status != 503:
            async with httpx.AsyncClient(timeout=30) as http:
                status = (await http.get(self.url + "/health/ready")).status_code


@asynccontextmanager
async def gateway_of_two(
    triton: FakeTriton, folder: Path, more: Mapping[str, int], *, wait: bool = True
) -> AsyncIterator[Gateway]:
    """Run one before `triton`, which is ready unless told not to wait.

    `folder` is on its Python path, and gets its log.
    """
    (port,) = free_ports(1)
    flags = {"--port": port, "--workers": 2, "--upstreams": triton.address, "--max-in-flight": 100}
    flags["--drain-s"] = 30  # longer than any answer here takes
    flags |= more
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *tied(TRITONGATE, "serve", *(str(word) for flag in flags.items() for word in flag)),
            stderr=log,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])},
        )
    gateway = Gateway(process, f"http://127.0.0.1:{port}")
    if wait:
        await gateway.wait_ready()
    children = gateway.workers()
    try:
        yield gateway
    finally:
        if process.returncode is None:
            children |= gateway.workers()
            process.terminate()
            await process.wait()
        assert not wait_ended(children.values(), 20)


async def stream(url: str) -> str:
    """Ask for a streamed answer over a connection of its own; return what came, however it ended."""
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    text = ""
    async with httpx.AsyncClient(timeout=60) as http:
        try:
            async with http.stream("POST", url + CHAT, json=body) as answer:
                async for piece in answer.aiter_text():
                    text += piece
        except httpx.TransportError:
            pass
    return text


def is_whole(text: str) -> bool:
    return '"finish_reason":"stop"' in text and text.endswith("data: [DONE]\n\n")
