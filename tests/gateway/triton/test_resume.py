"""Answers that go on after the loss of the server that was writing them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.core.events import Accepted, Delta, Event, Usage
from gateway.errors import RateLimitError, UnavailableError, UpstreamProtocolError
from gateway.triton import channel as delta_channel
from gateway.triton.options import HealthPolicy
from gateway.triton.replicas import ReplicaState
from tests.gateway.triton.fake_channel import FakeChannels
from tests.gateway.triton.fake_triton import (
    FakeTriton,
    Script,
    accepted,
    finished,
    generation,
    hanging,
    hello,
    inputs_of,
    losing,
    refusing,
    reply,
    until,
)
from tests.gateway.triton.running import Running, text
from wire.meta import Meta, PromptLogprob
from wire.meta import Usage as WireUsage
from wire.request import Generation, decode_request

Serve = Callable[..., Any]


@pytest.fixture
def resuming(tritons: Any) -> Any:
    """Starts Tritons whose models resume."""

    async def start(**report: Any) -> FakeTriton:
        triton: FakeTriton = await tritons()
        triton.model.report = replace(triton.model.report, resumes=True, **report)
        return triton

    return start


def asked(triton: FakeTriton) -> list[Generation]:
    """What the generations were that it got."""
    requests = [decode_request(inputs_of(request)["sampling"]) for request in triton.requests]
    return [request for request in requests if isinstance(request, Generation)]


async def collect(events: AsyncIterator[Event], into: list[Event]) -> list[Event]:
    async for event in events:  # one by one: some are looked at before the last
        into.append(event)  # noqa: PERF401 - see above
    return into


def deltas(events: list[Event]) -> list[Delta]:
    return [event for event in events if isinstance(event, Delta)]


def in_turn(scripts: list[Script]) -> Script:
    """An answer by the next of `scripts`, which it takes away, for each request."""

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        async for response in scripts.pop(0)(request, context):
            yield response

    return answer


async def test_a_stream_goes_on_after_the_tokens_that_came(
    resuming: Any, serve: Serve, observer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = await resuming()
    fake = FakeChannels(triton.model)
    pool = await serve(triton)
    events: list[Event] = []
    task = asyncio.create_task(collect(pool.generate(generation(stream=True)), events))
    await until(lambda: len(triton.requests) == 1 and 0 in fake.own)
    fake.accept(0)
    fake.frame((0, "a"), ids=[[7]])
    fake.frame((0, "b"), ids=[[8]])
    await until(lambda: text(events) == "ab")
    fake.lose()
    await until(lambda: len(triton.requests) == 2 and 1 in fake.own)
    fake.accept(1)
    fake.frame((1, "c"), ids=[[9]])
    fake.finish(1, 1, text="d", completion_tokens=4)
    await task
    assert text(events) == "abcd"
    assert sum(isinstance(event, Accepted) for event in events) == 1
    assert sum(delta.tokens for delta in deltas(events)) == 4
    assert deltas(events)[-1].usage == Usage(prompt_tokens=5, completion_tokens=4)
    first, second = asked(triton)
    assert first.channel is not None
    assert first.channel.ids
    assert first.seed is not None
    assert second.seed == first.seed, "sampled on with the same random numbers"
    assert (first.generated, second.generated) == ([], [[7, 8]])
    assert observer.resumes == [("m",)]


async def test_it_goes_on_elsewhere_as_soon_as_its_server_is_gone(
    resuming: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost channel may be that of a lost server: it is asked at once, and nobody waits for its next one."""
    monkeypatch.setattr(delta_channel, "OPEN_WAIT_S", 1000)
    tritons = [await resuming(), await resuming()]
    fakes = [FakeChannels(each.model) for each in tritons]
    pool = await serve(*tritons, health=HealthPolicy(interval_s=1000))
    answers = [Running(pool, seed=number) for number in range(2)]
    await until(lambda: all(fake.own for fake in fakes))
    for fake in fakes:
        fake.accept(0)
        fake.frame((0, "a"), ids=[[7]])
    await until(lambda: all(answer.text == "a" for answer in answers))
    # What it had is nothing to do any more, so by its load it would be chosen again.
    fakes[0].silent = True
    tritons[0].model.probe = refusing("tritongate:unavailable: it ends")
    fakes[0].lose()
    await until(lambda: len(fakes[1].own) == 2)
    second = max(fakes[1].own)
    fakes[1].accept(second)
    for stream in (0, second):
        fakes[1].finish(stream, int(stream == 0), text="b", completion_tokens=2)
    await asyncio.wait_for(asyncio.gather(*(answer.task for answer in answers)), 60)
    assert [answer.text for answer in answers] == ["ab", "ab"]


