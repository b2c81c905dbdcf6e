"""Answers over a delta channel, through the pool; plain ones are what `test_pool.py` is about."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gateway.core.events import Accepted, Delta, Heartbeat
from gateway.core.request import PlainText, Turns
from gateway.core.upstream import Tokenization
from gateway.errors import DeadlineError, InvalidRequestError, UnavailableError, UpstreamProtocolError
from gateway.triton import channel as delta_channel
from gateway.triton.buffer import DeltaBuffer
from tests.gateway.triton.fake_channel import FakeChannels
from tests.gateway.triton.fake_triton import (
    FakeTriton,
    Response,
    finished,
    generation,
    hanging,
    inputs_of,
    losing,
    refusing,
    reply,
    until,
)
from tests.gateway.triton.running import Running, send, started
from wire.history import Turn
from wire.meta import Accepted as WireAccepted
from wire.meta import Meta, PromptLogprob, Segment, TokenLogprob
from wire.refusal import RefusalCode, refusal_text
from wire.request import decode_request

Serve = Callable[..., Any]


async def test_deltas_come_over_the_channel_and_the_end_over_the_own_stream(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    running, number = await send(await serve(triton), fake)
    fake.accept(number)
    fake.frame((number, "He"))
    await until(lambda: running.text == "He")
    fake.frame((number, "l"))
    fake.finish(number, 2, text="lo")
    await running.task
    assert running.events[0] == Accepted(prompt_tokens=5)
    assert running.text == "Hello"
    assert sum(delta.tokens for delta in running.deltas) == 3
    assert running.deltas[-1].usage.completion_tokens == 3
    assert triton.half_closed > 0


async def test_either_stream_may_be_ahead_of_the_other(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    running, number = await send(await serve(triton), fake)
    fake.frame((number, "a"))
    fake.own[number].put_nowait(reply(meta=Meta()))  # it is still being prepared
    await asyncio.sleep(0.05)
    assert running.events == [], "nothing is told before the request was accepted"
    fake.accept(number)
    await until(lambda: running.text == "a")
    fake.finish(number, 3, frame=4, text="d")
    await asyncio.sleep(0.05)
    assert running.text == "a"
    assert not running.task.done(), "two deltas are still on their way"
    fake.frame((number, "b"))
    fake.frame()
    fake.frame((number, "c"))
    await running.task
    assert running.text == "abcd"


async def test_each_choice_ends_when_its_own_deltas_have_come(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    running, number = await send(await serve(triton), fake, n=3)
    fake.accept(number)
    fake.frame((number, "a"), (number + 1, "k"), (number + 2, "x"))
    fake.finish(number, 1, index=0, text="b", last=False)
    fake.finish(number, 2, frame=2, index=2, last=False)

    def texts() -> list[str]:
        return ["".join(each.text for each in running.deltas if each.index == index) for index in range(3)]

    def ended() -> list[int]:
        return [each.index for each in running.deltas if each.finish_reason is not None]

    await until(lambda: ended() == [0])
    assert texts() == ["ab", "k", "x"]
    await asyncio.sleep(0.05)
    assert ended() == [0], "a delta of the third is still on its way"
    fake.frame((number + 2, "y"), (number + 1, "l"))
    await until(lambda: ended() == [0, 2])
    fake.finish(number, 2, index=1, text="m")
    await running.task
    assert texts() == ["ab", "klm", "xy"]
    assert [each.usage is not None for each in running.deltas if each.finish_reason] == [False, False, True]


async def test_what_else_there_is_of_a_delta_is_read(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    running, number = await send(await serve(triton), fake, logprobs=0)
    fake.accept(number)
    logprob = TokenLogprob(5, "b", [98], -0.5, [])
    fake.frame((number, "a"))
    fake.frame((number, "b", Meta(logprobs=[logprob], token_ids=[5])))
    fake.frame((number, "\nc", Meta(segments=[Segment(1, "assistant")])))
    await until(lambda: running.text == "ab\nc")
    fake.finish(number, 3)
    await running.task
    (with_details,) = [delta for delta in running.deltas if delta.logprobs]
    assert with_details.text == "b"
    assert with_details.token_ids == (5,)
    assert [each.token for each in with_details.logprobs or ()] == ["b"]


async def test_a_broken_document_ends_its_own_answer_only(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton)
    (broken, one), (well, two) = await send(pool, fake), await send(pool, fake)
    fake.accept(one)
    fake.accept(two)
    fake.frame((one, "a", Meta(index=3)), (two, "b"))
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(broken.task, 60)
    fake.finish(two, 1)
    await well.task
    assert well.text == "b"


async def test_a_refusal_is_the_requests_own(triton: FakeTriton, fake: FakeChannels, serve: Serve) -> None:
    pool = await serve(triton)
    triton.model.answer = refusing("tritongate:internal: why")
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(Running(pool).task, 60)
    assert len(fake.ids) == 1
    assert fake.closed == 0


async def test_heartbeats_of_either_stream_keep_a_request_alive(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton, idle_timeout_s=3)
    running, number = await send(pool, fake)
    fake.accept(number)
    for turn in range(8):
        await asyncio.sleep(0.6)
        fake.frame(*([(number, "x")] if turn % 2 else []))
        if not turn % 2:
            fake.own[number].put_nowait(reply())
    fake.finish(number, 4)
    await running.task
    assert sum(isinstance(event, Heartbeat) for event in running.events) == 4


async def test_what_is_not_streamed_comes_with_its_end_on_its_own_stream(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    pool = await serve(triton)
    answer = [event async for event in pool.generate(generation())]
    assert [event.text for event in answer if isinstance(event, Delta)] == ["Hello"]
    assert (fake.plain, len(fake.own)) == (1, 0)


def scored(token: str) -> Response:
    return reply(meta=Meta(prompt_logprobs=[PromptLogprob(7, token, [97], -1.0, [])]))


async def test_deltas_that_overtake_the_prompts_log_probabilities_wait_for_them(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    running, number = await send(await serve(triton), fake, n=2, prompt_logprobs=0)
    fake.frame((number, "a"), (number + 1, "x"))
    fake.accept(number, prompt_tokens=2)
    fake.frame((number, "b"))
    for token in "pq":
        fake.own[number].put_nowait(scored(token))
    await until(lambda: running.text == "ab")
    assert [[each.token for each in delta.prompt_logprobs] for delta in running.deltas] == [["p"], ["q"], []]
    one = PromptLogprob(7, "p", [97], -1.0, [])
    fake.own[number].put_nowait(reply(meta=Meta(index=1, prompt_logprobs=[one, one])))
    await until(lambda: running.text == "abx")
    fake.finish(number, 2, last=False)
    fake.finish(number, 1, index=1)
    await running.task


async def test_an_end_before_all_of_the_prompts_log_probabilities_is_an_error(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    running, number = await send(await serve(triton), fake, prompt_logprobs=0)
    fake.accept(number, prompt_tokens=2)
    fake.own[number].put_nowait(scored("p"))
    fake.finish(number, 0)
    with pytest.raises(UpstreamProtocolError):
        await asyncio.wait_for(running.task, 60)


async def test_what_a_slow_client_leaves_on_its_own_stream_is_not_read_ahead(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    """Log-probabilities of a long prompt take megabytes: Triton holds them until the client reads on."""
    count, sent = 400, 0
    pool = await serve(triton, idle_timeout_s=3)
    large = [PromptLogprob(7, "p" * 100_000, [97], -1.0, [])]

    async def answer(request: Any, context: Any) -> AsyncIterator[Response]:
        nonlocal sent
        yield reply(meta=Meta(accepted=WireAccepted(request_id="r", prompt_tokens=count)))
        for _ in range(count):
            yield reply(meta=Meta(prompt_logprobs=large))
            sent += 1
        yield finished()

    triton.model.answer = answer
    events = pool.generate(generation(stream=True, prompt_logprobs=0))
    await anext(events)
    for _ in range(20):  # longer than the idle timeout: it is the client that is waited for
        await asyncio.sleep(0.2)
        fake.frame()
    assert sent < count
    read = [event async for event in events]
    assert sum(len(event.prompt_logprobs) for event in read if isinstance(event, Delta)) == count


async def test_turns_are_answered_raw_with_their_segments(
    triton: FakeTriton, fake: FakeChannels, serve: Serve
) -> None:
    prompt = Turns((Turn("system", "s"),), "q", "observation")
    running, number = await send(await serve(triton), fake, prompt=prompt, max_total_tokens=9)
    fake.accept(number)
    fake.frame((number, "\n [[训练时间]]"))
    fake.frame((number, "a\nb", Meta(segments=[Segment(1, "assistant")])))
    fake.frame((number, "", Meta(segments=[Segment(0, "user")])))
    fake.finish(number, 3)
    await running.task
    assert [(each.text, each.segments) for each in running.deltas] == [
        ("\n [[训练时间]]", ()),
        ("a\nb", (Segment(1, "assistant"),)),
        ("", (Segment(0, "user"),)),
        ("", ()),
    ]
    sent: Any = decode_request(inputs_of(triton.requests[-1])["sampling"])
    assert (sent.role, sent.raw, sent.max_total_tokens) == ("observation", False, 9)


async def test_an_answer_that_was_given_up_is_freed_without_a_collection(
    triton: FakeTriton, fake: FakeChannels, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    living: weakref.WeakSet[DeltaBuffer] = weakref.WeakSet()

    class Watched(DeltaBuffer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            living.add(self)

    monkeypatch.setattr(delta_channel, "DeltaBuffer", Watched)
    pool = await serve(triton)
    gc.disable()
    try:
        events = await started(pool, fake)
        fake.frame((0, "He"))
        await anext(events)
        assert len(living) == 1
        await events.aclose()
        del events
        await until(lambda: not living)
    finally:
        gc.enable()


def tokenization(*, time_s: float = 30) -> Tokenization:
    deadline = asyncio.get_running_loop().time() + time_s
    return Tokenization(request_id="req-1", model="m", prompt=PlainText("hi"), deadline=deadline)


async def test_the_models_own_entry_counts(triton: Any, serve: Any, observer: Any) -> None:
    pool = await serve(triton)
    assert list((await pool.tokenize(tokenization())).ids) == [0, 5]
    assert triton.metadata[-1]["x-request-id"] == "req-1"
    assert triton.requests[-1].model_name == "m"
    assert observer.errors == []


async def test_its_refusal_is_the_clients_and_nonsense_the_models(triton: Any, serve: Any) -> None:
    async def twice(request: Any, context: Any) -> AsyncIterator[Response]:
        yield reply()
        yield reply(final=True)

    pool = await serve(triton)
    triton.model.tokenize = refusing(refusal_text(RefusalCode.INVALID_REQUEST, "no such id"))
    with pytest.raises(InvalidRequestError, match="no such id"):
        await pool.tokenize(tokenization())
    triton.model.tokenize = twice
    with pytest.raises(UpstreamProtocolError):
        await pool.tokenize(tokenization())


async def test_it_ends_with_its_deadline_and_is_cancelled_then(triton: Any, serve: Any) -> None:
    pool = await serve(triton)
    triton.model.tokenize = hanging()
    with pytest.raises(DeadlineError):
        await pool.tokenize(tokenization(time_s=1))
    await asyncio.wait_for(triton.cancelled.wait(), 60)
    with pytest.raises(DeadlineError):
        await pool.tokenize(tokenization(time_s=-1))


async def test_another_backend_is_tried_where_one_fails(tritons: Any, serve: Any) -> None:
    broken, well = await tritons(), await tritons()
    pool = await serve(broken, well)
    broken.model.tokenize = losing()
    for _ in range(2):
        assert list((await pool.tokenize(tokenization())).ids) == [0, 5]
        await until(lambda: all(replica.state == "ready" for replica in pool.replicas()))
    well.model.tokenize = losing()
    with pytest.raises(UnavailableError):
        await pool.tokenize(tokenization())
