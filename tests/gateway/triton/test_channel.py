import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gateway.telemetry.logs import request_id
from gateway.triton import channel as delta_channel
from gateway.triton.channel import BUFFER_LIMIT_BYTES, DeltaBuffer, DeltaChannel
from gateway.triton.client import Backoff, Client
from gateway.triton.dialects.chatglm import CHATGLM
from gateway.triton.errors import Fault, TritonError
from tests.gateway.triton.fake_channel import FakeChannels
from tests.gateway.triton.fake_triton import FakeTriton, refusing, reply, until

DIALECT = CHATGLM
PAUSE_S = 0.5


@pytest.fixture
async def link(triton: FakeTriton, fake: FakeChannels) -> AsyncIterator[DeltaChannel]:
    client = Client(triton.address)
    link = DeltaChannel("m", client, idle_timeout_s=3.0, backoff=Backoff(PAUSE_S, PAUSE_S))
    link.start(DIALECT.channels)
    await link.opened()
    yield link
    await link.close()
    await client.close()


def new_buffer(number: int = 1) -> DeltaBuffer:
    return DeltaBuffer(range(number, number + 1), asyncio.get_running_loop().time())


async def fault(buffer: DeltaBuffer) -> Fault:
    try:
        async with asyncio.timeout(60):
            while await buffer.more():
                pass
    except TritonError as error:
        return error.fault
    pytest.fail("it ended without an error")


async def test_it_is_opened_once_however_often_it_is_started(link: DeltaChannel, fake: FakeChannels) -> None:
    for _ in range(3):
        link.start(DIALECT.channels)
    await asyncio.gather(*(link.opened() for _ in range(5)))
    assert fake.ids == [link.id]


async def test_each_generation_gets_its_own_deltas(link: DeltaChannel, fake: FakeChannels) -> None:
    first, second = link.new_buffer(1), link.new_buffer(1)
    (one,), (two,) = first.numbers, second.numbers
    assert one != two
    with link.deliver(first), link.deliver(second):
        fake.frame((one, "a"), (two, "b"))
        fake.frame()
        fake.frame((two, "c"), (99, "nobody's"))
        await until(lambda: link.last_frame == 3)
        assert first.take_deltas() == [(0, "a", 1, (), None)]
        assert second.take_deltas() == [(0, "b", 1, (), None), (0, "c", 1, (), None)]
    fake.frame((one, "late"))
    await until(lambda: link.last_frame == 4)
    assert first.take_deltas() == []


async def test_the_choices_of_a_generation_have_numbers_in_a_row(
    link: DeltaChannel, fake: FakeChannels
) -> None:
    buffers = [link.new_buffer(count) for count in (2, 3, 1)]
    assert [number for each in buffers for number in each.numbers] == list(range(6))
    buffer = buffers[1]
    with link.deliver(buffer):
        fake.frame((4, "c"), (1, "nobody's"), (2, "a"))
        await until(lambda: link.last_frame == 1)
        assert buffer.take_deltas() == [(2, "c", 1, (), None), (0, "a", 1, (), None)]
    fake.frame((3, "late"))
    await until(lambda: link.last_frame == 2)
    assert buffer.take_deltas() == []


async def test_a_lost_channel_fails_what_is_on_it_and_is_opened_anew_after_a_pause(
    link: DeltaChannel, fake: FakeChannels, caplog: pytest.LogCaptureFixture
) -> None:
    first_id = link.id
    buffer = new_buffer()
    with link.deliver(buffer), caplog.at_level(logging.WARNING):
        fake.lose()
        assert await fault(buffer) is Fault.CHANNEL_LOST
    assert "delta channel lost" in caplog.text
    assert not link.is_open
    lost = asyncio.get_running_loop().time()
    await until(lambda: link.is_open)
    assert asyncio.get_running_loop().time() - lost > PAUSE_S / 2
    assert fake.ids == [first_id, link.id]
    assert link.id != first_id


