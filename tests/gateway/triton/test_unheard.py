import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.triton.status import Fault, TritonError
from gateway.triton.unheard import NUDGES_LIMIT, Unheard
from tests.gateway.triton.fake_triton import until

AFTER_S = 0.01
TAKEN = 3


@pytest.fixture(autouse=True)
async def _own_time() -> AsyncIterator[None]:
    """Have time pass only while all wait: on a busy machine, several nudges could be due at once."""
    loop: Any = asyncio.get_running_loop()
    now, select = loop.time(), loop._selector.select

    def wait(timeout: float | None) -> Any:
        nonlocal now
        now += timeout or 0
        return select(timeout and 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "time", lambda: now)
        patch.setattr(loop._selector, "select", wait)
        yield


class Nudges:
    """What a model does with them, which is nothing until it is told."""

    def __init__(self) -> None:
        self.count = 0
        self.answered = asyncio.Event()
        self.error: TritonError | None = None

    async def __call__(self) -> None:
        self.count += 1
        await self.answered.wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
async def nudges() -> Nudges:
    return Nudges()


@pytest.fixture
async def unheard(nudges: Nudges) -> AsyncIterator[Unheard]:
    unheard = Unheard(nudges, after_s=AFTER_S, taken=TAKEN)
    yield unheard
    await unheard.close()


async def several_looks() -> None:
    await asyncio.sleep(8 * AFTER_S)


async def test_what_is_heard_of_in_time_is_not_nudged_for(unheard: Unheard, nudges: Nudges) -> None:
    for _ in range(5):
        number = unheard.sent()
        await asyncio.sleep(0)
        unheard.heard(number)
        unheard.heard(number)
    await several_looks()
    assert nudges.count == 0


async def test_what_is_not_heard_of_is_nudged_for_once(unheard: Unheard, nudges: Nudges) -> None:
    nudges.answered.set()
    for _ in range(TAKEN):
        unheard.sent()
    await until(lambda: nudges.count == 1)
    await several_looks()
    assert nudges.count == 1


async def test_what_is_sent_after_a_nudge_gets_one_of_its_own(unheard: Unheard, nudges: Nudges) -> None:
    unheard.sent()
    await until(lambda: nudges.count == 1)
    unheard.sent()
    nudges.answered.set()
    await until(lambda: nudges.count == 2)
    await several_looks()
    assert nudges.count == 2


async def test_more_than_a_nudge_takes_along_need_another_one(unheard: Unheard, nudges: Nudges) -> None:
    nudges.answered.set()
    for _ in range(TAKEN + 1):
        unheard.sent()
    await until(lambda: nudges.count == 2)
    await several_looks()
    assert nudges.count == 2


async def test_where_a_nudge_takes_nothing_along_they_go_on_until_all_is_heard_of(nudges: Nudges) -> None:
    nudges.answered.set()
    alone = Unheard(nudges, after_s=AFTER_S, taken=0)
    number = alone.sent()
    await until(lambda: nudges.count > 3)
    alone.heard(number)
    count = nudges.count
    await several_looks()
    assert nudges.count == count
    await alone.close()


async def test_a_nudge_may_be_forgotten_too_but_a_model_that_hangs_gets_few(
    unheard: Unheard, nudges: Nudges
) -> None:
    unheard.sent()
    await until(lambda: nudges.count == NUDGES_LIMIT)
    await several_looks()
    assert nudges.count == NUDGES_LIMIT


async def test_a_nudge_that_fails_is_not_repeated(unheard: Unheard, nudges: Nudges) -> None:
    nudges.error = TritonError(Fault.UNREACHABLE, "gone")
    nudges.answered.set()
    unheard.sent()
    await until(lambda: nudges.count == 1)
    await several_looks()
    assert nudges.count == 1


async def test_nothing_is_nudged_for_after_the_end(unheard: Unheard, nudges: Nudges) -> None:
    unheard.sent()
    await until(lambda: nudges.count == 1)
    await unheard.close()
    await several_looks()
    assert nudges.count == 1


async def test_many_requests_cost_one_timer_and_none_while_there_are_none(
    unheard: Unheard, monkeypatch: Any
) -> None:
    loop = asyncio.get_running_loop()
    timers: list[float] = []
    call_at = loop.call_at

    def counted(when: float, *args: Any, **options: Any) -> Any:
        timers.append(when)
        return call_at(when, *args, **options)

    monkeypatch.setattr(loop, "call_at", counted)
    for _ in range(100):
        unheard.heard(unheard.sent())
    assert len(timers) == 1
    monkeypatch.undo()
    await several_looks()
    monkeypatch.setattr(loop, "call_at", counted)
    unheard.heard(unheard.sent())
    assert len(timers) == 2
