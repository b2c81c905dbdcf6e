import asyncio

import pytest

from gateway.triton.inbox import LIMIT_BYTES, Inbox
from gateway.triton.status import Fault, TritonError
from tests.gateway.triton.fake_triton import reply


class Given:
    up = False

    def __call__(self) -> None:
        self.up = True


async def test_deltas_are_taken_once_and_in_order() -> None:
    inbox = Inbox(range(4, 5), 0, Given())
    inbox.put(4, "a", 1, None, 1)
    inbox.put(4, "b", 2, b"{}", 2)
    assert inbox.take_deltas() == [(0, "a", 1, None), (0, "b", 2, b"{}")]
    assert inbox.take_deltas() == []
    assert (inbox.received, inbox.heard) == ([2], 2)


async def test_choices_are_told_apart_by_their_numbers_and_counted_each() -> None:
    inbox = Inbox(range(4, 7), 0, Given())
    for number, text in ((6, "x"), (4, "a"), (6, "y")):
        inbox.put(number, text, 1, None, 1)
    assert inbox.take_deltas() == [(2, "x", 1, None), (0, "a", 1, None), (2, "y", 1, None)]
    assert inbox.received == [1, 0, 2]


async def test_whoever_waits_is_woken_by_everything_that_comes() -> None:
    inbox = Inbox(range(4, 5), 0, Given())
    for come in (
        lambda: inbox.put(4, "a", 1, None, 1),
        lambda: inbox.put_response(reply().infer_response, 1),
        inbox.wake,
        inbox.end,
    ):
        waiting = asyncio.create_task(inbox.more())
        await asyncio.sleep(0)
        assert not waiting.done()
        come()
        assert await waiting is True
    assert await inbox.more() is False
    assert inbox.take_response() is not None
    assert inbox.take_response() is None


async def test_a_failure_comes_after_what_came_before_it_and_the_first_one_counts() -> None:
    inbox = Inbox(range(4, 5), 0, Given())
    waiting = asyncio.create_task(inbox.more())
    await asyncio.sleep(0)
    inbox.put(4, "a", 1, None, 1)
    inbox.fail(TritonError(Fault.SILENT, "first"))
    inbox.fail(TritonError(Fault.CLOSED, "second"))
    inbox.put(4, "b", 1, None, 1)
    await waiting
    assert inbox.take_deltas() == [(0, "a", 1, None)]
    with pytest.raises(TritonError, match="first"):
        await inbox.more()


async def test_what_lies_unread_is_bounded_and_the_answer_is_given_up() -> None:
    given = Given()
    inbox = Inbox(range(4, 5), 0, given)
    half = "x" * (LIMIT_BYTES // 2 - 200)
    for _ in range(5):  # what is read in between does not count
        inbox.put(4, half, 1, half.encode(), 1)
        assert not given.up
        inbox.take_deltas()
    inbox.put(4, half, 1, half.encode(), 1)
    inbox.put(4, "y" * 400, 1, None, 1)
    assert given.up
    kept = len(inbox.take_deltas())
    for _ in range(100):
        inbox.put(4, half, 1, None, 1)
    assert (kept, inbox.take_deltas()) == (2, [])
    with pytest.raises(TritonError) as raised:
        await inbox.more()
    assert raised.value.fault is Fault.UNREAD


async def test_many_small_deltas_count_by_what_they_take_in_memory() -> None:
    given = Given()
    inbox = Inbox(range(4, 5), 0, given)
    count = 0
    while not given.up:
        inbox.put(4, "x", 1, None, 1)
        count += 1
    assert 5_000 < count < 20_000


async def test_the_bound_is_for_each_choice() -> None:
    given = Given()
    inbox = Inbox(range(4, 6), 0, given)
    inbox.put(4, "x" * LIMIT_BYTES, 1, None, 1)
    assert not given.up
    inbox.put(5, "x" * LIMIT_BYTES, 1, None, 1)
    assert given.up
