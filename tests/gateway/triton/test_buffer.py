import asyncio
from typing import Any

import pytest

from gateway.triton.buffer import BUFFER_LIMIT_BYTES, DeltaBuffer
from gateway.triton.errors import Fault, TritonError
from tests.gateway.triton.fake_triton import reply


class OwnStream:
    """Stands for the task that reads a request's own stream."""

    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


async def test_deltas_are_taken_once_and_in_order() -> None:
    buffer = DeltaBuffer(range(4, 5), 0)
    buffer.put(4, "a", 1, None, 1)
    buffer.put(4, "b", 2, b"{}", 2)
    assert buffer.take_deltas() == [(0, "a", 1, (), None), (0, "b", 2, (), b"{}")]
    assert buffer.take_deltas() == []
    assert (buffer.received, buffer.silent_s(5)) == ([2], 3)


async def test_choices_are_told_apart_by_their_numbers_and_counted_each() -> None:
    buffer = DeltaBuffer(range(4, 7), 0)
    for number, text in ((6, "x"), (4, "a"), (6, "y")):
        buffer.put(number, text, 1, None, 1)
    assert buffer.take_deltas() == [(2, "x", 1, (), None), (0, "a", 1, (), None), (2, "y", 1, (), None)]
    assert buffer.received == [1, 0, 2]


async def test_whoever_waits_is_woken_by_everything_that_comes() -> None:
    buffer = DeltaBuffer(range(4, 5), 0)
    buffer.put(4, "a", 1, None, 1)  # which a channel does for many at once, and then wakes them
    for come in (
        lambda: asyncio.create_task(buffer.put_response(reply().infer_response, 1)),
        buffer.wake,
        buffer.end,
    ):
        waiting = asyncio.create_task(buffer.more())
        await asyncio.sleep(0)
        assert not waiting.done()
        come()
        assert await waiting is True
    assert await buffer.more() is False
    assert buffer.take_response() is not None
    assert not buffer.responses


async def test_a_failure_comes_after_what_came_before_it_and_the_first_one_counts() -> None:
    buffer = DeltaBuffer(range(4, 5), 0)
    waiting = asyncio.create_task(buffer.more())
    await asyncio.sleep(0)
    buffer.put(4, "a", 1, None, 1)
    buffer.fail(TritonError(Fault.SILENT, "first"))
    buffer.fail(TritonError(Fault.CLOSED, "second"))
    buffer.put(4, "b", 1, None, 1)
    await waiting
    assert buffer.take_deltas() == [(0, "a", 1, (), None)]
    with pytest.raises(TritonError, match="first"):
        await buffer.more()


async def test_what_lies_unread_is_bounded_and_the_answer_is_given_up() -> None:
    buffer: Any = DeltaBuffer(range(4, 5), 0)
    buffer.own = own = OwnStream()
    half = "x" * (BUFFER_LIMIT_BYTES // 2 - 200)
    for _ in range(5):  # what is read in between does not count
        buffer.put(4, half, 1, half.encode(), 1)
        assert not own.cancelled
        buffer.take_deltas()
    buffer.put(4, half, 1, half.encode(), 1)
    buffer.put(4, "y" * 400, 1, None, 1)
    assert own.cancelled
    kept = len(buffer.take_deltas())
    for _ in range(100):
        buffer.put(4, half, 1, None, 1)
    assert (kept, buffer.take_deltas()) == (2, [])
    with pytest.raises(TritonError) as raised:
        await buffer.more()
    assert raised.value.fault is Fault.UNREAD


async def test_many_small_deltas_count_by_what_they_take_in_memory() -> None:
    buffer: Any = DeltaBuffer(range(4, 5), 0)
    buffer.own = own = OwnStream()
    count = 0
    while not own.cancelled:
        buffer.put(4, "x", 1, None, 1)
        count += 1
    assert 5_000 < count < 20_000


async def test_the_bound_is_for_each_choice() -> None:
    buffer: Any = DeltaBuffer(range(4, 6), 0)
    buffer.own = own = OwnStream()
    buffer.put(4, "x" * BUFFER_LIMIT_BYTES, 1, None, 1)
    assert not own.cancelled
    buffer.put(5, "x" * BUFFER_LIMIT_BYTES, 1, None, 1)
    assert own.cancelled


async def test_a_reader_of_the_own_stream_waits_for_room_and_is_not_silent_meanwhile() -> None:
    buffer = DeltaBuffer(range(4, 5), 0)
    response = reply().infer_response

    async def read() -> None:
        for _ in range(100):
            await buffer.put_response(response, 0)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    assert not reading.done()
    assert buffer.silent_s(asyncio.get_running_loop().time()) == 0
    taken = 0
    while not reading.done() or taken < 100:
        if buffer.responses:
            buffer.take_response()
            taken += 1
        await asyncio.sleep(0)
    assert taken == 100
    assert buffer.silent_s(asyncio.get_running_loop().time()) < 10
