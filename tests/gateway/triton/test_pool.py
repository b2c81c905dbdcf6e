import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from gateway.core.events import (
    Accepted,
    Delta,
    Heartbeat,
)
from gateway.core.request import Conversation, Grammar, Message, PlainText
from gateway.core.upstream import Tokenization
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
from gateway.triton import dialects
from gateway.triton.dialects.chatglm import CHATGLM
from gateway.triton.replicas import ReplicaState
from tests.gateway.triton.fake_triton import (
    FakeModel,
    accepted,
    empty_final,
    finished,
    generation,
    hanging,
    inputs_of,
    refusing,
    reply,
    until,
)
from tests.gateway.triton.running import collect, text
from wire.request import decode_request

Serve = Callable[..., Any]


async def test_a_generation_goes_through(triton: Any, serve: Serve, observer: Any) -> None:
    pool = await serve(triton)
    events = [event async for event in pool.generate(generation())]
    assert events[0] == Accepted(prompt_tokens=5)
    assert text(events) == "Hello"
    assert isinstance(events[-1], Delta)
    assert events[-1].usage is not None
    assert inputs_of(triton.requests[0])["prompt"] == b"hi"
    assert observer.errors == []


async def test_cards_show_what_is_served(triton: Any, serve: Serve) -> None:
    pool = await serve(triton, ready=False, models=["z", "m"])
    assert [(card.id, card.ready, card.max_context) for card in pool.models()] == [
        ("z", False, None),
        ("m", False, None),
    ]


async def test_a_card_is_filled_by_the_probe_and_keeps_it_while_the_model_is_down(
    triton: Any, serve: Serve
) -> None:
    pool = await serve(triton)
    card = pool.model("m")
    assert (card.ready, card.max_context) == (True, 512)
    await triton.stop()
    await until(lambda: not pool.model("m").ready)
    assert pool.model("m").max_context == 512
    assert pool.model("m").chat_format == "chatglm3"
    assert pool.model("m").created == card.created
    (report,) = pool.replicas()
    assert (report.model, report.upstream) == ("m", triton.address)
    assert report.state is ReplicaState.UNREACHABLE
    assert report.report is not None
    assert report.reason


async def test_an_unknown_model_is_not_found(triton: Any, serve: Serve) -> None:
    pool = await serve(triton)
    with pytest.raises(ModelNotFoundError) as raised:
        pool.model("other")
    assert raised.value.param == "model"
    with pytest.raises(ModelNotFoundError):
        await collect(pool, generation(model="other"))


