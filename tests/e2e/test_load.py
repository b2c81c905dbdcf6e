"""Many at once: nobody's answer depends on anybody else, and what is left behind is nothing."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import openai
import pytest

from tests.e2e.stream_client import StreamClient
from tests.e2e.up_process import UpProcess, slowed, stopped, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CLIENTS = 64
DROPPED = 200
LONG = 480
"""Tokens of an answer that is long: near the context's end."""
A_FEW = 6000
"""Tokens: the engine gets cancels up to a hundred steps later than the gateway knows, which take it some
tenths of a second. Without cancels it would be 15,000."""
HUNG_UP_S = 30.0
"""Some tenths of a second as a rule, two on a bad day; more where the machine is slow."""
FIRST_TOKENS = "tritongate_engine_time_to_first_token_seconds_count"
GENERATED = "tritongate_engine_generated_tokens_total"
GAUGES = (
    "tritongate_engine_requests_running",
    "tritongate_engine_requests_waiting",
    "tritongate_engine_kv_blocks_used",
    "tritongate_requests_in_flight",
    "tritongate_requests_waiting",
)


def different(number: int) -> dict[str, Any]:
    """A request unlike its neighbours in prompt, length, temperature, truncation and seed."""
    return {
        "model": "chatglm3",
        "messages": [{"role": "user", "content": f"第{number}个问题：{'天气' * (number % 9)} {number}?"}],
        "temperature": (0, 0.3, 0.7, 1.0, 1.5)[number % 5],
        "top_p": (1.0, 0.9, 0.5)[number % 3],
        "max_tokens": 8 + number * 7 % 60,
        "seed": 1000 + number,
        "extra_body": {"top_k": (0, 5, 50)[number % 3]},
    }


async def streamed(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> tuple[str, str, int]:
    """Return text, finish reason and completion tokens."""
    text, reason, tokens = "", "", -1
    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    return text, reason, tokens


def sdk(up: UpProcess) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=up.base_url + "/v1", api_key="unused", max_retries=0, timeout=100)


async def test_every_answer_is_what_it_is_alone(up: UpProcess) -> None:
    async with sdk(up) as client:
        asked = [different(number) for number in range(CLIENTS)]
        alone = [await streamed(client, each) for each in asked]
        together = await asyncio.gather(*(streamed(client, each) for each in asked))
    assert together == alone
    assert len({text for text, _, _ in alone}) > CLIENTS // 2
    await idle(up)


async def test_a_burst_is_batched_by_triton(up: UpProcess, triton: StreamClient) -> None:
    before = triton.statistics("chatglm3")
    asked = different(1) | {"max_tokens": 2}
    async with sdk(up) as client:
        # One by one they would come as slowly as this loop sends them, and each be executed by itself.
        with stopped(up.server()):
            clients = [asyncio.create_task(streamed(client, asked)) for _ in range(CLIENTS)]
            await until(lambda: in_flight(up) == CLIENTS)
        await asyncio.gather(*clients)
    inferences, executions = (
        new - old for new, old in zip(triton.statistics("chatglm3"), before, strict=True)
    )
    assert inferences >= CLIENTS
    assert executions < inferences


async def test_half_of_the_clients_hang_up(up: UpProcess) -> None:
    asked = different(3) | {"max_tokens": LONG, "extra_body": {"ignore_eos": True}}
    before = up.gauge(GENERATED)
    async with sdk(up) as client:

        async def one() -> None:
            async with await client.chat.completions.create(**asked, stream=True) as answer:
                async for _ in answer:
                    pass

        with held_after_first_tokens(up) as begun:
            clients = [asyncio.create_task(one()) for _ in range(CLIENTS)]
            await begun(CLIENTS)
            for leaving in clients[::2]:
                leaving.cancel()
            await until(lambda: in_flight(up) <= CLIENTS // 2)
            await asyncio.to_thread(up.wait_counted, "chatglm3")
            until_left = up.gauge(GENERATED) - before
        stayed = await asyncio.gather(*clients, return_exceptions=True)
    await idle(up)
    await asyncio.to_thread(up.wait_counted, "chatglm3")
    sampled = up.gauge(GENERATED) - before
    # All had equally many until then, and half of them went on: without a cancel, all would.
    whole = CLIENTS // 2 * LONG + until_left / 2
    assert CLIENTS // 2 * LONG <= sampled < whole + A_FEW, "sequences outlive the clients that hung up"
    assert [type(each) for each in stayed[1::2]] == [type(None)] * (CLIENTS // 2)
    assert all(isinstance(each, asyncio.CancelledError) for each in stayed[::2])


async def test_two_hundred_that_are_dropped_leave_room_for_the_next(up: UpProcess) -> None:
    asked = different(3) | {"max_tokens": LONG, "extra_body": {"ignore_eos": True}}
    before = up.gauge(GENERATED)
    async with sdk(up) as client:
        with held_after_first_tokens(up) as begun:
            dropped = [asyncio.create_task(streamed(client, asked)) for _ in range(DROPPED)]
            await begun(DROPPED // 2)
            for each in dropped:
                each.cancel()
            await asyncio.gather(*dropped, return_exceptions=True)
        async with asyncio.timeout(HUNG_UP_S):
            _, reason, tokens = await streamed(client, different(1) | {"max_tokens": 2})
    assert all(each.cancelled() for each in dropped)
    assert reason in {"stop", "length"}
    assert tokens <= 2
    await idle(up)
    await asyncio.to_thread(up.wait_counted, "chatglm3")
    sampled = up.gauge(GENERATED) - before
    assert sampled < DROPPED * LONG / 2, "running sequences outlive the clients that hung up"


@contextlib.contextmanager
def held_after_first_tokens(up: UpProcess) -> Iterator[Callable[[int], Awaitable[None]]]:
    """Slow the engine down until the block ends; yields what waits until so many requests have begun.

    Otherwise it would be a race between the engine, which is quick, and tests that look at what it does.
    """
    first_tokens = up.gauge(FIRST_TOKENS)

    async def begun(count: int) -> None:
        await until(lambda: in_flight(up) >= count and up.gauge(FIRST_TOKENS) > first_tokens)

    with slowed(up.stub("chatglm3")):
        yield begun


def in_flight(up: UpProcess) -> float:
    return up.gauge("tritongate_requests_in_flight")


async def until(holds: Any) -> None:
    await asyncio.to_thread(wait_until, holds)


async def idle(up: UpProcess) -> None:
    await until(lambda: all(up.gauge(name) == 0 for name in GAUGES))
