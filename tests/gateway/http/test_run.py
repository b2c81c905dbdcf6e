"""The race itself, at the moments that a real socket cannot be brought to hit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.app import create_app
from gateway.core.events import Accepted
from gateway.core.request import Generation, PlainText
from gateway.errors import ClientGoneError, DeadlineError, InvalidRequestError, UnavailableError
from gateway.http.record import RequestRecord
from gateway.http.run import PROMPT_LOGPROBS_LIMIT, RunningRequest, check_prompt_logprobs
from tests.gateway.fake_upstream import FakeUpstream, say, say_once_loaded
from tests.gateway.serving import settings, until


async def connected() -> Any:
    """Stand in for the ASGI channel of a client that stays."""
    await asyncio.sleep(60)


class Setup:
    def __init__(self, upstream: FakeUpstream, resources: AsyncExitStack) -> None:
        self.upstream = upstream
        self.gateway = create_app(settings(max_in_flight=1), upstream).state.gateway
        self.record = RequestRecord(
            request_id="r",
            method="POST",
            arrived=perf_counter(),
            deadline=asyncio.get_running_loop().time() + 30,
            metrics=self.gateway.metrics,
            resources=resources,
            model="glm",
        )
        self.running = RunningRequest(self.gateway, self.record)
        self.generation = Generation(
            request_id="r", model="glm", prompt=PlainText(""), deadline=self.record.deadline
        )

    async def start(self) -> Accepted:
        accepted = await self.running.start([self.generation], connected)
        assert accepted is not None
        return accepted


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    resources = AsyncExitStack()
    setup = Setup(FakeUpstream(lambda _: say("a", "b", gap_s=0.01)), resources)
    yield setup
    await resources.aclose()
    assert setup.gateway.admission.in_flight == setup.gateway.admission.waiting == 0
    assert setup.upstream.running == 0


async def test_an_end_between_two_events_is_seen_at_the_next(setup: Setup) -> None:
    await setup.start()
    setup.running.end(ClientGoneError("gone"))
    with pytest.raises(ClientGoneError):
        await anext(setup.running)


async def test_the_first_end_counts(setup: Setup) -> None:
    await setup.start()
    setup.running.end(DeadlineError("late"))
    setup.running.end(ClientGoneError("gone"))
    with pytest.raises(DeadlineError):
        await anext(setup.running)
    assert setup.record.outcome == 504


async def test_an_end_after_the_last_event_changes_nothing(setup: Setup) -> None:
    await setup.start()
    assert len([event async for event in setup.running]) == 2
    setup.running.end(ClientGoneError("gone"))
    assert setup.record.error is None


async def test_a_cancellation_from_outside_stays_one(setup: Setup) -> None:
    setup.upstream.script = lambda _: say("a", gap_s=60)
    await setup.start()
    waiting = asyncio.create_task(anext(setup.running))
    await asyncio.sleep(0.05)
    setup.running.end(ClientGoneError("gone"))
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()


async def test_the_task_goes_on_after_an_end(setup: Setup) -> None:
    setup.upstream.script = lambda _: say("a", gap_s=60)
    await setup.start()
    asyncio.get_running_loop().call_later(0.02, setup.running.end, UnavailableError("over"))
    with pytest.raises(UnavailableError):
        await anext(setup.running)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_an_end_while_waiting_for_admission(setup: Setup) -> None:
    await setup.gateway.admission.acquire()
    asyncio.get_running_loop().call_later(0.02, setup.running.end, ClientGoneError("gone"))
    with pytest.raises(ClientGoneError):
        await setup.start()
    assert not setup.upstream.requests
    setup.gateway.admission.release()


async def test_an_end_while_the_body_is_read_does_not_wait_for_admission(setup: Setup) -> None:
    """On a thread, where nothing is there to be cancelled: nobody would end its wait in a full queue."""
    await setup.gateway.admission.acquire()
    await setup.running.reached(connected)
    setup.running.end(ClientGoneError("gone"))
    with pytest.raises(ClientGoneError):
        async with asyncio.timeout(5):
            await setup.start()
    assert setup.gateway.admission.waiting == 0
    setup.gateway.admission.release()


async def test_an_end_while_waiting_for_a_first_triton(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_deadline: float) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(setup.upstream, "reached", hang)
    asyncio.get_running_loop().call_later(0.02, setup.gateway.drain.end)
    for _ in range(2):  # the second one comes after it
        with pytest.raises(UnavailableError):
            await setup.running.reached(connected)


async def test_a_permit_granted_in_the_turn_of_an_end_is_not_lost(setup: Setup) -> None:
    await setup.gateway.admission.acquire()

    def at_once() -> None:
        setup.gateway.admission.release()
        setup.running.end(ClientGoneError("gone"))

    asyncio.get_running_loop().call_later(0.02, at_once)
    with pytest.raises(ClientGoneError):
        await setup.start()
    assert not setup.upstream.requests


async def test_none_starts_after_the_drain(setup: Setup) -> None:
    setup.gateway.drain.end()
    with pytest.raises(UnavailableError):
        await setup.start()
    assert not setup.upstream.requests


def counted(setup: Setup) -> list[float]:
    """Return how many requests wait, and how many are in flight."""
    metrics = setup.gateway.metrics
    return [gauge.labels("glm")._value.get() for gauge in (metrics.waiting, metrics.in_flight)]


async def test_while_its_model_is_loaded_a_request_waits_in_the_metrics(setup: Setup) -> None:
    loaded = asyncio.Event()
    setup.upstream.script = lambda _: say_once_loaded(loaded)
    assert await setup.running.start([setup.generation], connected, patience_s=0.0) is None
    await until(lambda: counted(setup) == [1, 0])
    loaded.set()
    assert await setup.running.accepted()
    assert counted(setup) == [0, 1]
    await setup.record.resources.aclose()
    assert counted(setup) == [0, 0]


async def test_a_request_that_waits_in_vain_leaves_the_metrics(setup: Setup) -> None:
    setup.upstream.script = lambda _: say_once_loaded(asyncio.Event())
    assert await setup.running.start([setup.generation], connected, patience_s=0.0) is None
    await until(lambda: counted(setup) == [1, 0])
    await setup.record.resources.aclose()
    assert counted(setup) == [0, 0]


@pytest.mark.parametrize(("ranks", "param"), [(True, "prompt_logprobs"), (False, "logprobs")])
def test_no_answer_reports_more_of_its_prompts_than_it_can_have(ranks: bool, param: str) -> None:
    one = Generation(
        request_id="r",
        model="m",
        prompt=PlainText("x"),
        deadline=0.0,
        n=4,
        prompt_logprobs=7,
        prompt_ranks=ranks,
    )
    most = PROMPT_LOGPROBS_LIMIT // (4 * 8)
    check_prompt_logprobs([one, one], Accepted(prompt_tokens=most))
    with pytest.raises(InvalidRequestError, match=f"{most * 32 + 32} log-probabilities") as raised:
        check_prompt_logprobs([one, one], Accepted(prompt_tokens=most + 1))
    assert raised.value.param == param
    without = replace(one, prompt_logprobs=None, prompt_ranks=False)
    check_prompt_logprobs([without], Accepted(prompt_tokens=10 * most))
