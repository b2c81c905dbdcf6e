import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import pytest

from gateway.core.events import Delta
from gateway.core.request import PlainText
from gateway.core.upstream import Tokenization
from gateway.errors import (
    ConflictError,
    ControlDisabledError,
    DeadlineError,
    GatewayError,
    InvalidRequestError,
    ModelNotFoundError,
    UnavailableError,
    UpstreamProtocolError,
)
from gateway.triton.admin import load_failure
from gateway.triton.options import HealthPolicy
from gateway.triton.replicas import ReplicaState
from tests.gateway.triton.fake_triton import FakeModel, accepted, finished, generation, hanging, until


def failing(code: grpc.StatusCode, text: str) -> Any:
    async def load(context: Any) -> None:
        await context.abort(code, text)

    return load


async def load(pool: Any, *, reload: bool = False, upstream: str | None = None, model: str = "m") -> Any:
    return await pool.load(model, reload=reload, upstream=upstream)


async def unload(pool: Any, *, upstream: str | None = None, model: str = "m") -> Any:
    return await pool.unload(model, upstream=upstream)


async def test_a_model_is_unloaded_and_loaded(triton: Any, serve: Any) -> None:
    pool = await serve(triton)
    (change,) = await unload(pool)
    assert (change.upstream, change.entries) == (triton.address, ("m",))
    assert triton.orders == ["unload m"]
    card = pool.model("m")
    assert (card.ready, card.unloaded) == (False, True)
    with pytest.raises(UnavailableError, match="unloaded"):
        [event async for event in pool.generate(generation())]
    triton.orders.clear()
    (change,) = await load(pool)
    assert change.entries == ("m",)
    assert triton.orders == ["load m"]
    card = pool.model("m")
    assert (card.ready, card.unloaded) == (True, False)


async def test_what_is_loaded_stays_as_it_is(triton: Any, serve: Any) -> None:
    pool = await serve(triton)
    (change,) = await load(pool)
    assert change.entries == ()
    assert triton.orders == []
    await unload(pool)
    triton.orders.clear()
    (change,) = await unload(pool)
    assert change.entries == ()
    assert triton.orders == []


async def test_a_reload_unloads_first(triton: Any, serve: Any) -> None:
    pool = await serve(triton)
    (change,) = await load(pool, reload=True)
    assert change.entries == ("m",)
    assert triton.orders == ["unload m", "load m"]
    assert pool.model("m").ready


async def test_requests_in_flight_end_first_and_new_ones_are_refused_at_once(triton: Any, serve: Any) -> None:
    release = asyncio.Event()

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        await release.wait()
        yield finished("end", 1)

    pool = await serve(triton)
    triton.model.answer, triton.model.lingers = answer, release
    events = pool.generate(generation())
    await anext(events)
    unloading = asyncio.create_task(unload(pool))
    await until(lambda: triton.orders == ["unload m"])
    assert pool.model("m").unloaded
    with pytest.raises(UnavailableError):
        await anext(pool.generate(generation()))
    await asyncio.sleep(0.1)
    assert not unloading.done()
    release.set()
    assert [event.text async for event in events if isinstance(event, Delta)] == ["end"]
    await unloading
    assert triton.orders == ["unload m"]


async def test_a_load_waits_for_what_is_still_unloading(triton: Any, serve: Any) -> None:
    pool = await serve(triton)
    triton.model.lingers = asyncio.Event()
    await triton.RepositoryModelUnload(type("R", (), {"model_name": "m"}), None)
    triton.orders.clear()
    loading = asyncio.create_task(load(pool))
    await asyncio.sleep(0.2)
    assert triton.orders == []
    triton.model.lingers.set()
    await loading
    assert triton.orders == ["load m"]


async def test_one_change_at_a_time(triton: Any, serve: Any) -> None:
    pool = await serve(triton)
    triton.model.lingers = asyncio.Event()
    first = asyncio.create_task(unload(pool))
    await until(lambda: bool(triton.orders))
    for other in (unload(pool), load(pool), load(pool, reload=True)):
        with pytest.raises(ConflictError):
            await other
    triton.model.lingers.set()
    await first
    results = await asyncio.gather(*(load(pool) for _ in range(4)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["ConflictError"] * 3 + ["list"]


async def test_what_somebody_else_loads_is_left_to_them(triton: Any, serve: Any) -> None:
    pool = await serve(triton)
    triton.model.state = "LOADING"
    for change in (load(pool), load(pool, reload=True), unload(pool)):
        with pytest.raises(ConflictError, match=triton.address):
            await change
    assert triton.orders == []


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (
            (
                grpc.StatusCode.INVALID_ARGUMENT,
                "version 1 is at UNAVAILABLE state: Error: /c: gone\n\nAt:\n /x",
            ),
            UpstreamProtocolError,
            "m could not be loaded: Error: /c: gone",
        ),
        (
            (
                grpc.StatusCode.UNAVAILABLE,
                "explicit model load / unload is not allowed if polling is enabled",
            ),
            ControlDisabledError,
            "explicit",
        ),
        ((grpc.StatusCode.UNAVAILABLE, "Socket closed"), UnavailableError, "reached"),
    ],
)
async def test_a_load_that_fails_says_why(
    triton: Any, serve: Any, status: tuple[Any, str], error: Any, words: str
) -> None:
    pool = await serve(triton)
    await unload(pool)
    triton.model.load = failing(*status)
    with pytest.raises(error) as raised:
        await load(pool)
    assert raised.value.message.startswith(triton.address + ": ")
    assert words in raised.value.message
    assert "At:" not in raised.value.message
    assert not pool.model("m").unloaded
    triton.model.load = None
    await load(pool)
    assert pool.model("m").ready


