"""`tritongate up` with several gateway processes in front of one engine."""

import asyncio

import psutil
import pytest

from tests.e2e.unread_answer import TOKENS, UnreadAnswer
from tests.e2e.up_process import UpProcess, wait_until
from tests.processes import command_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

WORKERS = 2
STREAMS = 16
"""The kernel gives each to either worker: that one of them gets none is as good as out of the question."""
WITHIN_S = 100.0


def workers(up: UpProcess) -> list[psutil.Process]:
    return [process for process in up.tree() if "gateway.process.workers" in command_of(process)]


async def test_a_killed_worker_frees_what_it_asked_for_and_the_others_go_on(traced: UpProcess) -> None:
    async with asyncio.timeout(WITHIN_S):
        answers = await asyncio.gather(*(UnreadAnswer.begin(traced.base_url) for _ in range(STREAMS)))
        victim, _ = workers(traced)
        victim.kill()
        tokens = await asyncio.gather(*(each.read() for each in answers))
    assert set(tokens) == {None, TOKENS}
    await asyncio.to_thread(wait_until, lambda: traced.gauge("tritongate_engine_kv_blocks_used") == 0)
    await asyncio.to_thread(wait_until, lambda: len(workers(traced)) == WORKERS, WITHIN_S)
    await asyncio.to_thread(
        wait_until, lambda: traced.gauge("tritongate_upstream_healthy") == WORKERS, WITHIN_S
    )
    assert victim not in workers(traced)
    for _ in range(4):
        assert await (await UnreadAnswer.begin(traced.base_url)).read() == TOKENS
    assert traced.stop() == 0
