"""`tritongate up` with several gateway processes in front of one engine."""

import asyncio
from collections.abc import Iterator

import openai
import psutil
import pytest

from tests.e2e.up_process import GOLDEN, UpProcess, command_of, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

WORKERS = 2
STREAMS = 16
TOKENS = 480
"""With the candidates for each, it takes an engine of two processors some seconds."""
WITHIN_S = 100.0


@pytest.fixture
def up() -> Iterator[UpProcess]:
    process = UpProcess("--model", str(GOLDEN / "chatglm3"), "--workers", str(WORKERS))
    try:
        yield process.wait_ready()
    finally:
        process.close()


def workers(up: UpProcess) -> list[psutil.Process]:
    return [process for process in up.tree() if "gateway.worker" in command_of(process)]


async def answer(up: UpProcess, begun: asyncio.Event, killed: asyncio.Event) -> int | None:
    """Stream over a connection of its own, at its own pace after the kill; None if the stream broke."""
    async with openai.AsyncOpenAI(
        base_url=up.base_url + "/v1", api_key="unused", max_retries=0, timeout=WITHIN_S
    ) as sdk:
        tokens = 0
        try:
            stream = await sdk.chat.completions.create(
                model="chatglm3",
                messages=[{"role": "user", "content": "你好"}],
                stream=True,
                max_tokens=TOKENS,
                logprobs=True,
                top_logprobs=20,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                begun.set()
                await killed.wait()
                if chunk.usage is not None:
                    tokens = chunk.usage.completion_tokens
        except openai.APIError:
            return None
        return tokens


async def test_a_killed_worker_frees_what_it_asked_for_and_the_others_go_on(up: UpProcess) -> None:
    begun, killed = [asyncio.Event() for _ in range(STREAMS)], asyncio.Event()
    answers = [asyncio.create_task(answer(up, each, killed)) for each in begun]
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(*(each.wait() for each in begun))
    victim, _ = workers(up)
    victim.kill()
    killed.set()
    tokens = await asyncio.gather(*answers)
    assert None in tokens
    assert {each for each in tokens if each is not None} == {TOKENS}
    await asyncio.to_thread(wait_until, lambda: up.gauge("tritongate_engine_kv_blocks_used") == 0)
    await asyncio.to_thread(wait_until, lambda: len(workers(up)) == WORKERS, WITHIN_S)
    await asyncio.to_thread(wait_until, lambda: up.gauge("tritongate_upstream_healthy") == WORKERS, WITHIN_S)
    assert victim not in workers(up)
    assert all([await answer(up, asyncio.Event(), killed) for _ in range(4)])
    assert up.stop() == 0