async def test_a_model_that_failed_to_load_can_be_given_up(triton: Any, serve: Any) -> None:
    pool = await serve(triton)
    triton.model.state, triton.model.reason = "UNAVAILABLE", "Internal: Error: /c: gone"
    await until(lambda: not pool.model("m").ready)
    assert not pool.model("m").unloaded
    await unload(pool)
    await asyncio.sleep(0.1)
    assert pool.model("m").unloaded


async def test_waiting_is_bounded(triton: Any, serve: Any) -> None:
    pool = await serve(triton, load_timeout_s=2)
    triton.model.lingers = asyncio.Event()
    with pytest.raises(DeadlineError, match=r"in flight hold it .* restart that Triton"):
        await unload(pool)
    triton.model.lingers.set()
    await unload(pool)

    async def slow(context: Any) -> None:
        await asyncio.sleep(60)

    triton.model.load = slow
    with pytest.raises(DeadlineError, match="still at it"):
        await load(pool)


async def test_a_dead_instance_is_not_waited_for(triton: Any, serve: Any, monkeypatch: Any) -> None:
    async def dead(request: Any, context: Any) -> AsyncIterator[Any]:
        yield await context.abort(grpc.StatusCode.INTERNAL, "Stub process 'm_0_0' is not healthy.")

    monkeypatch.setattr("gateway.triton.admin._DEAD_UNLOADS_WITHIN_S", 0.1)
    pool = await serve(triton)
    triton.model.probe, triton.model.lingers = dead, asyncio.Event()
    await until(lambda: pool.replicas()[0].state is ReplicaState.STUCK)

    async def revive(context: Any) -> None:
        triton.model.probe = None

    triton.model.load = revive
    reloading = asyncio.create_task(load(pool, reload=True))
    await until(lambda: "unload m" in triton.orders)
    await asyncio.sleep(0.5)
    triton.model.state = "UNAVAILABLE"
    await reloading
    assert pool.model("m").ready


