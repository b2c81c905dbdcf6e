"""Tritonserver 2.51 forgets requests in `M-stream`'s queue for half a second: bursts of a few are enough."""

import asyncio
import time

import httpx
import pytest

from tests.e2e.up_process import UpProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BURST = 8
LIMIT_S = 120.0
"""Of every ten bursts one or two have one."""


def nudges(up: UpProcess) -> float:
    return up.gauge("tritongate_upstream_nudges_total", model="chatglm3")


def errors(up: UpProcess) -> float:
    return up.gauge("tritongate_upstream_errors_total", model="chatglm3")


async def test_forgotten_requests_are_nudged_for_and_all_are_answered(up: UpProcess) -> None:
    document = {"model": "chatglm3", "prompt": "你好", "max_tokens": 1, "temperature": 0}
    failed, before = await asyncio.to_thread(errors, up), await asyncio.to_thread(nudges, up)
    async with httpx.AsyncClient(base_url=up.base_url, timeout=60) as client:
        first = (await client.post("/v1/completions", json=document)).json()
        end = time.monotonic() + LIMIT_S
        while await asyncio.to_thread(nudges, up) == before:
            assert time.monotonic() < end, "nothing was nudged for"
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=document) for _ in range(BURST))
            )
            assert {answer.status_code for answer in answers} == {200}
            assert all(answer.json()["choices"] == first["choices"] for answer in answers)
    assert await asyncio.to_thread(errors, up) == failed
