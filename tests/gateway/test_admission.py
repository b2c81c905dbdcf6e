import asyncio

import pytest

from gateway.admission import Admission
from gateway.errors import RateLimitError


async def test_waiting_is_in_order_of_arrival() -> None:
    admission = Admission(max_in_flight=1, max_waiting=3)
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
    admission = Admission(max_in_flight=1, max_waiting=0)
    await admission.acquire()
    with pytest.raises(RateLimitError) as refusal:
        await admission.acquire()
    assert refusal.value.retry_after_s == 1
    admission.release()
    await admission.acquire()


async def test_a_cancelled_waiter_leaves_the_queue() -> None:
    admission = Admission(max_in_flight=1, max_waiting=2)
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
    admission = Admission(max_in_flight=1, max_waiting=2)
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
    admission = Admission(max_in_flight=1, max_waiting=1)
    await admission.acquire()
    waiter = asyncio.create_task(admission.acquire())
    await asyncio.sleep(0)
    waiter.cancel()
    admission.release()
    await asyncio.wait({waiter})
    assert (admission.in_flight, admission.waiting) == (0, 0)


async def test_a_request_takes_as_many_permits_as_it_costs() -> None:
    admission = Admission(max_in_flight=4, max_waiting=3)
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
    admission = Admission(max_in_flight=2, max_waiting=1)
    await admission.acquire(5)
    assert admission.in_flight == 2
    other = asyncio.create_task(admission.acquire())
    await asyncio.sleep(0)
    admission.release(5)
    await other
    assert admission.in_flight == 1


async def test_a_big_waiter_that_leaves_lets_the_small_ones_pass() -> None:
    admission = Admission(max_in_flight=2, max_waiting=2)
    await admission.acquire()
    big, small = (asyncio.create_task(admission.acquire(permits)) for permits in (2, 1))
    await asyncio.sleep(0)
    big.cancel()
    await asyncio.wait({big})
    await asyncio.wait_for(small, 5)
    assert (admission.in_flight, admission.waiting) == (2, 0)
