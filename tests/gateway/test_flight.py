"""The race itself, at the moments that a real socket cannot be brought to hit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any

import pytest

from gateway.app import create_app
from gateway.errors import ClientGoneError, DeadlineError, UnavailableError
from gateway.exchange import Exchange
from gateway.flight import Flight
from gateway.generation import Accepted, Generation, PlainText
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import settings


async def connected() -> Any:
    """Stand in for the ASGI channel of a client that stays."""
    await asyncio.sleep(60)


class Setup:
    def __init__(self, upstream: FakeUpstream, resources: AsyncExitStack) -> None:
        self.upstream = upstream
        self.gateway = create_app(settings(max_in_flight=1), upstream).state.gateway
        self.exchange = Exchange(
            request_id="r",
            method="POST",
            arrived=perf_counter(),
            deadline=asyncio.get_running_loop().time() + 30,
            metrics=self.gateway.metrics,
            resources=resources,
            model="glm",
        )
        self.flight = Flight(self.gateway, self.exchange)
        self.generation = Generation(
            request_id="r", model="glm", prompt=PlainText(""), deadline=self.exchange.deadline
        )

    async def start(self) -> Accepted:
        return await self.flight.start([self.generation], connected)


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
    setup.flight.end(ClientGoneError("gone"))
    with pytest.raises(ClientGoneError):
        await anext(setup.flight)


async def test_the_first_end_counts(setup: Setup) -> None:
    await setup.start()
    setup.flight.end(DeadlineError("late"))
    setup.flight.end(ClientGoneError("gone"))
    with pytest.raises(DeadlineError):
        await anext(setup.flight)
    assert setup.exchange.outcome == 504


async def test_an_end_after_the_last_event_changes_nothing(setup: Setup) -> None:
    await setup.start()
    assert len([event async for event in setup.flight]) == 2
    setup.flight.end(ClientGoneError("gone"))
    assert setup.exchange.error is None


async def test_a_cancellation_from_outside_stays_one(setup: Setup) -> None:
    setup.upstream.script = lambda _: say("a", gap_s=60)
    await setup.start()
    waiting = asyncio.create_task(anext(setup.flight))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    setup.flight.end(ClientGoneError("gone"))
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()


async def test_the_task_goes_on_after_an_end(setup: Setup) -> None:
    setup.upstream.script = lambda _: say("a", gap_s=60)
    await setup.start()
    asyncio.get_running_loop().call_later(0.02, setup.flight.end, UnavailableError("over"))
    with pytest.raises(UnavailableError):
        await anext(setup.flight)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_an_end_while_waiting_for_admission(setup: Setup) -> None:
    await setup.gateway.admission.acquire()
    asyncio.get_running_loop().call_later(0.02, setup.flight.end, ClientGoneError("gone"))
    with pytest.raises(ClientGoneError):
        await setup.start()
    assert not setup.upstream.requests
    setup.gateway.admission.release()


async def test_a_permit_granted_in_the_turn_of_an_end_is_not_lost(setup: Setup) -> None:
    await setup.gateway.admission.acquire()

    def at_once() -> None:
        setup.gateway.admission.release()
        setup.flight.end(ClientGoneError("gone"))

    asyncio.get_running_loop().call_later(0.02, at_once)
    with pytest.raises(ClientGoneError):
        await setup.start()
    assert not setup.upstream.requests


async def test_none_starts_after_the_drain(setup: Setup) -> None:
    setup.gateway.drain.end()
    with pytest.raises(UnavailableError):
        await setup.start()
    assert not setup.upstream.requests