async def test_a_channel_that_cannot_be_opened_is_tried_again_and_said_once(
    link: DeltaChannel, triton: FakeTriton, fake: FakeChannels, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    async def refuse(request: Any, context: Any) -> AsyncIterator[Any]:
        nonlocal tries
        tries += 1
        async for response in refusing("tritongate:unavailable: too many channels")(request, context):
            yield response

    opens, triton.model.channel = triton.model.channel, refuse
    with caplog.at_level(logging.WARNING):
        fake.lose()
        await until(lambda: tries == 3)
        triton.model.channel = opens
        await until(lambda: link.is_open)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["delta channel lost", "delta channel cannot be opened"]


@pytest.mark.parametrize("broken", ["gap", "no frame", "silence"])
async def test_what_cannot_go_on_is_lost(link: DeltaChannel, fake: FakeChannels, broken: str) -> None:
    buffer = new_buffer()
    with link.deliver(buffer):
        if broken == "gap":
            fake.frame((1, "after the gap"), skip=1)
        elif broken == "no frame":
            fake.send(b'{"accepted":{}}')
        assert await fault(buffer) is Fault.CHANNEL_LOST
        assert buffer.take_deltas() == []
    await until(lambda: fake.closed == 1)


async def test_a_generation_of_which_nothing_is_heard_is_given_up_though_the_channel_lives(
    link: DeltaChannel, fake: FakeChannels
) -> None:
    silent, heard = new_buffer(1), new_buffer(2)
    with link.deliver(silent), link.deliver(heard):
        waiting = asyncio.create_task(fault(silent))
        while not waiting.done():
            fake.frame((2, "x"))
            await asyncio.sleep(0.05)
        assert await waiting is Fault.SILENT
        assert heard.take_deltas()
        assert link.is_open


async def test_a_dead_process_and_a_closing_gateway_are_told_as_what_they_are(
    triton: FakeTriton, fake: FakeChannels
) -> None:
    ends: list[tuple[Callable[[Client], Any], Fault]] = [
        (lambda client: client.end_inference("m", Fault.STUB_DEAD, "dead"), Fault.STUB_DEAD),
        (lambda client: client.close(), Fault.CLOSED),
    ]
    for end, expected in ends:
        client = Client(triton.address)
        link = DeltaChannel("m", client, idle_timeout_s=10, backoff=Backoff(0.1, 0.1))
        link.start(DIALECT.channels)
        await link.opened()
        buffer = new_buffer()
        with link.deliver(buffer):
            ended = end(client)
            if ended is not None:
                await ended
            assert await fault(buffer) is expected
        await link.close()
        await client.close()


async def test_a_model_that_does_not_open_it_costs_a_moment_only(
    link: DeltaChannel, fake: FakeChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_channel, "OPEN_WAIT_S", 0.05)
    fake.silent = True
    fake.lose()
    await until(lambda: not link.is_open)
    with pytest.raises(TritonError) as raised:
        await link.opened()
    assert raised.value.fault is Fault.NO_CHANNEL
    await until(lambda: fake.closed == 2)  # given up after the idle timeout


async def test_nobody_waits_for_the_channel_of_a_model_that_has_gone(
    link: DeltaChannel, fake: FakeChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_channel, "OPEN_WAIT_S", 1000)
    fake.silent = True
    fake.lose()
    await until(lambda: not link.is_open)
    waiting = asyncio.create_task(link.opened())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    link.retire()
    for each in (waiting, link.opened()):
        with pytest.raises(TritonError) as raised:
            await asyncio.wait_for(each, 20)
        assert raised.value.fault is Fault.NO_CHANNEL
    fake.silent = False
    link.start(DIALECT.channels)
    await link.opened()


async def test_an_idle_channel_is_closed_when_its_model_retires_and_opened_when_it_is_back(
    link: DeltaChannel, fake: FakeChannels
) -> None:
    link.retire()
    assert not link.is_open
    await until(lambda: fake.closed == 1)
    link.start(DIALECT.channels)
    await link.opened()  # nothing was lost: no pause


async def test_a_retired_channel_that_is_lost_stays_closed(link: DeltaChannel, fake: FakeChannels) -> None:
    buffer = new_buffer()
    with link.deliver(buffer):
        link.retire()
        fake.lose()
        assert await fault(buffer) is Fault.CHANNEL_LOST
    await asyncio.sleep(2 * PAUSE_S)
    assert len(fake.ids) == 1


async def test_a_busy_channel_is_closed_after_its_last_generation(
    link: DeltaChannel, fake: FakeChannels
) -> None:
    buffer = new_buffer()
    with link.deliver(buffer):
        link.retire()
        fake.frame((1, "x"))
        await until(lambda: buffer.received == [1])
        assert link.is_open
    await until(lambda: fake.closed == 1)


async def test_only_the_channel_that_was_meant_is_given_up(link: DeltaChannel, fake: FakeChannels) -> None:
    error = TritonError(Fault.CHANNEL_LOST, "not open")
    link.lose("another", error)
    assert link.is_open
    link.lose(link.id, error)
    assert not link.is_open


async def test_the_log_of_a_loss_is_no_requests(
    link: DeltaChannel, fake: FakeChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever happened to find the channel lost has nothing to do with the end of the next one."""
    seen = []
    original = link._lost

    def lost(error: TritonError) -> None:
        seen.append(request_id.get())
        original(error)

    monkeypatch.setattr(link, "_lost", lost)
    token = request_id.set("some request")
    link.lose(link.id, TritonError(Fault.CHANNEL_LOST, "not open"))
    request_id.reset(token)
    await link.opened()
    fake.lose()
    await until(lambda: len(seen) == 2)
    assert seen == ["some request", None]


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
    for come in (
        lambda: buffer.put(4, "a", 1, None, 1),
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
