import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gateway.core.backoff import Backoff
from gateway.telemetry.logs import request_id
from gateway.triton import channel as delta_channel
from gateway.triton.buffer import DeltaBuffer
from gateway.triton.channel import DeltaChannel
from gateway.triton.client import Client
from gateway.triton.dialects.chatglm import CHATGLM
from gateway.triton.errors import Fault, TritonError
from tests.gateway.triton.fake_channel import FakeChannels
from tests.gateway.triton.fake_triton import FakeTriton, refusing, until

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


async def test_readers_that_do_not_keep_up_get_several_frames_at_once(
    link: DeltaChannel, fake: FakeChannels
) -> None:
    buffer = link.new_buffer(1)
    (number,) = buffer.numbers
    texts: list[str] = []

    async def read() -> None:
        while len("".join(texts)) < 40:
            await buffer.more()
            texts.append("".join(text for _, text, *_ in buffer.take_deltas()))
            time.sleep(0.03)  # noqa: ASYNC251 - as long as hundreds of clients keep the loop

    with link.deliver(buffer):
        reading = asyncio.create_task(read())
        for place in range(40):
            fake.frame((number, chr(ord("A") + place)))
        await asyncio.wait_for(reading, 60)
    assert "".join(texts) == "".join(chr(ord("A") + place) for place in range(40))
    assert len(texts) < 30
