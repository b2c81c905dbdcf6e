"""Answers over a delta channel, through the pool; plain ones are what `test_pool.py` is about."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.errors import ClientGoneError, UnavailableError, UpstreamProtocolError
from gateway.generation import Accepted, Delta, Event, Heartbeat
from gateway.triton import inbox
from gateway.triton.pool import TritonUpstream
from tests.gateway.triton.fake_channel import FakeChannels
from tests.gateway.triton.fake_triton import FakeTriton, generation, refusing, reply, until
from wire.meta import Meta, Segment, TokenLogprob

Serve = Callable[..., Any]


@pytest.fixture
def fake(triton: FakeTriton) -> FakeChannels:
    return FakeChannels(triton.model)


class Asked:
    """A generation that is collected in a task of its own."""

    def __init__(self, pool: TritonUpstream, **changes: Any) -> None:
        self.events: list[Event] = []
        self.task = asyncio.create_task(self._collect(pool, generation(**changes)))

    async def _collect(self, pool: TritonUpstream, request: Any) -> None:
        async for event in pool.generate(request):
            self.events.append(event)

    @property
    def deltas(self) -> list[Delta]:
        return [event for event in self.events if isinstance(event, Delta)]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


async def asked(pool: TritonUpstream, fake: FakeChannels, **changes: Any) -> tuple[Asked, int]:
    """Ask, and return the answer-to-be and its number on the channel."""
    before = set(fake.own)
    asking = Asked(pool, **changes)
    await until(lambda: set(fake.own) > before)
    (number,) = set(fake.own) - before
    return asking, number


async def test_deltas_come_over_the_channel_and_the_end_over_the_own_stream(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    asking, number = await asked(await serve(triton), fake)
    fake.accept(number)
    fake.frame((number, "He"))
    await until(lambda: asking.text == "He")
    fake.frame((number, "l"))
    fake.finish(number, 2, text="lo")
    await asking.task
    assert asking.events[0] == Accepted(prompt_tokens=5)
    assert asking.text == "Hello"
    assert sum(delta.tokens for delta in asking.deltas) == 3
    assert asking.deltas[-1].usage.completion_tokens == 3
    assert triton.half_closed > 0


async def test_either_stream_may_be_ahead_of_the_other(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    asking, number = await asked(await serve(triton), fake)
    fake.frame((number, "a"))
    await asyncio.sleep(0.05)
    assert asking.events == [], "nothing is told before the request was accepted"
    fake.accept(number)
    await until(lambda: asking.text == "a")
    fake.finish(number, 3, frame=4, text="d")
    await asyncio.sleep(0.05)
    assert asking.text == "a"
    assert not asking.task.done(), "two deltas are still on their way"
    fake.frame((number, "b"))
    fake.frame()
    fake.frame((number, "c"))
    await asking.task
    assert asking.text == "abcd"


async def test_each_choice_ends_when_its_own_deltas_have_come(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    asking, number = await asked(await serve(triton), fake, n=3)
    fake.accept(number)
    fake.frame((number, "a"), (number + 1, "k"), (number + 2, "x"))
    fake.finish(number, 1, index=0, text="b", last=False)
    fake.finish(number, 2, frame=2, index=2, last=False)

    def texts() -> list[str]:
        return ["".join(each.text for each in asking.deltas if each.index == index) for index in range(3)]

    def ended() -> list[int]:
        return [each.index for each in asking.deltas if each.finish_reason is not None]

    await until(lambda: ended() == [0])
    assert texts() == ["ab", "k", "x"]
    await asyncio.sleep(0.05)
    assert ended() == [0], "a delta of the third is still on its way"
    fake.frame((number + 2, "y"), (number + 1, "l"))
    await until(lambda: ended() == [0, 2])
    fake.finish(number, 2, index=1, text="m")
    await asking.task
    assert texts() == ["ab", "klm", "xy"]
    assert [each.usage is not None for each in asking.deltas if each.finish_reason] == [False, False, True]


async def test_a_missing_delta_of_one_choice_is_noticed_whatever_the_others_have(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    asking, number = await asked(await serve(triton), fake, n=2)
    fake.accept(number)
    fake.frame((number, "a"))
    fake.frame((number, "b"))
    fake.finish(number, 1, index=1, last=False)
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(asking.task, 10)


async def test_an_end_of_a_choice_that_nobody_asked_for_is_an_error(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    asking, number = await asked(await serve(triton), fake, n=2)
    fake.accept(number)
    fake.finish(number, 0, index=2, last=False)
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(asking.task, 10)


async def test_a_missing_delta_is_noticed_by_the_count(
    triton: FakeTriton, fake: FakeChannels, serve: Serve, observer: Any
) -> None:
    asking, number = await asked(await serve(triton), fake)
    fake.accept(number)
    fake.frame((number, "a"))
    fake.frame()
    fake.finish(number, 2)
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(asking.task, 10)
    assert asking.text == "a"
    assert asking.deltas[-1].usage is None
    assert observer.errors == [("m", triton.address, "protocol")]


async def test_a_delta_that_is_missing_from_a_frame_still_to_come_is_noticed_with_that_frame(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    asking, number = await asked(await serve(triton), fake)
    fake.accept(number)
    fake.frame((number, "a"))
    fake.finish(number, 2, frame=2)
    await until(lambda: asking.text == "a")
    await asyncio.sleep(0.05)
    assert not asking.task.done()
    fake.frame()
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(asking.task, 10)


async def test_a_delta_too_many_is_no_answer_either(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    asking, number = await asked(await serve(triton), fake)
    fake.accept(number)
    fake.frame((number, "a"))
    fake.frame((number, "b"))
    await until(lambda: asking.text == "ab")
    fake.finish(number, 1)
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(asking.task, 10)


async def test_an_end_that_does_not_count_is_out_of_contract(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    asking, number = await asked(await serve(triton), fake)
    fake.accept(number)
    fake.own[number].put_nowait(reply("x", Meta(tokens=1, finish_reason="stop"), final=True))
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(asking.task, 10)


async def test_an_own_stream_that_ends_without_an_end_is_out_of_contract(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    asking, number = await asked(await serve(triton), fake)
    fake.own[number].put_nowait(reply(meta=Meta(), final=True))
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(asking.task, 10)


async def test_what_else_there_is_of_a_delta_is_read(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    asking, number = await asked(await serve(triton), fake)
    fake.accept(number)
    logprob = TokenLogprob(5, "a", [97], -0.5, [])
    fake.frame((number, "a"))
    fake.frame((number, "b", Meta(logprobs=[logprob], token_ids=[5])))
    fake.frame((number, "\nc", Meta(segments=[Segment(1, "assistant")])))
    await until(lambda: asking.text == "ab\nc")
    fake.finish(number, 3)
    await asking.task
    (with_details,) = [delta for delta in asking.deltas if delta.logprobs is not None]
    assert with_details.text == "b"
    assert with_details.token_ids == (5,)
    assert with_details.logprobs[0].token == "a"


async def test_a_broken_document_ends_its_own_answer_only(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton)
    (broken, one), (well, two) = await asked(pool, fake), await asked(pool, fake)
    fake.accept(one)
    fake.accept(two)
    fake.frame((one, "a", Meta(index=3)), (two, "b"))
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(broken.task, 10)
    fake.finish(two, 1)
    await well.task
    assert well.text == "b"


async def test_a_refusal_is_the_requests_own(triton: FakeTriton, fake: FakeChannels, serve: Serve) -> None:
    pool = await serve(triton)
    triton.model.answer = refusing("tritongate:internal: why")
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(Asked(pool).task, 10)
    assert len(fake.ids) == 1
    assert fake.closed == 0


async def test_heartbeats_of_either_stream_keep_a_request_alive(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton, idle_timeout_s=0.6)
    asking, number = await asked(pool, fake)
    fake.accept(number)
    for turn in range(8):
        await asyncio.sleep(0.2)
        fake.frame(*([(number, "x")] if turn % 2 else []))
        if not turn % 2:
            fake.own[number].put_nowait(reply())
    fake.finish(number, 4)
    await asking.task
    assert sum(isinstance(event, Heartbeat) for event in asking.events) == 4


async def test_a_request_of_which_nothing_is_heard_is_given_up(
    triton: FakeTriton, fake: FakeChannels, serve: Serve, observer: Any
) -> None:
    pool = await serve(triton, idle_timeout_s=0.4)
    asking, number = await asked(pool, fake)
    fake.accept(number)
    while not asking.task.done():
        fake.frame()
        await asyncio.sleep(0.05)
    with pytest.raises(UnavailableError, match="stopped answering"):
        await asking.task
    assert observer.errors == [("m", triton.address, "silent")]
    await asyncio.wait_for(triton.cancelled.wait(), 10)


async def test_requests_of_a_lost_channel_are_sent_again_or_end(
    triton: FakeTriton, fake: FakeChannels, serve: Serve, observer: Any
) -> None:
    pool = await serve(triton)
    (begun, one), (accepted, two), (untouched, _) = [await asked(pool, fake) for _ in range(3)]
    fake.accept(one)
    fake.accept(two)
    fake.frame((one, "par"))
    await until(lambda: begun.text == "par" and bool(accepted.events))
    fake.lose()
    with pytest.raises(UnavailableError, match="was lost"):
        await asyncio.wait_for(begun.task, 10)
    await asyncio.wait_for(asyncio.gather(accepted.task, untouched.task), 10)
    for again in (accepted, untouched):
        assert again.text == "Hello"
        assert sum(isinstance(event, Accepted) for event in again.events) == 1
    assert fake.plain == 2, "sent again plainly, while the channel was closed"
    assert observer.errors == [("m", triton.address, "channel_lost")] * 3
    assert pool.model("m").ready, "the model is well"
    await until(lambda: len(fake.ids) == 1)


async def test_a_channel_that_only_the_model_knows_to_be_lost_is_opened_anew(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton)
    asking, number = await asked(pool, fake)
    fake.accept(number)
    fake.finish(number, 0, text="x")
    await asking.task
    fake.ids[-1] = "something else"  # as after the model was loaded anew
    again = Asked(pool)
    await asyncio.wait_for(again.task, 10)
    assert again.text == "Hello"
    await until(lambda: fake.closed == 1)


async def test_closing_a_generation_cancels_its_own_call_and_not_the_channel(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton)
    events = pool.generate(generation())
    first = asyncio.create_task(anext(events))
    await until(lambda: bool(fake.own))
    fake.accept(0)
    await first
    await events.aclose()
    await asyncio.wait_for(triton.cancelled.wait(), 10)
    assert fake.closed == 0
    fake.frame((0, "nobody's"))
    asking, number = await asked(pool, fake)
    fake.accept(number)
    fake.frame((number, "a"))
    fake.finish(number, 1)
    await asking.task
    assert asking.text == "a"


async def test_a_slow_reader_stalls_nobody_and_is_given_up_beyond_a_bound(
    triton: FakeTriton, fake: FakeChannels, serve: Serve, observer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "LIMIT_BYTES", 1000)
    pool = await serve(triton)
    slow = pool.generate(generation())
    first = asyncio.create_task(anext(slow))
    await until(lambda: bool(fake.own))
    fake.accept(0)
    await first  # and from here on the client reads nothing
    fast, number = await asked(pool, fake)
    fake.accept(number)
    for turn in range(20):
        fake.frame((0, "s"), (number, "f"))
        await until(lambda turn=turn: len(fast.text) == turn + 1)
    await asyncio.wait_for(triton.cancelled.wait(), 10)
    fake.finish(number, 20)
    await fast.task
    kept = await anext(slow)
    assert 5 < kept.tokens < 15, "what was kept is read before the error"
    with pytest.raises(ClientGoneError):
        await anext(slow)
    assert observer.errors == [], "no fault of the Triton's"


async def test_a_busy_reader_gets_what_piled_up_in_one_delta(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton)
    events = pool.generate(generation())
    first = asyncio.create_task(anext(events))
    await until(lambda: bool(fake.own))
    fake.accept(0)
    await first
    for character in "abc":
        fake.frame((0, character))
    asking, number = await asked(pool, fake)  # its frame comes after those
    fake.accept(number)
    fake.frame((number, "x"))
    await until(lambda: asking.text == "x")
    assert await anext(events) == Delta(text="abc", tokens=3)
    await events.aclose()
    asking.task.cancel()


async def test_what_is_not_streamed_or_not_offered_or_switched_off_is_plain(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    await Asked(await serve(triton), stream=False).task
    await Asked(await serve(triton, delta_channel=False)).task
    triton.model.report = type(triton.model.report)(
        heartbeat_age_s=0.01, running=0, waiting=0, format="chatglm3", max_context=512
    )
    await Asked(await serve(triton)).task
    assert (fake.plain, fake.ids) == (3, [])


async def test_the_channel_is_closed_when_the_model_takes_no_more_requests_and_with_the_pool(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton, idle_timeout_s=100)
    asking, number = await asked(pool, fake)
    triton.model.state = "UNAVAILABLE"
    await until(lambda: not pool.model("m").ready)
    fake.accept(number)
    fake.frame((number, "a"))
    await until(lambda: asking.text == "a")
    assert fake.closed == 0, "one is still on it"
    fake.finish(number, 1)
    await asking.task
    await until(lambda: fake.closed == 1)
    triton.model.state = "READY"
    await until(lambda: pool.model("m").ready)
    await asked(pool, fake)
    assert len(fake.ids) == 2
    await pool.close()
    await until(lambda: fake.closed == 2)


async def test_running_generations_end_when_the_pool_is_closed(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton)
    asking, number = await asked(pool, fake)
    fake.accept(number)
    fake.frame((number, "a"))
    await until(lambda: asking.text == "a")
    await pool.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        await asyncio.wait_for(asking.task, 10)
