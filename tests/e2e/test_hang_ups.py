"""A client that hangs up frees the real engine within 250 ms, at each door: counted in the engine's steps.

How many steps the engine still takes for an answer that nobody waits for is a time by the engine's clock,
which a slow machine slows down like everything else.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc.aio
import httpx
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.e2e.test_load import until
from tests.e2e.up_process import UpProcess, metric, slowed
from tests.gateway.kserve.legacy import body, predict_body, question

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODEL = "chatglm3"
FREE_S = 0.25
LONG = 8000
"""Tokens, many seconds' worth; greedily, the answers to this prompt do not end by themselves."""
TRIES = 8
"""One that succeeds is enough, whatever else the machine did in others."""
HELLO = [{"role": "user", "content": "你好"}]
LEGACY = {"temperature": "0", "max_token": str(LONG)}
ENDLESS = {"model": MODEL, "temperature": 0, "max_tokens": LONG, "ignore_eos": True}
BODIES = {
    "/v1/chat/completions": ENDLESS | {"messages": HELLO},
    "/v1/completions": ENDLESS | {"prompt": "你好"},
    "/v1/messages": ENDLESS | {"messages": HELLO},
    "/MutilBackendService/Predict": predict_body(MODEL, {"prompt": "你好", "history": "", **LEGACY}),
    f"/v2/models/{MODEL}/infer": body(**LEGACY),
}
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/messages")

Ask = Callable[[UpProcess], Coroutine[Any, Any, None]]


def over_http(path: str, *, stream: bool) -> Ask:
    async def ask(up: UpProcess) -> None:
        document = BODIES[path] | ({"stream": True} if stream else {})
        async with (
            httpx.AsyncClient(timeout=100) as client,
            client.stream("POST", up.base_url + path, json=document) as answer,
        ):
            async for _ in answer.aiter_bytes():
                pass

    return ask


async def over_grpc(up: UpProcess) -> None:
    async with grpc.aio.insecure_channel(up.kserve_grpc) as channel:
        await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(question(MODEL, **LEGACY))


@dataclass(frozen=True)
class Report:
    """What the engine wrote last of its counters, which it does four times a second."""

    written_s: float
    running: float
    steps: float
    cancelled: float

    @classmethod
    async def read(cls, up: UpProcess) -> "Report":
        async with httpx.AsyncClient() as client:
            text = (await client.get(up.triton_metrics, timeout=20)).text
        return cls(
            metric(text, "tritongate_engine_heartbeat_timestamp_seconds", model=MODEL),
            metric(text, "tritongate_engine_requests_running", model=MODEL),
            metric(text, "tritongate_engine_step_seconds_count", model=MODEL),
            metric(text, "tritongate_engine_requests_total", model=MODEL, finish_reason="cancelled"),
        )

    async def next(self, up: UpProcess) -> "Report":
        """Return the one after it, as soon as it is there."""
        async with asyncio.timeout(60):
            while (await self.read(up)).written_s <= self.written_s:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.005)
        return await self.read(up)  # whole: the first may have been read while it was written


@pytest.mark.parametrize(
    "ask",
    [
        *(pytest.param(over_http(path, stream=False), id=path) for path in BODIES),
        *(pytest.param(over_http(path, stream=True), id=f"{path} streamed") for path in STREAMED),
        pytest.param(over_grpc, id="gRPC"),
    ],
)
async def test_few_steps_are_taken_for_nobody(ask: Ask, patient: UpProcess) -> None:
    tries: list[tuple[float, float]] = []
    while not tries or tries[-1][0] > tries[-1][1]:
        assert len(tries) < TRIES, tries
        tries.append(await steps_for_nobody(ask, patient))


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_sampled_for_nobody_is_counted(*, stream: bool, patient: UpProcess) -> None:
    """Of an answer that is not streamed, too, or clients that give up early would cost their keys nothing."""

    def told() -> tuple[float, float]:
        return (
            patient.gauge("tritongate_generated_tokens_total", model=MODEL),
            patient.gauge("tritongate_client_cancels_total", model=MODEL),
        )

    tokens, leavers = told()
    asking = asyncio.create_task(over_http("/v1/chat/completions", stream=stream)(patient))
    await until(lambda: told()[0] > tokens)
    assert not asking.done()
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await until(lambda: told()[1] == leavers + 1)
    assert tokens < told()[0] < tokens + LONG


async def steps_for_nobody(ask: Ask, up: UpProcess) -> tuple[float, float]:
    """Ask and leave; return how many steps the engine took then, and how many it takes in 250 ms.

    It is slowed until the gateway has noticed, which tests over its fake upstream time.
    """

    def left() -> float:
        return up.gauge("tritongate_client_cancels_total", model=MODEL)

    leavers = left()
    before = earlier = await Report.read(up)
    asking = asyncio.create_task(ask(up))
    now = await before.next(up)
    while not (earlier.running and now.running):
        assert not asking.done()
        earlier, now = now, await now.next(up)
    with slowed(up.stub(MODEL)):
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await until(lambda: left() == leavers + 1 and up.gauge("tritongate_requests_in_flight") == 0)
    after = now
    while after.running or after.cancelled == before.cancelled:
        after = await after.next(up)
    assert after.steps - before.steps < LONG / 2
    per_second = (now.steps - earlier.steps) / (now.written_s - earlier.written_s)
    return after.steps - now.steps, per_second * FREE_S
