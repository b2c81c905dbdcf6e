import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from gateway.errors import RateLimitError, UnavailableError
from gateway.limits import admission as rules
from gateway.limits.admission import Admission, Connections
from gateway.limits.counters import Number, SharedCounters, mark_ended
from gateway.telemetry.metrics import Place
from tests.gateway.places import places
from tests.gateway.serving import until


def admits(in_flight: int, *, waiting: int, place: Place | None = None) -> Admission:
    shared = SharedCounters(gauges=Admission.GAUGES, counters=0, place=place)
    return Admission(max_in_flight=in_flight, max_waiting=waiting, shared=shared)


async def test_waiting_is_in_order_of_arrival() -> None:
    admission = admits(1, waiting=3)
    await admission.acquire()
    order: list[int] = []

    async def enter(number: int) -> None:
        await admission.acquire()
        order.append(number)
        admission.release()

    tasks = [asyncio.create_task(enter(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert (admission.in_flight, admission.waiting) == (1, 3)
    admission.release()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]
    assert (admission.in_flight, admission.waiting) == (0, 0)


async def test_a_full_queue_refuses_at_once() -> None:
    admission = admits(1, waiting=0)
    await admission.acquire()
    with pytest.raises(RateLimitError) as refusal:
        await admission.acquire()
    assert refusal.value.retry_after_s == 1
    admission.release()
    await admission.acquire()


async def test_a_cancelled_waiter_leaves_the_queue() -> None:
    admission = admits(1, waiting=2)
    await admission.acquire()
    first, second = (asyncio.create_task(admission.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    assert admission.waiting == 1
    admission.release()
    await second
    assert (admission.in_flight, admission.waiting) == (1, 0)


async def test_a_permit_granted_to_a_cancelled_waiter_is_passed_on() -> None:
    admission = admits(1, waiting=2)
    await admission.acquire()
    first, second = (asyncio.create_task(admission.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    admission.release()
    first.cancel()  # in the turn of the loop that granted it
    await asyncio.wait({first})
    assert first.cancelled()
    await asyncio.wait_for(second, 5)
    admission.release()
    assert (admission.in_flight, admission.waiting) == (0, 0)


async def test_a_waiter_cancelled_in_the_turn_of_a_release() -> None:
    admission = admits(1, waiting=1)
    await admission.acquire()
    waiter = asyncio.create_task(admission.acquire())
    await asyncio.sleep(0)
    waiter.cancel()
    admission.release()
    await asyncio.wait({waiter})
    assert (admission.in_flight, admission.waiting) == (0, 0)


async def test_a_request_takes_as_many_permits_as_it_costs() -> None:
    admission = admits(4, waiting=3)
    await admission.acquire(3)
    big, small = (asyncio.create_task(admission.acquire(permits)) for permits in (2, 1))
    await asyncio.sleep(0)
    # The small one would fit, and does not overtake.
    assert (admission.in_flight, admission.waiting) == (3, 2)
    admission.release(3)
    await asyncio.gather(big, small)
    assert admission.in_flight == 3
    admission.release(2)
    admission.release()
    assert (admission.in_flight, admission.waiting) == (0, 0)


async def test_one_that_wants_more_than_there_is_takes_all() -> None:
    admission = admits(2, waiting=1)
    await admission.acquire(5)
    assert admission.in_flight == 2
    other = asyncio.create_task(admission.acquire())
    await asyncio.sleep(0)
    admission.release(5)
    await other
    assert admission.in_flight == 1


async def test_a_big_waiter_that_leaves_lets_the_small_ones_pass() -> None:
    admission = admits(2, waiting=2)
    await admission.acquire()
    big, small = (asyncio.create_task(admission.acquire(permits)) for permits in (2, 1))
    await asyncio.sleep(0)
    big.cancel()
    await asyncio.wait({big})
    await asyncio.wait_for(small, 5)
    assert (admission.in_flight, admission.waiting) == (2, 0)


async def test_processes_share_the_permits(table: int) -> None:
    one, other = (admits(3, waiting=4, place=place) for place in places(table))
    for _ in range(3):
        await one.acquire()  # all, and not a half of them
    waiter = asyncio.create_task(other.acquire(2))
    await until(lambda: other.waiting == 1)
    one.release()
    await asyncio.sleep(0.1)
    assert not waiter.done()
    one.release()
    await asyncio.wait_for(waiter, 30)
    assert (one.in_flight, other.in_flight) == (1, 2)


async def test_processes_share_the_queue(table: int) -> None:
    one, other = (admits(1, waiting=2, place=place) for place in places(table))
    await one.acquire()
    waiters = [asyncio.create_task(each.acquire()) for each in (one, other)]
    await until(lambda: one.waiting == other.waiting == 1)
    for each in (one, other):
        with pytest.raises(RateLimitError, match="1 answers at work, 2 requests wait"):
            await each.acquire()
    for waiter in waiters:
        waiter.cancel()
    await asyncio.wait(waiters)
    assert (one.waiting, other.waiting) == (0, 0)
    waiter = asyncio.create_task(other.acquire())
    one.release()
    await asyncio.wait_for(waiter, 30)


async def test_whoever_waits_longest_is_next_whatever_its_process(
    table: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_CLOSE_NS", 0)
    monkeypatch.setattr(rules, "_ASLEEP_NS", 10**12)
    three = [admits(1, waiting=9, place=place) for place in places(table, 3)]
    await three[0].acquire()
    order: list[int] = []

    async def enter(number: int) -> None:
        await three[number % 3].acquire()
        order.append(number)
        await asyncio.sleep(0)
        three[number % 3].release()

    waiting = []
    for number in range(9):
        waiting.append(asyncio.create_task(enter(number)))
        await asyncio.sleep(0)
    three[0].release()
    await asyncio.wait_for(asyncio.gather(*waiting), 30)
    assert order == list(range(9))
    assert [each.in_flight for each in three] == [0, 0, 0]


async def test_a_newcomer_does_not_overtake_another_processes_waiter(
    table: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_CLOSE_NS", 0)
    monkeypatch.setattr(rules, "_ASLEEP_NS", 10**12)
    one, other = (admits(2, waiting=9, place=place) for place in places(table))
    await one.acquire()
    big = asyncio.create_task(other.acquire(2))
    await until(lambda: other.waiting == 1)
    small = asyncio.create_task(one.acquire())  # would fit
    await until(lambda: one.waiting == 1)
    one.release()
    await asyncio.wait_for(big, 30)
    assert not small.done()
    other.release(2)
    await asyncio.wait_for(small, 30)


async def test_a_process_that_is_stopped_or_gone_holds_nobody_up(
    table: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_CLOSE_NS", 0)
    first, second = places(table)
    stopped, other = admits(2, waiting=9, place=first), admits(2, waiting=9, place=second)
    await other.acquire()
    await stopped.acquire()
    monkeypatch.setattr(rules, "_LOOK_EVERY_S", 10**6)
    waiter = asyncio.create_task(stopped.acquire())  # first in the queue, and never looks again
    await until(lambda: stopped.waiting == 1)
    monkeypatch.setattr(rules, "_LOOK_EVERY_S", 0.005)
    monkeypatch.setattr(rules, "_ASLEEP_NS", 0)
    other.release()
    await asyncio.wait_for(other.acquire(), 30)
    behind = asyncio.create_task(other.acquire())
    await until(lambda: other.waiting == 1)
    mark_ended(first)  # with the permit that it held
    await asyncio.wait_for(behind, 30)
    waiter.cancel()
    await asyncio.wait({waiter})


async def test_a_process_may_end_while_another_one_looks_at_it(
    table: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = places(table)
    ended, other = admits(1, waiting=9, place=first), admits(1, waiting=9, place=second)
    await ended.acquire()
    waiting = asyncio.create_task(other.acquire())
    await until(lambda: other.waiting == 1)

    def look(number: Number, _look: Any = Number.of_others) -> Any:
        values = list(_look(number))
        mark_ended(first)
        return values

    monkeypatch.setattr(Number, "of_others", look)
    await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_the_limits_hold_and_nothing_is_lost(
    table: int, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(rules, "_LOOK_EVERY_S", 0)
    random = Random(seed)
    processes = [admits(4, waiting=6, place=place) for place in places(table, 5)]
    requests: set[asyncio.Task[None]] = set()
    refused = 0

    async def request(process: Admission, permits: int, turns: int) -> None:
        nonlocal refused
        try:
            await process.acquire(permits)
        except RateLimitError:
            refused += 1
            return
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
        finally:
            process.release(permits)

    for _ in range(400):
        turn = request(random.choice(processes), random.choice((1, 1, 1, 2, 3, 9)), random.randrange(9))
        requests.add(asyncio.create_task(turn))
        if random.random() < 0.4:
            random.choice(list(requests)).cancel()
        for _ in range(random.choice((0, 0, 0, 1, 9))):
            await asyncio.sleep(0)
            assert sum(each.in_flight for each in processes) <= 4
            assert sum(each.waiting for each in processes) <= 6
    await asyncio.wait(requests, timeout=60)
    assert all(each.cancelled() or each.exception() is None for each in requests)
    assert 0 < refused < 400
    for each in processes:
        assert (each.in_flight, each.waiting) == (0, 0)
        await each.acquire(4)
        each.release(4)


def test_processes_bound_their_connections_together(table: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_SPARE_CONNECTIONS", 1)
    one, other = (
        Connections(2, SharedCounters(gauges=1, counters=0, place=place)) for place in places(table)
    )
    assert one.enter()
    assert other.enter()
    assert not other.enter()
    for each in (one, other):
        with pytest.raises(UnavailableError):
            each.enter()
    assert (one.open, other.open) == (1, 2)
    other.leave()
    one.leave()
    assert one.enter()
    mark_ended(places(table)[1])
    assert one.enter()


def test_the_longest_idle_connection_makes_room(table: int) -> None:
    one, other = (
        Connections(3, SharedCounters(gauges=1, counters=0, place=place)) for place in places(table)
    )
    closed: list[str] = []

    def idle(name: str, *, read: bool = True) -> Callable[[], bool]:
        def close() -> bool:
            if read:
                closed.append(name)
                one.wake(close)
                one.leave()
            return read

        one.rest(close)
        return close

    assert all(one.enter() for _ in range(3))
    idle("unread", read=False)
    busy = idle("busy")
    idle("first")
    idle("second")
    one.wake(busy)
    assert not other.enter(), "it has none"
    other.leave()
    assert one.enter()
    assert closed == ["first"]
    one.close_idle(60)
    assert closed == ["first"]
    one.close_idle(0)
    assert closed == ["first", "second"]
    assert one.enter()
    assert not one.enter(), "none is idle"
    assert one.open == 4
