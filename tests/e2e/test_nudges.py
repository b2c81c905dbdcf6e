"""Tritonserver 2.51 forgets requests in its queues for half a second: bursts of a few are enough."""

import asyncio
import time

import httpx
import pytest

from tests.e2e.up_process import UpProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BURST = 8
LIMIT_S = 120.0
"""Of every ten bursts of tokenizations some have one; of generations, one or two."""


def nudges(up: UpProcess) -> float:
    return up.gauge("tritongate_upstream_nudges_total", model="chatglm3")


def errors(up: UpProcess) -> float:
    return up.gauge("tritongate_upstream_errors_total", model="chatglm3")


async def test_forgotten_requests_are_nudged_for_and_all_are_answered(up: UpProcess) -> None:
    ways = {
        "/tokenize": {"model": "chatglm3", "prompt": "你好"},
        "/v1/completions": {"model": "chatglm3", "prompt": "你好", "max_tokens": 1, "temperature": 0},
    }
    failed = await asyncio.to_thread(errors, up)
    async with httpx.AsyncClient(base_url=up.base_url, timeout=60) as client:
        for path, document in ways.items():
            first = (await client.post(path, json=document)).json()
            before = await asyncio.to_thread(nudges, up)
            end = time.monotonic() + LIMIT_S
            while await asyncio.to_thread(nudges, up) == before:
                assert time.monotonic() < end, f"nothing was nudged for at {path}"
                answers = await asyncio.gather(*(client.post(path, json=document) for _ in range(BURST)))
                assert {answer.status_code for answer in answers} == {200}
                for key in ("tokens", "choices"):
                    assert all(answer.json().get(key) == first.get(key) for answer in answers)
    assert await asyncio.to_thread(errors, up) == failed
