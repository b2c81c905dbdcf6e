import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.dialects.chatglm_channel import ChatGLMChannels
from gateway.logs import request_id
from gateway.triton import delta_link
from gateway.triton.backoff import Backoff
from gateway.triton.channel import Channel
from gateway.triton.delta_link import DeltaLink
from gateway.triton.inbox import Inbox
from gateway.triton.status import Fault, TritonError
from tests.gateway.triton.fake_channel import FakeChannels
from tests.gateway.triton.fake_triton import FakeTriton, until

DIALECT = ChatGLMChannels()
PAUSE_S = 2.5


@pytest.fixture
async def link(triton: FakeTriton, fake: FakeChannels) -> AsyncIterator[DeltaLink]:
    channel = Channel(triton.address)
    link = DeltaLink("m", channel, idle_timeout_s=3.0, backoff=Backoff(PAUSE_S, PAUSE_S))
    yield link
    await link.close()
    await channel.close()


def new_inbox(number: int = 1) -> Inbox:
    return Inbox(range(number, number + 1), asyncio.get_running_loop().time(), lambda: None)


async def fault(inbox: Inbox) -> Fault:
    try:
        async with asyncio.timeout(60):
            while await inbox.more():
                pass
    except TritonError as error:
        return error.fault
    pytest.fail("it ended without an error")


async def test_it_is_opened_once_however_many_ask(link: DeltaLink, fake: FakeChannels) -> None:
    assert await asyncio.gather(*(link.open(DIALECT) for _ in range(5))) == [True] * 5
    assert await link.open(DIALECT)
    assert fake.ids == [link.id]


async def test_each_generation_gets_its_own_deltas(link: DeltaLink, fake: FakeChannels) -> None:
    await link.open(DIALECT)
    (one,), (two,) = link.next_numbers(1), link.next_numbers(1)
    assert one != two
    first, second = new_inbox(one), new_inbox(two)
    with link.deliver(first), link.deliver(second):
        fake.frame((one, "a"), (two, "b"))
        fake.frame()
        fake.frame((two, "c"), (99, "nobody's"))
        await until(lambda: link.last_frame == 3)
        assert first.take_deltas() == [(0, "a", 1, None)]
        assert second.take_deltas() == [(0, "b", 1, None), (0, "c", 1, None)]
    fake.frame((one, "late"))
    await until(lambda: link.last_frame == 4)
    assert first.take_deltas() == []


async def test_the_choices_of_a_generation_have_numbers_in_a_row(link: DeltaLink, fake: FakeChannels) -> None:
    await link.open(DIALECT)
    numbers = [link.next_numbers(count) for count in (2, 3, 1)]
    assert [number for each in numbers for number in each] == list(range(6))
    inbox = Inbox(numbers[1], asyncio.get_running_loop().time(), lambda: None)
    with link.deliver(inbox):
        fake.frame((4, "c"), (1, "nobody's"), (2, "a"))
        await until(lambda: link.last_frame == 1)
        assert inbox.take_deltas() == [(2, "c", 1, None), (0, "a", 1, None)]
    fake.frame((3, "late"))
    await until(lambda: link.last_frame == 2)
    assert inbox.take_deltas() == []


async def test_a_lost_channel_fails_what_is_on_it_and_is_opened_anew_after_a_pause(
    link: DeltaLink, fake: FakeChannels, caplog: pytest.LogCaptureFixture
) -> None:
    await link.open(DIALECT)
    first_id = link.id
    inbox = new_inbox()
    with link.deliver(inbox), caplog.at_level(logging.WARNING):
        fake.lose()
        assert await fault(inbox) is Fault.CHANNEL_LOST
    assert "delta channel lost" in caplog.text
    began = asyncio.get_running_loop().time()
    assert not await link.open(DIALECT), "not at once"
    while not await link.open(DIALECT):  # noqa: ASYNC110 - nobody is told when the pause is over
        await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - began > PAUSE_S / 2
    assert fake.ids == [first_id, link.id]
    assert link.id != first_id


@pytest.mark.parametrize("broken", ["gap", "no frame", "silence"])
async def test_what_cannot_go_on_is_lost(link: DeltaLink, fake: FakeChannels, broken: str) -> None:
    await link.open(DIALECT)
    inbox = new_inbox()
    with link.deliver(inbox):
        if broken == "gap":
            fake.frame((1, "after the gap"), skip=1)
        elif broken == "no frame":
            fake.send(b'{"accepted":{}}')
        assert await fault(inbox) is Fault.CHANNEL_LOST
        assert inbox.take_deltas() == []
    await until(lambda: fake.closed == 1)


async def test_a_generation_of_which_nothing_is_heard_is_given_up_though_the_channel_lives(
    link: DeltaLink, fake: FakeChannels
) -> None:
    await link.open(DIALECT)
    silent, heard = new_inbox(1), new_inbox(2)
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
    for end, expected in (
        (lambda channel: channel.end_inference("m-stream", Fault.STUB_DEAD, "dead"), Fault.STUB_DEAD),
        (lambda channel: channel.close(), Fault.CLOSED),
    ):
        channel = Channel(triton.address)
        link = DeltaLink("m", channel, idle_timeout_s=10, backoff=Backoff(0.1, 0.1))
        await link.open(DIALECT)
        inbox = new_inbox()
        with link.deliver(inbox):
            ended: Any = end(channel)
            if ended is not None:
                await ended
            assert await fault(inbox) is expected
        await link.close()
        await channel.close()


async def test_a_model_that_does_not_open_it_costs_a_moment_only(
    link: DeltaLink, fake: FakeChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_link, "OPEN_WAIT_S", 0.05)
    fake.silent = True
    assert not await link.open(DIALECT)
    await until(lambda: fake.closed == 1)  # given up after the idle timeout


async def test_an_idle_channel_is_closed_when_its_replica_retires_and_opened_when_needed_again(
    link: DeltaLink, fake: FakeChannels
) -> None:
    await link.open(DIALECT)
    link.retire()
    assert not link.is_open
    await until(lambda: fake.closed == 1)
    assert await link.open(DIALECT), "nothing was lost: no pause"


async def test_a_busy_channel_is_closed_after_its_last_generation(
    link: DeltaLink, fake: FakeChannels
) -> None:
    await link.open(DIALECT)
    inbox = new_inbox()
    with link.deliver(inbox):
        link.retire()
        fake.frame((1, "x"))
        await until(lambda: inbox.received == [1])
        assert link.is_open
    await until(lambda: fake.closed == 1)


async def test_only_the_channel_that_was_meant_is_given_up(link: DeltaLink, fake: FakeChannels) -> None:
    await link.open(DIALECT)
    error = TritonError(Fault.CHANNEL_LOST, "not open")
    link.lose("another", error)
    assert link.is_open
    link.lose(link.id, error)
    assert not link.is_open


async def test_the_log_of_a_loss_is_no_requests(
    link: DeltaLink, fake: FakeChannels, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever happened to open the channel has nothing to do with its end."""
    seen = []
    original = link._lost
    link._lost = lambda error: (seen.append(request_id.get()), original(error))
    token = request_id.set("the first request")
    await link.open(DIALECT)
    request_id.reset(token)
    fake.lose()
    await until(lambda: bool(seen))
    assert seen == [None]
