"""As `tests/gateway/http/test_garbage.py`, of requests through the door: freed when they are over."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import grpc.aio
import pytest

from gateway.http.record import RequestRecord
from gateway.http.run import RunningRequest
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.kserve.legacy import body, over_grpc, question, tensor
from tests.gateway.kserve.test_logits import IDS, telling
from tests.gateway.kserve.test_logits import body as logits_body
from tests.gateway.serving import on_socket, until

KINDS = (RequestRecord, RunningRequest)
CHANGES = [{}, {"temperature": "99"}, {"prompt": None}]


@pytest.mark.parametrize("changes", CHANGES)
async def test_over_http(changes: dict[str, str | None], living: Callable[..., int]) -> None:
    async with on_socket(FakeUpstream(lambda _: say("a", "b"))) as served:
        for _ in range(3):
            await served.http.post("/v2/models/glm/infer", json=body(**changes))
        await served.http.get("/version")  # a connection keeps its last request until it has another one
        await until(lambda: living(*KINDS) <= 1)


@pytest.mark.parametrize("ids", [IDS, [[1, 2]]])
async def test_logits(ids: list[list[int]], living: Callable[..., int]) -> None:
    async with on_socket(FakeUpstream(telling()), contract="logits") as served:
        for _ in range(3):
            await served.http.post("/v2/models/glm/infer", json=logits_body(ids))
            texts = {"inputs": [tensor("TEXT", ["a", "b"], [2])]}
            await served.http.post("/v2/models/glm_tokenizer/infer", json=texts)
        await served.http.get("/version")
        await until(lambda: living(*KINDS) <= 1)


@pytest.mark.parametrize("changes", [*CHANGES, None])
async def test_over_grpc(changes: dict[str, str | None] | None, living: Callable[..., int]) -> None:
    gap_s = 10 if changes is None else 0
    async with over_grpc(FakeUpstream(lambda _: say("a", "b", gap_s=gap_s))) as (served, stub, _):
        for _ in range(3):
            call = stub.ModelInfer(question(**changes or {}))
            if changes is None:
                await until(lambda: served.upstream.running == 1)
                call.cancel()
            with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                await call
            del call
        await until(lambda: living(*KINDS) == 0)
