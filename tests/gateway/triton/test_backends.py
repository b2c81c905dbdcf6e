"""Tritons come and go behind a name, seen from the pool in front of them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.app import create_app, triton_upstream
from gateway.core.events import Accepted, Delta, Heartbeat
from gateway.errors import ModelNotFoundError, UnavailableError
from gateway.settings import Settings
from gateway.triton import backends
from gateway.triton.replicas import ReplicaState
from tests.gateway.kserve.legacy import body
from tests.gateway.triton.fake_resolver import NAME, FakeResolver, addresses, ask, health, ready_on
from tests.gateway.triton.fake_triton import (
    FakeModel,
    FakeTriton,
    accepted,
    finished,
    generation,
    hanging,
    hello,
    reply,
    until,
)
from wire.meta import Meta


async def test_each_address_is_a_replica_and_new_ones_are_taken_in(
    tritons: Any, named: Any, resolver: FakeResolver, observer: Any
) -> None:
    first, second = [await tritons() for _ in range(2)]
    resolver.records["triton"] = [first.address]
    pool = await named()
    await ready_on(pool, first)
    resolver.records["triton"] = [first.address, second.address]
    await ready_on(pool, first, second)
    for _ in range(2):
        assert await ask(pool) == "Hello"
    assert (len(first.requests), len(second.requests)) == (1, 1)
    assert health(pool) == {first.address: True, second.address: True}
    assert set(observer.lookups) == {(NAME, "found")}


async def test_what_runs_on_a_triton_that_vanished_ends_well_and_nothing_new_goes_there(
    tritons: Any, named: Any, resolver: FakeResolver
) -> None:
    going, staying = [await tritons() for _ in range(2)]
    release = asyncio.Event()

    async def slow(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        yield reply("Hel")
        await release.wait()
        yield finished("lo", 1)

    going.model.answer = slow
    resolver.records["triton"] = [going.address]
    pool = await named()
    await ready_on(pool, going)
    running = pool.generate(generation())
    await anext(running)
    backend = pool._backends.present()[0]
    resolver.records["triton"] = [staying.address]
    await ready_on(pool, staying)
    assert addresses(pool) == [staying.address]
    assert health(pool) == {staying.address: True}
    for _ in range(3):
        assert await ask(pool) == "Hello"
    assert len(staying.requests) == 3
    assert backend.leaving is not None
    probes = going.model.probes
    await until(lambda: going.model.probes > probes)  # its health still ends what would hang
    release.set()
    text = "".join([event.text async for event in running if isinstance(event, Delta)])
    assert text == "Hello"
    await until(lambda: going.address not in pool._backends._backends)
    probes = going.model.probes
    await asyncio.sleep(0.2)
    assert going.model.probes <= probes + 1
    assert len(going.requests) == 1
    assert not [task for task in asyncio.all_tasks() if going.address in task.get_name()]
    assert health(pool) == {staying.address: True}


async def test_an_address_that_comes_back_while_it_is_seen_off_goes_on_as_it_was(
    tritons: Any, named: Any, resolver: FakeResolver
) -> None:
    flapping, staying = [await tritons() for _ in range(2)]
    resolver.records["triton"] = both = [flapping.address, staying.address]
    pool = await named()
    await ready_on(pool, flapping, staying)
    flapping.model.answer = staying.model.answer = hanging(accepted())
    running = [pool.generate(generation(request_id=f"req-{number}")) for number in range(2)]
    for events in running:
        await anext(events)
    (before,) = [each for each in pool._backends.present() if each.client.address == flapping.address]
    for _ in range(3):
        resolver.records["triton"] = [staying.address]
        await until(lambda: addresses(pool) == [staying.address])
        resolver.records["triton"] = both
        await until(lambda: len(addresses(pool)) == 2)
        # Its health is the address's: nothing has to be found out anew.
        assert addresses(pool, ReplicaState.READY).count(flapping.address) == 1
        assert health(pool)[flapping.address]
    (after,) = [each for each in pool._backends.present() if each.client.address == flapping.address]
    assert after is before
    assert not flapping.cancelled.is_set()
    for events in running:
        await events.aclose()
    # Nor is it closed when what ran there has ended.
    flapping.model.answer = staying.model.answer = hello
    await asyncio.sleep(0.1)
    assert sorted(addresses(pool, ReplicaState.READY)) == sorted(both)
    assert before in pool._backends.present()
    assert [await ask(pool) for _ in range(2)] == ["Hello"] * 2


async def test_an_address_that_comes_back_later_is_a_new_one(
    triton: FakeTriton, named: Any, resolver: FakeResolver, tritons: Any
) -> None:
    other = await tritons()
    resolver.records["triton"] = [triton.address, other.address]
    pool = await named()
    await ready_on(pool, triton, other)
    resolver.records["triton"] = [other.address]
    await until(lambda: len(pool._backends._backends) == 1)
    resolver.records["triton"] = [triton.address, other.address]
    await ready_on(pool, triton, other)
    assert [await ask(pool) for _ in range(2)] == ["Hello"] * 2


async def test_the_labels_of_who_vanished_go_away(
    tritons: Any, named: Any, resolver: FakeResolver, observer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_FORGET_AFTER_S", 0.05)
    going, staying = [await tritons() for _ in range(2)]
    resolver.records["triton"] = [going.address, staying.address]
    pool = await named()
    await ready_on(pool, going, staying)
    resolver.records["triton"] = [staying.address]
    observer.metrics.upstream_errors.labels("m", going.address, "silent").inc()
    await until(lambda: not observer.errors)
    assert health(pool) == {staying.address: True}
    # Who is back before that is not forgotten.
    monkeypatch.setattr(backends, "_FORGET_AFTER_S", 3)
    resolver.records["triton"] = [going.address]
    await ready_on(pool, going)
    await until(lambda: len(pool._backends._backends) == 1)
    resolver.records["triton"] = [going.address, staying.address]
    await ready_on(pool, going, staying)
    observer.metrics.upstream_errors.labels("m", staying.address, "silent").inc()
    await asyncio.sleep(3.5)
    assert observer.errors == [("m", staying.address, "silent")]


async def test_models_that_were_found_go_with_the_last_triton_that_had_them(
    tritons: Any, named: Any, resolver: FakeResolver
) -> None:
    old, other, new = [await tritons() for _ in range(3)]
    other.models, new.models = {"n": FakeModel()}, {}
    resolver.records["triton"] = [old.address, other.address]
    pool = await named(models=[])
    await ready_on(pool, old, other)
    assert [card.id for card in pool.models()] == ["m", "n"]
    new.restriction = ("key", "value")
    resolver.records["triton"] = [other.address, new.address]
    await until(lambda: addresses(pool) == [other.address])
    await asyncio.sleep(0.1)
    # Who knows what the new one has.
    assert [(card.id, card.ready) for card in pool.models()] == [("m", False), ("n", True)]
    with pytest.raises(UnavailableError):
        await ask(pool)
    new.restriction = None
    await until(lambda: [card.id for card in pool.models()] == ["n"])
    with pytest.raises(ModelNotFoundError):
        await ask(pool)
    # Nobody left to ask: what is known stays known, and down.
    resolver.records["triton"] = ()
    for triton in (other, new):
        await triton.stop()
    await until(lambda: not pool.replicas())
    assert [(card.id, card.ready) for card in pool.models()] == [("n", False)]
    for model in ("m", "n"):
        with pytest.raises(UnavailableError):
            await ask(pool, model)


async def test_a_model_that_was_found_comes_back_with_its_triton(
    tritons: Any, named: Any, resolver: FakeResolver
) -> None:
    flapping, other = [await tritons() for _ in range(2)]
    other.models = {"n": FakeModel()}
    flapping.model.answer = hanging(accepted())
    resolver.records["triton"] = [flapping.address, other.address]
    pool = await named(models=[])
    await ready_on(pool, flapping, other)
    running = pool.generate(generation())
    await anext(running)
    resolver.records["triton"] = [other.address]
    await until(lambda: [card.id for card in pool.models()] == ["n"])
    resolver.records["triton"] = [flapping.address, other.address]
    await until(lambda: [card.id for card in pool.models()] == ["m", "n"])
    flapping.model.answer = hello
    assert await ask(pool) == "Hello"
    await running.aclose()


async def test_a_load_on_a_triton_that_vanishes_fails_as_on_one_that_cannot_be_reached(
    tritons: Any, named: Any, resolver: FakeResolver
) -> None:
    going, staying = [await tritons() for _ in range(2)]
    resolver.records["triton"] = [going.address, staying.address]
    pool = await named()
    await ready_on(pool, going, staying)

    async def never(context: Any) -> None:
        await asyncio.Event().wait()

    going.model.state, going.model.load = "UNAVAILABLE", never
    loading = asyncio.create_task(pool.load("m", reload=False, upstream=going.address))
    await until(lambda: bool(going.orders))
    resolver.records["triton"] = [staying.address]
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await loading


async def test_a_pool_is_closed_whatever_its_backends_are_at(
    tritons: Any, named: Any, resolver: FakeResolver
) -> None:
    going, staying = [await tritons() for _ in range(2)]
    going.model.answer = hanging(accepted())
    resolver.records["triton"] = [going.address]
    pool = await named()
    await ready_on(pool, going)
    running = pool.generate(generation())
    await anext(running)
    resolver.records["triton"] = [staying.address]
    await ready_on(pool, staying)
    await pool.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        await anext(running)
    await asyncio.wait_for(going.cancelled.wait(), 60)


async def test_requests_wait_for_the_first_triton(
    triton: FakeTriton, named: Any, resolver: FakeResolver
) -> None:
    pool = await named(upstream_wait_s=60.0)
    events = pool.generate(generation())
    assert [type(await anext(events)) for _ in range(2)] == [Heartbeat] * 2
    assert pool.replicas() == []
    resolver.records["triton"] = [triton.address]
    assert [type(event) async for event in events if type(event) is not Heartbeat][:2] == [Accepted, Delta]


@pytest.mark.parametrize("models", [{}, {"m": {"entry": "m"}}])
@pytest.mark.parametrize(("model", "status"), [("m", 200), ("other", 404)])
async def test_they_wait_whether_models_are_named_or_found(
    triton: FakeTriton, resolver: FakeResolver, models: Any, model: str, status: int
) -> None:
    values = {"upstreams": [NAME], "models": models, "upstream_wait_s": 60.0}
    settings = Settings.model_validate(values)
    app = create_app(settings, triton_upstream(settings, resolve=resolver))
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
    ):
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        if not models or status == 200:
            await asyncio.sleep(0.2)
            assert not asking.done()
            resolver.records["triton"] = [triton.address]
        async with asyncio.timeout(30):
            assert (await asking).status_code == status


@pytest.mark.parametrize("models", [{}, {"m": {"entry": "m"}}])
async def test_so_do_those_of_kserves_protocol(
    triton: FakeTriton, resolver: FakeResolver, models: Any
) -> None:
    settings = Settings.model_validate({"upstreams": [NAME], "models": models, "upstream_wait_s": 60.0})
    app = create_app(settings, triton_upstream(settings, resolve=resolver))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
    ):
        asking = asyncio.create_task(http.post("/v2/models/m/infer", json=body()))
        await asyncio.sleep(0.2)
        assert not asking.done()
        resolver.records["triton"] = [triton.address]
        assert (await asking).status_code == 200
        assert (await http.post("/v2/models/other/infer", json=body())).status_code == 404


@pytest.mark.parametrize("models", [{}, {"m": {"entry": "m"}}])
async def test_kserves_wait_until_a_triton_that_was_found_was_asked(triton: FakeTriton, models: Any) -> None:
    asked = asyncio.Event()

    async def probe(_request: Any, _context: Any) -> AsyncIterator[Any]:
        await asked.wait()
        yield reply(meta=Meta(probe=triton.model.report), final=True)

    triton.model.probe = probe
    settings = Settings.model_validate({"upstreams": [triton.address], "models": models})
    app = create_app(settings)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
    ):
        await until(lambda: triton.model.probes > 0)
        asking = asyncio.create_task(http.post("/v2/models/m/infer", json=body()))
        await asyncio.sleep(0.2)
        asked.set()
        assert (await asking).status_code == 200


@pytest.mark.parametrize(("wait_s", "left_s"), [(0.1, 60.0), (60.0, 0.6), (0.0, 60.0)])
async def test_they_do_not_wait_for_ever(named: Any, wait_s: float, left_s: float) -> None:
    pool = await named(upstream_wait_s=wait_s)
    deadline = asyncio.get_running_loop().time() + left_s
    with pytest.raises(UnavailableError) as refused:
        async with asyncio.timeout(30):
            [event async for event in pool.generate(generation(deadline=deadline))]
    assert refused.value.retry_after_s


async def test_nobody_waits_for_a_model_that_was_unloaded(triton: FakeTriton, serve: Any) -> None:
    pool = await serve(triton, upstream_wait_s=60.0)
    await pool.unload("m", upstream=None)
    with pytest.raises(UnavailableError):
        async with asyncio.timeout(30):
            await anext(pool.generate(generation()))
