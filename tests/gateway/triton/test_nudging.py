"""Models that a request reaches when the next one comes, as Triton's batcher does it now and then."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from gateway.triton import replicas
from tests.gateway.triton.conftest import FAST
from tests.gateway.triton.fake_triton import (
    FakeModel,
    accepted,
    finished,
    generation,
    hanging,
    hello,
    reply,
    until,
)
from tests.gateway.triton.test_tokenizing import entry, tokenization, two_ids
from wire.meta import Meta

PATIENT = replace(FAST, nudge_after_s=1.5)
"""Nothing here takes as long unless it is meant to."""


class Forgetful:
    """A stream entry that begins with a generation when a nudge has come; probes for health are no help."""

    def __init__(self, model: FakeModel) -> None:
        self.nudges: list[Any] = []
        self._come = asyncio.Event()
        self._report = model.report
        model.answer = self._answer
        model.probe = self._probe

    async def _answer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._come.wait()
        async for response in hello(request, context):
            yield response

    async def _probe(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if request.id == "nudge":
            self.nudges.append(request)
            self._come.set()
        yield reply(meta=Meta(probe=self._report), final=True)


async def run(pool: Any, **changes: Any) -> None:
    async for _ in pool.generate(generation(**changes)):
        pass


async def test_a_generation_that_triton_forgot_is_nudged_for(triton: Any, serve: Any, observer: Any) -> None:
    forgetful = Forgetful(triton.model)
    pool = await serve(triton, health=PATIENT)
    await run(pool)
    assert [request.id for request in forgetful.nudges] == ["nudge"]
    assert observer.nudges == {("m", triton.address): 1}


async def test_one_nudge_is_for_all_of_them(triton: Any, serve: Any, observer: Any) -> None:
    Forgetful(triton.model)
    pool = await serve(triton, health=PATIENT)
    await asyncio.gather(*(run(pool, request_id=f"r{number}") for number in range(20)))
    assert observer.nudges == {("m", triton.address): 1}


async def test_a_generation_that_was_accepted_may_take_its_time(
    triton: Any, serve: Any, observer: Any
) -> None:
    async def slow(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        await asyncio.sleep(4)
        yield finished("done", 1)

    triton.model.answer = slow
    pool = await serve(triton, health=PATIENT)
    await run(pool)
    assert not observer.nudges


async def test_a_model_that_is_slow_to_accept_is_nudged_once(triton: Any, serve: Any, observer: Any) -> None:
    async def slow(request: Any, context: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(5)
        yield accepted()
        yield finished("done", 1)

    triton.model.answer = slow
    pool = await serve(triton, health=PATIENT)
    await run(pool)
    assert observer.nudges == {("m", triton.address): 1}


async def test_a_tokenization_that_triton_forgot_is_nudged_for(
    triton: Any, serve: Any, observer: Any
) -> None:
    come = asyncio.Event()

    async def forgetful(request: Any, context: Any) -> Any:
        if request.id == "nudge":
            come.set()
        await come.wait()
        return await two_ids(request, context)

    triton.models["m-tokenizer"] = entry(forgetful)
    pool = await serve(triton, health=PATIENT)
    assert list((await pool.tokenize(tokenization())).ids) == [0, 5]
    assert observer.nudges == {("m", triton.address): 1}


async def test_a_model_of_which_no_request_is_cheap_is_left_alone(
    triton: Any, serve: Any, observer: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(replicas, "choose_nudges", lambda dialect: None)
    forgetful = Forgetful(triton.model)
    pool = await serve(triton, health=PATIENT)
    task = asyncio.create_task(run(pool))
    await until(lambda: triton.requests)
    await asyncio.sleep(4)
    assert not forgetful.nudges
    assert not observer.nudges
    task.cancel()


async def test_no_nudge_is_nudged_for(triton: Any, serve: Any, observer: Any) -> None:
    """Or a model that hangs would be sent them for ever."""

    async def silent(request: Any, context: Any) -> AsyncIterator[Any]:
        if request.id != "nudge":
            yield reply(meta=Meta(probe=triton.model.report), final=True)
        else:
            await asyncio.Event().wait()

    triton.model.answer = hanging()
    triton.model.probe = silent
    pool = await serve(triton, health=PATIENT)
    task = asyncio.create_task(run(pool))
    await until(lambda: observer.nudges.total() == 1)
    task.cancel()
    await asyncio.sleep(4)
    assert observer.nudges.total() == 1
