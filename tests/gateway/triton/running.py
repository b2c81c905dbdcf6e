"""Generations that a test has asked the pool for, and their text."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from gateway.core.events import Delta, Event
from gateway.triton.pool import TritonUpstream
from tests.gateway.triton.fake_channel import FakeChannels
from tests.gateway.triton.fake_triton import generation, until


async def collect(pool: TritonUpstream, request: Any) -> list[Event]:
    return [event async for event in pool.generate(request)]


def text(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


class Running:
    """A generation that is collected in a task of its own."""

    def __init__(self, pool: TritonUpstream, **changes: Any) -> None:
        self.events: list[Event] = []
        self.task = asyncio.create_task(self._collect(pool, generation(stream=True, **changes)))

    async def _collect(self, pool: TritonUpstream, request: Any) -> None:
        async for event in pool.generate(request):
            self.events.append(event)

    @property
    def deltas(self) -> list[Delta]:
        return [event for event in self.events if isinstance(event, Delta)]

    @property
    def text(self) -> str:
        return text(self.events)


async def started(pool: TritonUpstream, fake: FakeChannels) -> AsyncGenerator[Event, None]:
    """Send one, have it accepted as number 0, and return what the test is to read by itself."""
    events = pool.generate(generation(stream=True))
    first = asyncio.create_task(anext(events))
    await until(lambda: bool(fake.own))
    fake.accept(0)
    await first
    return events


async def send(pool: TritonUpstream, fake: FakeChannels, **changes: Any) -> tuple[Running, int]:
    """Send one, and return the answer-to-be and its number on the channel."""
    before = set(fake.own)
    running = Running(pool, **changes)
    await until(lambda: set(fake.own) > before)
    (number,) = set(fake.own) - before
    return running, number