async def test_one_that_is_loaded_and_does_not_answer_is_told(
    triton: Any, serve: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("gateway.triton.admin._ANSWERS_WITHIN_S", 2)
    pool = await serve(triton)
    triton.model.inputs = ("other",)
    await unload(pool)
    with pytest.raises(UnavailableError, match="other"):
        await load(pool)


async def test_one_that_is_unloaded_again_before_it_answers_is_not_waited_for(
    triton: Any, serve: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("gateway.triton.admin._ANSWERS_WITHIN_S", 3600)
    pool = await serve(triton)
    triton.model.inputs = ("other",)
    loading = asyncio.create_task(load(pool, reload=True))
    await until(lambda: triton.orders == ["unload m", "load m"] and triton.model.state == "READY")
    triton.model.state, triton.model.reason = "UNAVAILABLE", "unloaded"
    with pytest.raises(UnavailableError, match="unloaded again") as raised:
        await loading
    assert raised.value.reason == "unloaded"


async def test_many_tritons(tritons: Any, serve: Any) -> None:
    first, second, bare = await tritons(), await tritons(), await tritons()
    bare.models.clear()
    pool = await serve(first, second, bare, ready=False)
    await until(lambda: sum(replica.state is ReplicaState.READY for replica in pool.replicas()) == 2)
    changes = await unload(pool, upstream=second.address)
    assert [change.upstream for change in changes] == [second.address]
    assert pool.model("m").ready
    assert not first.orders
    assert [change.upstream for change in await unload(pool)] == [first.address, second.address]
    second.model.load = failing(grpc.StatusCode.INTERNAL, "boom")
    with pytest.raises(UpstreamProtocolError, match=second.address):
        await load(pool)
    assert pool.model("m").ready, "the other one was loaded"
    with pytest.raises(InvalidRequestError) as raised:
        await load(pool, upstream="elsewhere:1")
    assert raised.value.param == "upstream"


@pytest.mark.parametrize("change", [load, unload, partial(load, reload=True)])
async def test_a_triton_that_cannot_be_asked_is_told_once_the_others_have_changed(
    tritons: Any, serve: Any, change: Any
) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(second, first)
    if change is load:
        await unload(pool)
        first.orders.clear()
    await second.stop()
    await until(lambda: pool.replicas()[0].state is ReplicaState.UNREACHABLE)
    with pytest.raises(UnavailableError, match=f"^{second.address}: .*reached"):
        await change(pool)
    assert first.orders
    await change(pool, upstream=first.address)  # who knows of it leaves it out


async def test_a_reload_takes_one_triton_after_the_other_and_stops_at_a_failure(
    tritons: Any, serve: Any
) -> None:
    first, second = await tritons(), await tritons()
    pool = await serve(first, second)

    async def look(context: Any) -> None:
        assert not second.orders
        assert pool.model("m").ready
        await context.abort(grpc.StatusCode.INTERNAL, "boom")

    first.model.load = look
    with pytest.raises(UpstreamProtocolError, match="boom"):
        await load(pool, reload=True)
    assert not second.orders
    assert pool.model("m").ready


async def test_unknown_models(triton: Any, serve: Any) -> None:
    pool = await serve(triton)
    triton.models["n"] = FakeModel(state="")
    for model in ("n", "x"):
        with pytest.raises(ModelNotFoundError):
            await load(pool, model=model)
    await triton.stop()
    with pytest.raises(GatewayError) as raised:
        await unload(pool)
    assert raised.value.status == 503


async def test_without_configured_models_any_of_the_tritons_can_be_loaded(triton: Any, serve: Any) -> None:
    pool = await serve(triton, models=[])
    triton.models |= {
        "n": FakeModel(state=""),
        "f": FakeModel(state="", inputs=("text_input",)),
    }
    await load(pool, model="n")
    assert pool.model("n").ready
    with pytest.raises(UpstreamProtocolError, match="text_input"):
        await load(pool, model="f")
    await asyncio.sleep(0.1)
    assert [card.id for card in pool.models()] == ["m", "n"]
    assert len(pool.replicas()) == 2


async def test_a_load_by_another_process_is_seen_by_the_request_that_follows_it(
    triton: Any, serve: Any
) -> None:
    """As with `workers`: each has its own pool, and a client does not know which one it reaches."""
    rare = HealthPolicy(backoff_first_s=3600, backoff_limit_s=3600)
    triton.model.state = ""
    pools = [await serve(triton, ready=False, health=rare) for _ in range(2)]
    await until(lambda: all(pool.replicas()[0].state is ReplicaState.NOT_READY for pool in pools))
    await load(pools[0])
    assert [event async for event in pools[1].generate(generation())]
    await unload(pools[0])
    await until(lambda: pools[1].model("m").unloaded)
    await load(pools[0])
    tokenization = Tokenization(
        request_id="r", model="m", prompt=PlainText("hi"), deadline=generation().deadline
    )
    assert (await pools[1].tokenize(tokenization)).ids == [0, 5]


async def test_that_look_does_not_keep_a_request_for_long(triton: Any, serve: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("gateway.triton.pool._LOOK_WITHIN_S", 0.2)
    triton.model.probe = hanging()
    pool = await serve(triton, ready=False, health=HealthPolicy(probe_timeout_s=3600))
    with pytest.raises(UnavailableError):
        [event async for event in pool.generate(generation())]


async def test_closing_ends_a_change(triton: Any, serve: Any) -> None:
    pool = await serve(triton)
    await unload(pool)

    async def slow(context: Any) -> None:
        await asyncio.sleep(60)

    triton.model.load = slow
    loading = asyncio.create_task(load(pool))
    await until(lambda: "load m" in triton.orders)
    await pool.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        await loading
    with pytest.raises(UnavailableError):
        await load(pool)


@pytest.mark.parametrize(
    ("detail", "reason"),
    [
        (
            "version 1 is at UNAVAILABLE state: Internal: Error: /ckpt: no\nweights\n\nAt:\n  /x: load\n;\n",
            "Error: /ckpt: no weights",
        ),
        (
            "version 1 is at UNAVAILABLE state: Internal: Stub process 'm_0_0' is not healthy.;",
            "its process died while loading; is there enough memory?",
        ),
        (
            "failed to load 'm', failed to poll from model repository",
            "failed to load 'm', failed to poll from model repository",
        ),
    ],
)
def test_a_failed_load_is_told_in_one_line(detail: str, reason: str) -> None:
    assert load_failure(detail) == reason