async def test_choices_that_have_ended_are_not_asked_for_again(resuming: Any, serve: Serve) -> None:
    first, second = await resuming(), await resuming()
    ended = reply("one", Meta(tokens=3, finish_reason="stop"))
    first.model.answer = losing(accepted(), ended)
    usage = WireUsage(prompt_tokens=5, completion_tokens=5)
    rest = reply("two", Meta(index=1, tokens=5, finish_reason="length", usage=usage), final=True)

    async def go_on(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        yield rest

    second.model.answer = go_on
    pool = await serve(first, second)
    for _ in range(2):  # one of them goes to the first
        second.requests.clear()
        events = await collect(pool.generate(generation(n=2, seed=9)), [])
        if first.requests:
            break
        first.model.answer, second.model.answer = second.model.answer, first.model.answer
        first, second = second, first
    assert [(delta.index, delta.text, delta.finish_reason) for delta in deltas(events)] == [
        (0, "one", "stop"),
        (1, "two", "length"),
    ]
    assert deltas(events)[-1].usage == Usage(prompt_tokens=5, completion_tokens=8)
    (again,) = asked(second)
    assert (again.generated, again.seed) == ([None, []], 9)


async def test_log_probabilities_of_the_prompt_are_told_once(resuming: Any, serve: Serve) -> None:
    triton = await resuming()
    pool = await serve(triton)
    scored = [PromptLogprob(number, "x", [120], None if number == 0 else -1.0, []) for number in range(5)]
    scripts = [
        losing(accepted(), reply(meta=Meta(prompt_logprobs=scored[:2]))),
        losing(accepted(), reply(meta=Meta(prompt_logprobs=scored[:4]))),
    ]

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        if scripts:
            async for response in scripts.pop(0)(request, context):
                yield response
            return
        yield accepted()
        yield reply(meta=Meta(prompt_logprobs=scored[:3]))
        yield reply(meta=Meta(prompt_logprobs=scored[3:]))
        yield finished("x", 1)

    triton.model.answer = answer
    events = await collect(pool.generate(generation(prompt_logprobs=0)), [])
    told = [each.id for delta in deltas(events) for each in delta.prompt_logprobs]
    assert told == [0, 1, 2, 3, 4]
    assert text(events) == "x"


async def test_it_waits_until_its_only_server_is_back(resuming: Any, serve: Serve) -> None:
    triton = await resuming()
    hello = triton.model.answer
    triton.model.answer = hanging(accepted())
    pool = await serve(triton)
    events: list[Event] = []
    task = asyncio.create_task(collect(pool.generate(generation()), events))
    await until(lambda: any(isinstance(event, Accepted) for event in events))
    await triton.stop()
    await until(lambda: pool.replicas()[0].state is ReplicaState.UNREACHABLE)
    assert not task.done()
    triton.model.answer = hello
    await triton.start()
    await task
    assert text(events) == "Hello"


@pytest.mark.parametrize(
    "words", ["tritongate:unavailable: the engine failed in this step", "Failed to process the request(s)"]
)
async def test_an_answer_goes_on_after_a_fault_that_was_not_its_own(
    resuming: Any, serve: Serve, words: str
) -> None:
    triton = await resuming()
    pool = await serve(triton)
    scripts = [refusing(words, accepted()), triton.model.answer]

    triton.model.answer = in_turn(scripts)
    assert text(await collect(pool.generate(generation()), [])) == "Hello"
    assert not scripts


async def test_an_answer_that_the_model_fails_on_is_not_asked_for_again(resuming: Any, serve: Serve) -> None:
    triton = await resuming()
    pool = await serve(triton)
    triton.model.answer = refusing("tritongate:internal: the model's output is not finite", accepted())
    with pytest.raises(UpstreamProtocolError):
        await collect(pool.generate(generation()), [])
    assert len(triton.requests) == 1


async def test_a_full_queue_is_waited_for(resuming: Any, serve: Serve) -> None:
    triton = await resuming()
    pool = await serve(triton)
    hello = triton.model.answer
    scripts = [losing(accepted()), refusing("tritongate:queue_full: 512 are waiting"), hello]

    triton.model.answer = in_turn(scripts)
    assert text(await collect(pool.generate(generation()), [])) == "Hello"
    assert not scripts
    triton.model.answer = refusing("tritongate:queue_full: 512 are waiting")
    with pytest.raises(RateLimitError):  # as ever, where nothing was begun
        await collect(pool.generate(generation()), [])


async def test_it_is_not_resumed_without_end(resuming: Any, serve: Serve, observer: Any) -> None:
    triton = await resuming()
    triton.model.answer = losing(accepted())
    pool = await serve(triton)
    with pytest.raises(UnavailableError):
        await collect(pool.generate(generation()), [])
    assert len(triton.requests) == 4
    assert len(observer.resumes) == 3


@pytest.mark.parametrize("other", [{"format": "glm4"}, {"max_context": 9}, {"resumes": False}])
async def test_it_goes_on_with_no_other_model(resuming: Any, serve: Serve, other: dict[str, Any]) -> None:
    triton = await resuming()
    triton.model.answer = losing(accepted())
    pool = await serve(triton)
    deadline = asyncio.get_running_loop().time() + 1

    async def replaced(request: Any, context: Any) -> AsyncIterator[Any]:
        triton.model.report = replace(triton.model.report, **other)
        yield accepted()
        await triton.stop()

    triton.model.answer = replaced
    task = asyncio.create_task(collect(pool.generate(generation(deadline=deadline)), []))
    await until(lambda: pool.replicas()[0].state is ReplicaState.UNREACHABLE)
    await triton.start()
    with pytest.raises(UnavailableError):
        await task
    assert len(triton.requests) == 1


async def test_another_model_serves_undisturbed_what_does_not_go_on_there(
    resuming: Any, serve: Serve, observer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = await resuming(), await resuming(max_context=9)
    first.model.answer = other.model.answer = hanging(accepted())
    pool = await serve(first, other)
    answers: list[list[Event]] = [[], []]
    tasks = [asyncio.create_task(collect(pool.generate(generation()), into)) for into in answers]
    await until(lambda: all(answers))
    await first.stop()
    await until(lambda: bool(observer.errors))
    first.model.answer = hello
    await first.start()
    done, (running,) = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert text(await done.pop()) == "Hello"
    running.cancel()
    assert observer.errors == [("m", first.address, "unreachable")]
    assert other.address not in {getattr(record, "upstream", "") for record in caplog.records}
    assert len(other.requests) == 1


async def test_it_is_an_error_where_nothing_is_to_be_resumed(
    resuming: Any, serve: Serve, observer: Any
) -> None:
    triton = await resuming()
    triton.model.answer = losing(accepted(), reply(meta=Meta(tokens=1)))
    pool = await serve(triton, resume=False)
    with pytest.raises(UnavailableError):
        await collect(pool.generate(generation()), [])
    assert [request.seed for request in asked(triton)] == [None]
    assert observer.resumes == []
