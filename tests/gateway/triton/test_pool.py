import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from gateway.errors import (
    ContextLengthError,
    DeadlineError,
    GatewayError,
    InvalidRequestError,
    ModelNotFoundError,
    RateLimitError,
    UnavailableError,
    UpstreamProtocolError,
)
from gateway.generation import Accepted, Delta, Event, Heartbeat, Message
from gateway.triton.pool import TritonUpstream
from gateway.triton.replicas import ReplicaState
from wire.meta import Meta


class Observer:
    def __init__(self) -> None:
        self.healthy: dict[tuple[str, str], bool] = {}
        self.errors: list[tuple[str, str, str]] = []

    def upstream_health(self, model: str, upstream: str, *, healthy: bool) -> None:
        self.healthy[model, upstream] = healthy

    def upstream_error(self, model: str, upstream: str, code: str) -> None:
        self.errors.append((model, upstream, code))


@pytest.fixture
def observer() -> Observer:
    return Observer()


Serve = Callable[..., Any]


@pytest.fixture
async def serve(say: Any, observer: Observer) -> AsyncIterator[Serve]:
    """Starts a pool in front of Tritons and, unless told not to, waits until all of them are ready."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*tritons: Any, ready: bool = True, **options: Any) -> TritonUpstream:
            options = {
                "models": ["m"],
                "health": say.FAST,
                "observer": observer,
                "idle_timeout_s": 20,
            } | options
            pool = TritonUpstream(upstreams=[triton.address for triton in tritons], **options)
            await pool.start()
            stack.push_async_callback(pool.close)
            if ready:
                await say.until(
                    lambda: (
                        bool(pool.replicas())
                        and all(replica.state is ReplicaState.READY for replica in pool.replicas())
                    )
                )
            return pool

        yield start


async def collect(pool: TritonUpstream, request: Any) -> list[Event]:
    return [event async for event in pool.generate(request)]


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def refusing(message: str) -> Any:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield service_pb2.ModelStreamInferResponse(error_message=message)

    return answer


def losing(*responses: Any) -> Any:
    """An answer that breaks off as when the connection goes."""

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        for response in responses:
            yield response
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    return answer


async def test_a_generation_goes_through(triton: Any, serve: Serve, say: Any, observer: Observer) -> None:
    pool = await serve(triton)
    events = [event async for event in pool.generate(say.generation())]
    assert events[0] == Accepted(prompt_tokens=5)
    assert text(events) == "Hello"
    assert isinstance(events[-1], Delta)
    assert events[-1].usage is not None
    assert say.inputs_of(triton.requests[0])["prompt"] == b"hi"
    assert observer.errors == []
    assert observer.healthy == {("m", triton.address): True}


async def test_cards_show_what_is_served(triton: Any, serve: Serve) -> None:
    pool = await serve(triton, ready=False, models=["z", "m"])
    assert [(card.id, card.ready, card.max_context) for card in pool.models()] == [
        ("z", False, None),
        ("m", False, None),
    ]


async def test_a_card_is_filled_by_the_probe_and_keeps_it_while_the_model_is_down(
    triton: Any, serve: Serve, say: Any
) -> None:
    pool = await serve(triton)
    card = pool.model("m")
    assert (card.ready, card.max_context) == (True, 512)
    await triton.stop()
    await say.until(lambda: not pool.model("m").ready)
    assert pool.model("m").max_context == 512
    assert pool.model("m").created == card.created
    (report,) = pool.replicas()
    assert (report.model, report.upstream) == ("m", triton.address)
    assert report.state is ReplicaState.UNREACHABLE
    assert report.report is not None
    assert report.reason


async def test_an_unknown_model_is_not_found(triton: Any, serve: Serve, say: Any) -> None:
    pool = await serve(triton)
    with pytest.raises(ModelNotFoundError) as raised:
        pool.model("other")
    assert raised.value.param == "model"
    with pytest.raises(ModelNotFoundError):
        await collect(pool, say.generation(model="other"))


async def test_models_are_found_where_none_are_configured(triton: Any, serve: Serve, say: Any) -> None:
    triton.models["b-stream"] = say.FakeModel()
    triton.models["b-tokenizer"] = say.FakeModel(inputs=("request",))
    pool = await serve(triton, models=[])
    assert [card.id for card in pool.models()] == ["b", "m"]
    assert text(await collect(pool, say.generation(model="b"))) == "Hello"
    await triton.stop()
    await say.until(lambda: not pool.model("b").ready)
    with pytest.raises(UnavailableError):
        await collect(pool, say.generation(model="b"))
    with pytest.raises(ModelNotFoundError):
        pool.model("never-there")


async def test_before_any_triton_was_reached_nobody_knows_which_models_there_are(
    triton: Any, serve: Serve, say: Any
) -> None:
    await triton.stop()
    pool = await serve(triton, models=[], ready=False)
    with pytest.raises(UnavailableError):
        await collect(pool, say.generation())
    await triton.start()
    await say.until(lambda: bool(pool.models()))


@pytest.mark.parametrize("stopped", [True, False], ids=["dead", "not loaded"])
async def test_a_model_that_is_not_there_is_an_immediate_503(
    triton: Any, serve: Serve, say: Any, *, stopped: bool
) -> None:
    if stopped:
        await triton.stop()
    triton.models.clear()
    pool = await serve(triton, ready=False)
    expected = ReplicaState.UNREACHABLE if stopped else ReplicaState.NOT_READY
    await say.until(lambda: pool.replicas()[0].state is expected)
    with pytest.raises(UnavailableError) as raised:
        await collect(pool, say.generation())
    assert raised.value.retry_after_s


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        ("tritongate:queue_full: 512 are waiting", RateLimitError),
        ("[request id: r] Exceeds maximum queue size", RateLimitError),
        ("tritongate:context_length_exceeded: too long", ContextLengthError),
        ("tritongate:invalid_request: bad", InvalidRequestError),
        ("tritongate:deadline_exceeded: late", DeadlineError),
        ("Request timeout expired", DeadlineError),
        ("tritongate:shutting_down: bye", UnavailableError),
        ("Stub process 'm-stream_0_0' is not healthy.", UnavailableError),
        ("tritongate:internal: /etc/passwd", UpstreamProtocolError),
        ("Traceback: /models/m/1/model.py", UpstreamProtocolError),
    ],
)
async def test_refusals_reach_the_client_as_what_they_are(
    triton: Any, serve: Serve, say: Any, refusal: str, error: type[Exception]
) -> None:
    pool = await serve(triton)
    triton.model.answer = refusing(refusal)
    with pytest.raises(error) as raised:
        await collect(pool, say.generation())
    assert type(raised.value) is error
    assert "/" not in str(raised.value)


async def test_a_failure_is_counted_and_logged_with_its_detail_a_clients_own_mistake_is_not(
    triton: Any, serve: Serve, say: Any, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    pool = await serve(triton)
    for refusal in ("tritongate:invalid_request: bad", "Traceback: /models/m/1/model.py"):
        triton.model.answer = refusing(refusal)
        with caplog.at_level(logging.WARNING), pytest.raises(GatewayError):
            await collect(pool, say.generation())
    assert observer.errors == [("m", triton.address, "internal")]
    (record,) = [record for record in caplog.records if "upstream failed" in record.getMessage()]
    assert record.__dict__["request_id"] == "req-1"
    assert "/models/m/1/model.py" in record.__dict__["detail"]


async def test_an_answer_out_of_contract_is_a_502(
    triton: Any, serve: Serve, say: Any, observer: Observer
) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield say.accepted()
        yield say.reply("x", b'{"surprise": 1}')
        await asyncio.Event().wait()

    pool = await serve(triton)
    triton.model.answer = answer
    with pytest.raises(UpstreamProtocolError):
        await collect(pool, say.generation())
    assert observer.errors == [("m", triton.address, "protocol")]
    await asyncio.wait_for(triton.cancelled.wait(), 10)


async def test_a_final_response_of_triton_without_the_models_own_end_is_a_502(
    triton: Any, serve: Serve, say: Any
) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield say.accepted()
        yield say.empty_final()

    pool = await serve(triton)
    triton.model.answer = answer
    with pytest.raises(UpstreamProtocolError):
        await collect(pool, say.generation())


async def test_messages_the_chat_format_cannot_hold_are_refused_before_anything_is_sent(
    triton: Any, serve: Serve, say: Any
) -> None:
    pool = await serve(triton)
    with pytest.raises(InvalidRequestError):
        await collect(pool, say.generation(messages=(Message(role="tool", content="x"),)))
    assert triton.requests == []
    assert text(await collect(pool, say.generation())) == "Hello"


async def test_a_passed_deadline_is_never_sent(triton: Any, serve: Serve, say: Any) -> None:
    pool = await serve(triton)
    with pytest.raises(DeadlineError):
        await collect(pool, say.generation(deadline=asyncio.get_running_loop().time() - 1))
    assert triton.requests == []


async def until_cancelled(request: Any, context: Any, *responses: Any) -> AsyncIterator[Any]:
    for response in responses:
        yield response
    await asyncio.Event().wait()


async def test_a_silent_model_is_given_up_and_suspected(
    triton: Any, serve: Serve, say: Any, observer: Observer
) -> None:
    pool = await serve(triton, idle_timeout_s=0.2)
    triton.model.answer = lambda request, context: until_cancelled(request, context, say.accepted())
    with pytest.raises(UnavailableError, match="stopped answering"):
        await collect(pool, say.generation())
    assert observer.errors == [("m", triton.address, "silent")]
    await asyncio.wait_for(triton.cancelled.wait(), 10)
    await say.until(lambda: pool.model("m").ready)


async def test_heartbeats_hold_the_idle_deadline_off(triton: Any, serve: Serve, say: Any) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield say.accepted()
        for _ in range(4):
            await asyncio.sleep(0.25)
            yield say.reply()
        yield say.finished("late", 1)

    pool = await serve(triton, idle_timeout_s=0.75)
    triton.model.answer = answer
    events = await collect(pool, say.generation())
    assert sum(isinstance(event, Heartbeat) for event in events) == 4
    assert text(events) == "late"


async def test_closing_the_generator_reaches_triton(triton: Any, serve: Serve, say: Any) -> None:
    pool = await serve(triton)
    triton.model.answer = lambda request, context: until_cancelled(request, context, say.accepted())
    events = pool.generate(say.generation())
    await anext(events)
    await events.aclose()
    await asyncio.wait_for(triton.cancelled.wait(), 10)


async def test_cancelling_the_task_reaches_triton(triton: Any, serve: Serve, say: Any) -> None:
    pool = await serve(triton)
    triton.model.answer = lambda request, context: until_cancelled(request, context, say.accepted())
    task = asyncio.create_task(collect(pool, say.generation()))
    await say.until(lambda: bool(triton.requests))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(triton.cancelled.wait(), 10)


async def test_generations_spread_over_the_replicas(tritons: Any, serve: Serve, say: Any) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    release = asyncio.Event()

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield say.accepted()
        await release.wait()
        yield say.finished("x", 1)

    first.model.answer = second.model.answer = answer
    tasks = [asyncio.create_task(collect(pool, say.generation())) for _ in range(6)]
    await say.until(lambda: len(first.requests) + len(second.requests) == 6)
    release.set()
    await asyncio.gather(*tasks)
    assert (len(first.requests), len(second.requests)) == (3, 3)


@pytest.mark.parametrize("seen", ["nothing", "accepted", "a heartbeat"])
async def test_a_replica_lost_before_the_first_token_is_replaced_unseen(
    tritons: Any, serve: Serve, say: Any, observer: Observer, seen: str
) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    before = {
        "nothing": [],
        "accepted": [say.accepted()],
        "a heartbeat": [say.accepted(), say.reply()],
    }[seen]
    first.model.answer = losing(*before)
    for _ in range(2):
        events = await collect(pool, say.generation())
        assert sum(isinstance(event, Accepted) for event in events) == 1
        assert text(events) == "Hello"
        await say.until(lambda: all(replica.state is ReplicaState.READY for replica in pool.replicas()))
    assert first.requests
    assert set(observer.errors) == {("m", first.address, "unreachable")}


@pytest.mark.parametrize("delta", [Meta(tokens=1), None], ids=["a token without text", "text"])
async def test_after_the_first_token_nothing_is_repeated(
    tritons: Any, serve: Serve, say: Any, delta: Meta | None
) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    seen = say.reply("", delta) if delta else say.reply("He")
    first.model.answer = second.model.answer = losing(say.accepted(), seen)
    events = pool.generate(say.generation())
    assert isinstance(await anext(events), Accepted)
    assert isinstance(await anext(events), Delta)
    with pytest.raises(UnavailableError):
        await anext(events)
    assert len(first.requests) + len(second.requests) == 1


async def test_a_full_engine_may_be_passed_by(tritons: Any, serve: Serve, say: Any) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    first.model.answer = refusing("tritongate:queue_full: 512 are waiting")
    for _ in range(2):
        assert text(await collect(pool, say.generation())) == "Hello"
    second.model.answer = first.model.answer
    with pytest.raises(RateLimitError) as raised:
        await collect(pool, say.generation())
    assert raised.value.retry_after_s == 1
    assert all(replica.state is ReplicaState.READY for replica in pool.replicas())


async def test_a_refusal_of_the_request_is_not_taken_elsewhere(tritons: Any, serve: Serve, say: Any) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    first.model.answer = second.model.answer = refusing("tritongate:invalid_request: bad")
    with pytest.raises(InvalidRequestError):
        await collect(pool, say.generation())
    assert len(first.requests) + len(second.requests) == 1


async def test_attempts_are_bounded(tritons: Any, serve: Serve, say: Any) -> None:
    servers = [await tritons() for _ in range(4)]
    pool = await serve(*servers, max_attempts=2)
    for server in servers:
        server.model.answer = losing(say.accepted())
    with pytest.raises(UnavailableError):
        await collect(pool, say.generation())
    assert sum(len(server.requests) for server in servers) == 2


async def test_a_dead_replica_is_avoided_and_taken_back(tritons: Any, serve: Serve, say: Any) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)
    await first.stop()
    for _ in range(4):
        assert text(await collect(pool, say.generation())) == "Hello"
    assert len(second.requests) == 4
    await first.start()
    await say.until(lambda: all(replica.state is ReplicaState.READY for replica in pool.replicas()))
    await collect(pool, say.generation())
    await collect(pool, say.generation())
    assert len(first.requests) == 1


async def test_running_generations_end_when_the_pool_is_closed(triton: Any, serve: Serve, say: Any) -> None:
    pool = await serve(triton)
    triton.model.answer = lambda request, context: until_cancelled(request, context, say.accepted())
    events = pool.generate(say.generation())
    await anext(events)
    waiting = asyncio.create_task(anext(events))
    await asyncio.sleep(0)
    await pool.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        await waiting
    with pytest.raises(UnavailableError):
        await collect(pool, say.generation())


async def test_a_generation_that_sits_between_two_events_ends_too(
    triton: Any, serve: Serve, say: Any
) -> None:
    pool = await serve(triton)
    triton.model.answer = lambda request, context: until_cancelled(request, context, say.accepted())
    events = pool.generate(say.generation())
    await anext(events)
    await pool.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        await anext(events)
