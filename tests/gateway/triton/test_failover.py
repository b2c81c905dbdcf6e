import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_span_id

from gateway.core.batch import together
from gateway.core.events import Accepted, Delta
from gateway.core.request import TokenIds
from gateway.errors import InvalidRequestError, RateLimitError, UnavailableError, UpstreamProtocolError
from gateway.telemetry.tracing import Trace, Tracing, current_trace
from gateway.triton import pool as triton_pool
from gateway.triton.attempts import Attempts
from gateway.triton.errors import Fault, TritonError
from gateway.triton.options import PoolOptions
from gateway.triton.replicas import TRIAL_LIMIT, Replica, ReplicaState
from tests.gateway.triton.fake_triton import (
    accepted,
    finished,
    generation,
    losing,
    part_of_logits,
    refusing,
    reply,
    until,
)
from tests.gateway.triton.running import collect, text
from wire.meta import Meta
from wire.refusal import RefusalCode, refusal_text

Serve = Callable[..., Any]


async def test_generations_spread_over_the_replicas(tritons: Any, serve: Serve) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    release = asyncio.Event()

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        await release.wait()
        yield finished("x", 1)

    first.model.answer = second.model.answer = answer
    tasks = [asyncio.create_task(collect(pool, generation())) for _ in range(6)]
    await until(lambda: len(first.requests) + len(second.requests) == 6)
    release.set()
    await asyncio.gather(*tasks)
    assert (len(first.requests), len(second.requests)) == (3, 3)


@pytest.mark.parametrize(
    "words",
    [
        "LoRA tuned is not supported, we currently support ['old']",
        refusal_text(RefusalCode.INVALID_REQUEST, "lora_name: there is no adapter 'tuned'; there are: old"),
    ],
)
async def test_an_adapter_may_be_on_another_replica(tritons: Any, serve: Serve, words: str) -> None:
    """Tritons get a new one in turns."""
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    first.model.answer = refusing(words)
    for _ in range(3):  # not all of them go to the second
        assert text(await collect(pool, generation())) == "Hello"
    assert first.requests
    assert all(each.state is ReplicaState.READY for each in pool.replicas())
    second.model.answer = first.model.answer
    with pytest.raises(InvalidRequestError, match="adapter") as caught:
        await collect(pool, generation())
    assert caught.value.param == "model"


async def test_a_replica_that_came_back_gets_few_requests_until_it_has_answered_one(
    tritons: Any, serve: Serve
) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    back = next(each for each in pool.replicas() if each.upstream == second.address)
    assert not back.on_trial
    back.suspect(TritonError(Fault.SILENT, "nothing came"))
    await until(lambda: back.state is ReplicaState.READY)
    assert back.on_trial
    answering, release = asyncio.Event(), asyncio.Event()

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        await answering.wait()
        yield reply("y", Meta(tokens=1))
        await release.wait()
        yield finished("x", 1)

    first.model.answer = second.model.answer = answer
    tasks = [asyncio.create_task(collect(pool, generation())) for _ in range(4 * TRIAL_LIMIT)]
    await until(lambda: len(first.requests) + len(second.requests) == len(tasks))
    assert len(second.requests) == TRIAL_LIMIT
    answering.set()
    await until(lambda: not back.on_trial)
    tasks += [asyncio.create_task(collect(pool, generation())) for _ in range(2 * TRIAL_LIMIT)]
    await until(lambda: len(first.requests) + len(second.requests) == len(tasks))
    assert len(second.requests) > TRIAL_LIMIT
    release.set()
    await asyncio.gather(*tasks)


async def test_a_replica_that_came_back_gets_everything_where_there_is_no_other(
    triton: Any, serve: Serve
) -> None:
    pool = await serve(triton)
    (back,) = pool.replicas()
    back.suspect(TritonError(Fault.SILENT, "nothing came"))
    await until(lambda: back.state is ReplicaState.READY)
    release = asyncio.Event()

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        await release.wait()
        yield finished("x", 1)

    triton.model.answer = answer
    tasks = [asyncio.create_task(collect(pool, generation())) for _ in range(2 * TRIAL_LIMIT)]
    await until(lambda: len(triton.requests) == len(tasks))
    assert back.on_trial
    release.set()
    await asyncio.gather(*tasks)
    assert not back.on_trial


@pytest.mark.parametrize("seen", ["nothing", "accepted", "a heartbeat"])
async def test_a_replica_lost_before_the_first_token_is_replaced_unseen(
    tritons: Any, serve: Serve, observer: Any, seen: str
) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    before = {
        "nothing": [],
        "accepted": [accepted()],
        "a heartbeat": [accepted(), reply()],
    }[seen]
    first.model.answer = losing(*before)
    for _ in range(2):
        events = await collect(pool, generation())
        assert sum(isinstance(event, Accepted) for event in events) == 1
        assert text(events) == "Hello"
        await until(lambda: all(replica.state is ReplicaState.READY for replica in pool.replicas()))
    assert first.requests
    assert set(observer.errors) == {("m", first.address, "unreachable")}


