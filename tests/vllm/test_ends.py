"""The other way to run it, an entry of the Python backend with its own environment; and how it ends."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.e2e.serve_process import ServeProcess
from tests.e2e.stock_server import stock_server
from tests.processes import wait_ended
from tests.vllm.checkpoint import write_checkpoint
from tests.vllm.conftest import ENVIRONMENT, MODEL, engines, variables, write_repository

LONG: Any = {"model": "llama", "prompt": "and", "max_tokens": 1000, "extra_body": {"ignore_eos": True}}


async def read(sdk: openai.AsyncOpenAI, begun: asyncio.Event) -> None:
    async for _ in await sdk.completions.create(**LONG, stream=True):
        begun.set()


async def test_an_engine_that_dies_ends_every_request_at_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    repository = write_repository(tmp_path, "llama", backend="python")
    (repository / "llama" / "1" / "model.py").write_text(MODEL, encoding="utf-8")
    config = repository / "llama" / "config.pbtxt"
    parameter = f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{ENVIRONMENT}" }} }}\n'
    config.write_text(config.read_text() + parameter, encoding="utf-8")
    before = engines()
    with stock_server(repository, temporary=tmp_path, environment=variables(tmp_path), ready_s=300) as triton:
        # Before there are streams: to look for it takes time, in which they go on.
        (engine,) = [each for each in engines() if each not in before]
        gateway = ServeProcess(triton.grpc)
        try:
            async with gateway.sdk() as sdk:
                begun = [asyncio.Event() for _ in range(4)]
                reading = [asyncio.create_task(read(sdk, event)) for event in begun]
                await asyncio.gather(*(event.wait() for event in begun))
                waiting = asyncio.create_task(sdk.completions.create(**LONG))
                engine.kill()
                for ended in await asyncio.gather(*reading, waiting, return_exceptions=True):
                    assert isinstance(ended, openai.APIError)
                    assert "not ready" in str(ended)
                async with httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client:
                    body = {"model": "llama", "prompt": "and"}
                    late = await client.post("/v1/completions", json=body)
                assert late.status_code == 503
        finally:
            gateway.close()
    assert not wait_ended([engine], 20)