async def test_what_a_contract_has_no_part_for_is_done_without_or_refused(
    triton: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = replace(CHATGLM, probe=None, tokenizer=None, channels=None)
    monkeypatch.setattr(dialects, "CHATGLM", bare)
    pool = await serve(triton)
    card = pool.model("m")
    assert (card.ready, card.max_context, card.chat_format) == (True, None, None)
    events = await collect(pool, generation(prompt=PlainText("hi"), stream=True))
    assert text(events) == "Hello"
    counted = Tokenization(request_id="r", model="m", prompt=PlainText("hi"), deadline=generation().deadline)
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        await pool.tokenize(counted)


async def test_a_contract_may_take_its_time_over_a_prompt(
    triton: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it makes of the prompt is sent, and the others go first meanwhile."""
    ready = asyncio.Event()

    async def prepare(request: Any, report: Any) -> Any:
        if request.prompt == PlainText("long"):
            await ready.wait()
        return structs.replace(request, prompt=PlainText(request.prompt.text + "!"))

    monkeypatch.setattr(dialects, "CHATGLM", replace(CHATGLM, channels=None, prepare=prepare))
    pool = await serve(triton)
    long = asyncio.create_task(collect(pool, generation(prompt=PlainText("long"))))
    assert text(await collect(pool, generation(prompt=PlainText("short")))) == "Hello"
    assert not long.done()
    ready.set()
    assert text(await long) == "Hello"
    assert [inputs_of(each)["prompt"] for each in triton.requests] == [b"short!", b"long!"]


async def test_models_are_found_where_none_are_configured(triton: Any, serve: Serve) -> None:
    triton.models["b"] = FakeModel()
    triton.models["foreign"] = FakeModel(inputs=("request",))
    pool = await serve(triton, models=[])
    assert [card.id for card in pool.models()] == ["b", "m"]
    assert text(await collect(pool, generation(model="b"))) == "Hello"
    await triton.stop()
    await until(lambda: not pool.model("b").ready)
    with pytest.raises(UnavailableError):
        await collect(pool, generation(model="b"))
    with pytest.raises(ModelNotFoundError):
        pool.model("never-there")


async def test_before_any_triton_was_reached_nobody_knows_which_models_there_are(
    triton: Any, serve: Serve
) -> None:
    await triton.stop()
    pool = await serve(triton, models=[], ready=False)
    with pytest.raises(UnavailableError):
        await collect(pool, generation())
    await triton.start()
    await until(lambda: bool(pool.models()))


@pytest.mark.parametrize("stopped", [True, False], ids=["dead", "not loaded"])
async def test_a_model_that_is_not_there_is_an_immediate_503(
    triton: Any, serve: Serve, *, stopped: bool
) -> None:
    if stopped:
        await triton.stop()
    triton.models.clear()
    pool = await serve(triton, ready=False)
    expected = ReplicaState.UNREACHABLE if stopped else ReplicaState.NOT_READY
    await until(lambda: pool.replicas()[0].state is expected)
    with pytest.raises(UnavailableError) as raised:
        await collect(pool, generation())
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
        ("Stub process 'm_0_0' is not healthy.", UnavailableError),
        ("tritongate:internal: /etc/passwd", UpstreamProtocolError),
        ("Traceback: /models/m/1/model.py", UpstreamProtocolError),
    ],
)
async def test_refusals_reach_the_client_as_what_they_are(
    triton: Any, serve: Serve, refusal: str, error: type[Exception]
) -> None:
    pool = await serve(triton)
    triton.model.answer = refusing(refusal)
    with pytest.raises(error) as raised:
        await collect(pool, generation())
    assert type(raised.value) is error
    assert "/" not in str(raised.value)


async def test_a_refused_grammar_names_the_field_that_it_came_from(triton: Any, serve: Serve) -> None:
    pool = await serve(triton)
    triton.model.answer = refusing("tritongate:invalid_grammar: no such keyword")
    asked = generation(grammar=Grammar(kind="json_schema", text="{}", field="response_format.x"))
    with pytest.raises(InvalidRequestError, match="no such keyword") as raised:
        await collect(pool, asked)
    assert raised.value.param == "response_format.x"


async def test_a_failure_is_counted_and_logged_with_its_detail_a_clients_own_mistake_is_not(
    triton: Any, serve: Serve, observer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool = await serve(triton)
    for refusal in ("tritongate:invalid_request: bad", "Traceback: /models/m/1/model.py"):
        triton.model.answer = refusing(refusal)
        with caplog.at_level(logging.WARNING), pytest.raises(GatewayError):
            await collect(pool, generation())
    assert observer.errors == [("m", triton.address, "unknown")]
    (record,) = [record for record in caplog.records if "upstream failed" in record.getMessage()]
    assert record.__dict__["request_id"] == "req-1"
    assert "/models/m/1/model.py" in record.__dict__["detail"]


async def test_an_answer_out_of_contract_is_a_502(triton: Any, serve: Serve, observer: Any) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        yield reply("x", b'{"surprise": 1}')
        await asyncio.Event().wait()

    pool = await serve(triton)
    triton.model.answer = answer
    with pytest.raises(UpstreamProtocolError):
        await collect(pool, generation())
    assert observer.errors == [("m", triton.address, "protocol")]
    await asyncio.wait_for(triton.cancelled.wait(), 60)


async def test_a_final_response_of_triton_without_the_models_own_end_is_a_502(
    triton: Any, serve: Serve
) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        yield empty_final()

    pool = await serve(triton)
    triton.model.answer = answer
    with pytest.raises(UpstreamProtocolError):
        await collect(pool, generation())


async def test_messages_the_chat_format_cannot_hold_are_refused_before_anything_is_sent(
    triton: Any, serve: Serve
) -> None:
    pool = await serve(triton)
    with pytest.raises(InvalidRequestError):
        await collect(pool, generation(prompt=Conversation((Message(role="tool", content="x"),))))
    assert triton.requests == []
    assert text(await collect(pool, generation())) == "Hello"


async def test_a_passed_deadline_is_never_sent_and_nobodys_failure(
    triton: Any, serve: Serve, observer: Any
) -> None:
    pool = await serve(triton)
    with pytest.raises(DeadlineError):
        await collect(pool, generation(deadline=asyncio.get_running_loop().time() - 1))
    assert triton.requests == []
    assert observer.errors == []


async def test_a_silent_model_is_given_up_and_suspected(triton: Any, serve: Serve, observer: Any) -> None:
    pool = await serve(triton, idle_timeout_s=1)
    triton.model.answer = hanging(accepted())
    with pytest.raises(UnavailableError, match="stopped answering"):
        await collect(pool, generation())
    assert observer.errors == [("m", triton.address, "silent")]
    await asyncio.wait_for(triton.cancelled.wait(), 60)
    await until(lambda: pool.model("m").ready)


async def test_heartbeats_hold_the_idle_deadline_off(triton: Any, serve: Serve) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        for _ in range(4):
            await asyncio.sleep(1)
            yield reply()
        yield finished("late", 1)

    pool = await serve(triton, idle_timeout_s=3)
    triton.model.answer = answer
    events = await collect(pool, generation())
    assert sum(isinstance(event, Heartbeat) for event in events) == 4
    assert text(events) == "late"


@pytest.mark.parametrize("stream", [False, True])
async def test_only_a_stream_of_a_model_without_heartbeats_may_be_silent_for_too_long(
    triton: Any, serve: Serve, observer: Any, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    """What does not stream comes when all of it was written, which may take longer than any silence."""
    monkeypatch.setattr("gateway.triton.pool._SILENCE_S", 0.05)
    monkeypatch.setattr(dialects, "CHATGLM", replace(CHATGLM, heartbeats=False, channels=None))

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        await asyncio.wait([asyncio.ensure_future(triton.cancelled.wait())], timeout=0.5)
        yield accepted()
        yield finished("late", 1)

    triton.model.answer = answer
    pool = await serve(triton)
    if stream:
        with pytest.raises(UnavailableError, match="stopped answering"):
            await collect(pool, generation(stream=True))
    else:
        assert text(await collect(pool, generation())) == "late"
    assert len(observer.errors) == stream


@pytest.mark.parametrize("stream", [False, True])
async def test_a_backend_that_writes_one_choice_is_asked_for_each(
    triton: Any, serve: Serve, observer: Any, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    monkeypatch.setattr(dialects, "CHATGLM", replace(CHATGLM, choices=False, channels=None))

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        asked: Any = decode_request(inputs_of(request)["sampling"])
        assert asked.n == 1
        yield accepted()
        yield finished(f"seed {asked.seed}", 1)

    triton.model.answer = answer
    pool = await serve(triton)
    events = await collect(pool, generation(n=3, seed=7, stream=stream))
    assert events[0] == Accepted(prompt_tokens=5)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert sorted((each.index, each.text) for each in deltas) == [(0, "seed 7"), (1, "seed 8"), (2, "seed 9")]
    assert deltas[-1].usage is not None
    assert (deltas[-1].usage.prompt_tokens, deltas[-1].usage.completion_tokens) == (5, 6)
    triton.model.answer = refusing("tritongate:invalid_request: no")
    with pytest.raises(InvalidRequestError):
        await collect(pool, generation(n=3, stream=stream))
    triton.model.answer = hanging(accepted())
    events_of_others = pool.generate(generation(n=3, stream=stream))
    assert isinstance(await anext(events_of_others), Accepted)
    await events_of_others.aclose()
    await until(triton.cancelled.is_set)
    assert observer.errors == []


@pytest.mark.parametrize(
    ("streams", "asked", "whole"),
    [
        (True, {"stream": True}, False),
        (True, {"stream": True, "beam_width": 2}, True),
        (False, {"stream": True}, True),
        (False, {"stream": False}, False),
    ],
)
async def test_a_stream_of_what_comes_at_its_end_is_called_whole(
    triton: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch, *, streams: bool, asked: Any, whole: bool
) -> None:
    monkeypatch.setattr(dialects, "CHATGLM", replace(CHATGLM, channels=None, streams=streams))

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        yield finished("a", 2)

    triton.model.answer = answer
    events = await collect(await serve(triton), generation(**asked))
    assert events[0] == Accepted(prompt_tokens=5, whole=whole)


@pytest.mark.parametrize("ends", [True, False])
async def test_a_model_that_goes_on_behind_the_answers_end_is_cancelled_and_no_other(
    triton: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch, *, ends: bool
) -> None:
    """One that is cancelled at the moment of its end may keep its model from being unloaded."""
    ended = SimpleNamespace(decode=lambda _: [Accepted(prompt_tokens=5)], over=True, end=list)
    bare = replace(CHATGLM, channels=None, decoder=lambda _generation, _report: ended)
    monkeypatch.setattr(dialects, "CHATGLM", bare)
    goes_on, whole = hanging(accepted()), asyncio.Event()

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        await asyncio.sleep(0.05)
        yield empty_final()
        whole.set()

    triton.model.answer = answer if ends else goes_on
    pool = await serve(triton)
    assert await collect(pool, generation(stream=True)) == [Accepted(prompt_tokens=5)]
    await until(lambda: whole.is_set() or triton.cancelled.is_set())
    assert whole.is_set() == ends


async def test_closing_the_generator_reaches_triton(triton: Any, serve: Serve) -> None:
    pool = await serve(triton)
    triton.model.answer = hanging(accepted())
    events = pool.generate(generation())
    await anext(events)
    await events.aclose()
    await asyncio.wait_for(triton.cancelled.wait(), 60)


async def test_cancelling_the_task_reaches_triton(triton: Any, serve: Serve) -> None:
    pool = await serve(triton)
    triton.model.answer = hanging(accepted())
    task = asyncio.create_task(collect(pool, generation()))
    await until(lambda: bool(triton.requests))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(triton.cancelled.wait(), 60)


async def test_running_generations_end_when_the_pool_is_closed(triton: Any, serve: Serve) -> None:
    pool = await serve(triton)
    triton.model.answer = hanging(accepted())
    events = pool.generate(generation())
    await anext(events)
    waiting = asyncio.create_task(anext(events))
    await asyncio.sleep(0)
    await pool.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        await waiting
    with pytest.raises(UnavailableError):
        await collect(pool, generation())


async def test_a_generation_that_sits_between_two_events_ends_too(triton: Any, serve: Serve) -> None:
    pool = await serve(triton)
    triton.model.answer = hanging(accepted())
    events = pool.generate(generation())
    await anext(events)
    await pool.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        await anext(events)