async def test_after_the_first_text_nothing_is_repeated(tritons: Any, serve: Serve) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    first.model.answer = second.model.answer = losing(accepted(), reply("He"))
    events = pool.generate(generation())
    assert isinstance(await anext(events), Accepted)
    assert isinstance(await anext(events), Delta)
    with pytest.raises(UnavailableError):
        await anext(events)
    assert len(first.requests) + len(second.requests) == 1


async def test_an_answer_of_which_only_tokens_were_counted_is_begun_again(tritons: Any, serve: Serve) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    first.model.answer = losing(accepted(), reply("", Meta(tokens=1)))
    for _ in range(2):  # one of them goes to the first
        assert text(await collect(pool, generation())) == "Hello"
        await until(lambda: all(replica.state is ReplicaState.READY for replica in pool.replicas()))
    assert first.requests


async def test_a_full_engine_may_be_passed_by(tritons: Any, serve: Serve) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    first.model.answer = refusing("tritongate:queue_full: 512 are waiting")
    for _ in range(2):
        assert text(await collect(pool, generation())) == "Hello"
    second.model.answer = first.model.answer
    with pytest.raises(RateLimitError) as raised:
        await collect(pool, generation())
    assert raised.value.retry_after_s == 1
    assert all(replica.state is ReplicaState.READY for replica in pool.replicas())


async def test_words_that_nobody_knows_are_taken_elsewhere_once(tritons: Any, serve: Serve) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    first.model.answer = refusing("Failed to process the request(s) for model 'm'")
    for _ in range(2):
        assert text(await collect(pool, generation())) == "Hello"
    second.model.answer = first.model.answer
    first.requests.clear()
    second.requests.clear()
    with pytest.raises(UpstreamProtocolError):
        await collect(pool, generation())
    assert (len(first.requests), len(second.requests)) == (1, 1)
    assert all(replica.state is ReplicaState.READY for replica in pool.replicas())


async def test_a_refusal_of_the_request_is_not_taken_elsewhere(tritons: Any, serve: Serve) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    first.model.answer = second.model.answer = refusing("tritongate:invalid_request: bad")
    with pytest.raises(InvalidRequestError):
        await collect(pool, generation())
    assert len(first.requests) + len(second.requests) == 1


async def test_attempts_are_bounded(tritons: Any, serve: Serve, monkeypatch: Any) -> None:
    servers = [await tritons() for _ in range(4)]
    monkeypatch.setattr(triton_pool, "_ATTEMPTS_LIMIT", 2)
    pool = await serve(*servers)
    for server in servers:
        server.model.answer = losing(accepted())
    with pytest.raises(UnavailableError):
        await collect(pool, generation())
    assert sum(len(server.requests) for server in servers) == 2


async def test_a_dead_replica_is_avoided_and_taken_back(tritons: Any, serve: Serve) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    await first.stop()
    for _ in range(4):
        assert text(await collect(pool, generation())) == "Hello"
    assert len(second.requests) == 4
    await first.start()
    await until(lambda: all(replica.state is ReplicaState.READY for replica in pool.replicas()))
    await collect(pool, generation())
    await collect(pool, generation())
    assert len(first.requests) == 1


async def test_a_closed_pool_tries_no_other_replica(tritons: Any, serve: Serve, monkeypatch: Any) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    first.model.answer = second.model.answer = losing(accepted())
    events = pool.generate(generation())
    await anext(events)
    monkeypatch.setattr(pool, "_closed", True)
    with pytest.raises(UnavailableError, match="shutting down"):
        await anext(events)
    assert len(first.requests) + len(second.requests) == 1


class Somewhere:
    """Stands for a client where only its address is asked for."""

    address = "somewhere:8001"


def replicas(*states: ReplicaState) -> list[Replica]:
    made = []
    for state in states:
        somewhere: Any = Somewhere()
        replica = Replica("m", somewhere, PoolOptions())
        replica.state = state
        made.append(replica)
    return made


async def test_the_least_burdened_replica_is_chosen_and_equal_ones_take_turns() -> None:
    a, b, down = replicas(ReplicaState.READY, ReplicaState.READY, ReplicaState.UNREACHABLE)
    choose = Attempts(generation()).choose
    assert [choose([a, b, down]) for _ in range(4)] == [a, b, a, b]
    with a.in_use():
        assert [choose([a, b, down]) for _ in range(3)] == [b, b, b]
        with b.in_use(), b.in_use():
            assert choose([a, b, down]) is a
    assert a.outstanding == b.outstanding == 0
    assert choose([down]) is None
    assert choose([]) is None


TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Recorded(Trace):
    """Its spans are kept here."""

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        tracer = provider.get_tracer("test")
        super().__init__(tracer, tracer.start_span("request"))

    @property
    def told(self) -> list[Any]:
        return [
            [
                span.name,
                attributes["server.address"],
                attributes["tritongate.attempt"],
                *(event.name for event in span.events),
                *([attributes["error.type"]] if "error.type" in attributes else []),
            ]
            for span in self._spans.get_finished_spans()
            for attributes in [span.attributes or {}]
        ]

    @property
    def last_id(self) -> str:
        return format_span_id(self._spans.get_finished_spans()[-1].context.span_id)

    def clear(self) -> None:
        self._spans.clear()
        self.calls.clear()


@pytest.fixture
def trace() -> Iterator[Recorded]:
    trace = Recorded()
    token = current_trace.set(trace)
    yield trace
    current_trace.reset(token)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_clients_traceparent_reaches_triton(triton: Any, serve: Serve, *, stream: bool) -> None:
    pool = await serve(triton)
    trace = Tracing().begin("POST", {"traceparent": TRACEPARENT, "tracestate": "a=1"})
    token = current_trace.set(trace)
    triton.metadata.clear()
    async for _ in pool.generate(generation(stream=stream)):
        pass
    current_trace.reset(token)
    sent = [each for each in triton.metadata if "traceparent" in each]  # not the probes
    assert [(each["traceparent"], each["tracestate"]) for each in sent] == [(TRACEPARENT, "a=1")]
    assert trace.calls == [[triton.address]]


async def test_each_triton_that_is_tried_is_a_call(tritons: Any, serve: Serve, trace: Recorded) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    first.model.answer = refusing("tritongate:shutting_down: the model is being unloaded")
    for triton in (first, second):
        triton.metadata.clear()
    while len(trace.told) < 2:  # which of the two is first is left to chance
        trace.clear()
        events = [event async for event in pool.generate(generation())]
        assert isinstance(events[-1], Delta)
        await until(lambda: pool.model("m").ready)
    assert trace.told == [
        ["call", first.address, 1, "not_ready"],
        ["call", second.address, 2, "accepted", "first_token"],
    ]
    assert trace.calls == [[first.address, second.address]]
    sent = [each["traceparent"] for each in second.metadata if "traceparent" in each][-1]
    assert sent.split("-")[1:3] == [trace.trace_id, trace.last_id]


async def test_the_tries_of_each_prompt_are_counted_by_themselves(
    triton: Any, serve: Serve, trace: Recorded
) -> None:
    pool = await serve(triton)
    prompts = [generation(request_id=each) for each in "abc"]
    events = [event async for event in together(pool.generate, prompts)]
    assert isinstance(events[-1], Delta)
    assert [attempt for _, _, attempt, *_ in trace.told] == [1, 1, 1]
    assert trace.calls == [[triton.address]] * 3


async def test_what_is_asked_outside_of_a_request_has_no_trace(triton: Any, serve: Serve) -> None:
    pool = await serve(triton)
    async for _ in pool.generate(generation()):
        pass
    assert not [each for each in triton.metadata if "traceparent" in each]


async def test_logits_that_broke_off_begin_anew_elsewhere(tritons: Any, serve: Serve) -> None:
    """The second server's take the place of the first one's: nobody has seen these."""
    first, second = await tritons(), await tritons()
    for each in (first, second):
        each.model.report = replace(each.model.report, vocabulary=1)
    pool = await serve(first, second)
    parts = [part_of_logits(place) for place in range(5)]
    whole = [accepted(), *parts, finished(completion_tokens=0)]
    asked: list[Any] = []

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        asked.append(request)
        if len(asked) == 1:
            for each in whole[:3]:
                yield each
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        for each in whole:
            yield each

    first.model.answer = second.model.answer = answer
    request = generation(prompt=TokenIds((1, 2, 3, 4, 5)), max_tokens=0, logits=True)
    events = await collect(pool, request)
    assert len(asked) == 2
    told = [event.logits.first for event in events if isinstance(event, Delta) and event.logits is not None]
    assert told == [0, 1, 0, 1, 2, 3, 4]
    assert sum(isinstance(event, Accepted) for event in events) == 1


async def test_a_model_that_reports_no_logits_is_not_asked(tritons: Any, serve: Serve) -> None:
    triton = await tritons()
    pool = await serve(triton)
    with pytest.raises(InvalidRequestError, match="reports no logits"):
        await collect(pool, generation(prompt=TokenIds((1,)), max_tokens=0, logits=True))
    assert not triton.requests
