import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from gateway.core.batch import together
from gateway.core.events import Accepted, Heartbeat
from gateway.core.request import PlainText
from gateway.core.upstream import Tokenization
from gateway.errors import GatewayError, UnavailableError
from gateway.triton import on_demand
from gateway.triton.replicas import ReplicaState
from tests.gateway.triton.fake_triton import FakeTriton, accepted, finished, generation, until
from tests.gateway.triton.on_demand import ask, in_memory, said, unloaded


async def test_a_request_loads_its_model_once_for_all_that_wait(
    triton: FakeTriton, demand: Any, observer: Any
) -> None:
    unloaded(triton, "a", "b")
    pool = await demand(triton)
    assert await asyncio.gather(*(said(pool, "a") for _ in range(20))) == ["Hello"] * 20
    assert triton.orders == ["load a"]
    assert observer.loads == [("a", triton.address, "loaded")]
    assert [(card.id, card.ready, card.unloaded) for card in pool.models()] == [
        ("a", True, False),
        ("b", False, True),
    ]


async def test_counting_tokens_loads_it_too(triton: FakeTriton, demand: Any) -> None:
    unloaded(triton, "a")
    pool = await demand(triton)
    deadline = generation().deadline
    counted = Tokenization(request_id="r", model="a", prompt=PlainText("hi"), deadline=deadline)
    assert (await pool.tokenize(counted)).ids == [0, 5]


async def test_what_is_found_on_disk_is_served(triton: FakeTriton, demand: Any) -> None:
    unloaded(triton, "a", "b")
    pool = await demand(triton, models=[])
    await until(lambda: len(pool.models()) == 2)
    assert await said(pool, "b") == "Hello"
    assert triton.orders == ["load b"]


async def test_heartbeats_come_while_it_loads(triton: FakeTriton, demand: Any) -> None:
    unloaded(triton, "a", "b")

    async def slow(context: Any) -> None:
        await asyncio.sleep(2.5)

    triton.models["a"].load = slow
    pool = await demand(triton)
    events = await ask(pool, "a")
    kinds = [type(event) for event in events]
    assert kinds[: kinds.index(Accepted)] == [Heartbeat] * kinds.index(Accepted)
    assert kinds.index(Accepted) >= 2
    # Also of two prompts, whose acceptances wait for each other.
    triton.models["b"].load = slow
    both = [event async for event in together(pool.generate, [generation(model="b")] * 2)]
    assert isinstance(both[0], Heartbeat)
    assert sum(isinstance(event, Accepted) for event in both) == 1


async def test_a_load_is_waited_for_though_its_triton_does_not_answer_for_a_moment(
    triton: FakeTriton, demand: Any
) -> None:
    unloaded(triton, "a")
    loaded = asyncio.Event()

    async def slow(context: Any) -> None:
        await loaded.wait()

    triton.models["a"].load = slow
    pool = await demand(triton)
    waiting = asyncio.create_task(said(pool, "a"))
    await until(lambda: in_memory(triton) == {"a"})
    await asyncio.sleep(0.5)
    triton.restriction = ("no", "index")
    await asyncio.wait({waiting}, timeout=1)
    triton.restriction = None
    loaded.set()
    assert await waiting == "Hello"


async def test_the_model_used_least_recently_makes_room(
    triton: FakeTriton, demand: Any, observer: Any
) -> None:
    unloaded(triton, "a", "b", "c")
    pool = await demand(triton, max_loaded=2, min_loaded_s=0)
    for model in ("a", "b", "a", "c"):
        assert await said(pool, model) == "Hello"
    assert triton.orders == ["load a", "load b", "unload b", "load c"]
    assert observer.unloads == [("b", triton.address, "room")]


@pytest.mark.parametrize(
    ("asked", "gib", "unloads"),
    [
        ("abc", {"a": 10, "b": 10, "c": 10}, []),
        ("abcd", {"a": 10, "b": 10, "c": 10, "d": 15}, ["a", "b"]),
        ("abacd", {"a": 10, "b": 10, "c": 10, "d": 15}, ["b", "a"]),
        ("abc", {"a": 5, "b": 20, "c": 25}, ["b"]),  # `a` would not have been enough, and is spared
        ("abc", {"a": 1, "b": 1}, []),  # nothing is said of `c`
        ("abcd", {"a": 1, "b": 1, "c": 1, "d": 1}, ["a"]),  # for their number
    ],
)
async def test_as_many_make_room_as_a_models_memory_needs(
    triton: FakeTriton, demand: Any, asked: str, gib: dict[str, float], unloads: list[str]
) -> None:
    unloaded(triton, *"abcd")
    pool = await demand(triton, max_loaded=3, max_loaded_gib=30.0, gib=gib, min_loaded_s=0)
    for model in asked:
        assert await said(pool, model) == "Hello"
    assert sorted(order for order in triton.orders if order.startswith("unload")) == sorted(
        f"unload {model}" for model in unloads
    )
    assert triton.orders[-1] == f"load {asked[-1]}"


async def test_nothing_is_unloaded_for_a_model_that_would_still_not_fit(
    triton: FakeTriton, demand: Any
) -> None:
    unloaded(triton, "a", "b", "c")
    gib = {"a": 20.0, "b": 5.0, "c": 15.0}
    pool = await demand(triton, max_loaded_gib=30.0, gib=gib, pinned=["a"], min_loaded_s=0)
    await said(pool, "a")
    await said(pool, "b")
    with pytest.raises(UnavailableError, match="models in use take all the room"):
        await ask(pool, "c", deadline=asyncio.get_running_loop().time() + 2)
    assert triton.orders == ["load a", "load b"]


async def test_what_takes_too_much_memory_is_unloaded(triton: FakeTriton, demand: Any) -> None:
    unloaded(triton, *"abcd")
    for model in triton.models.values():
        model.state = "READY"
    await demand(triton, max_loaded_gib=25.0, gib=dict.fromkeys("abcd", 10.0), min_loaded_s=60)
    await until(lambda: len(in_memory(triton)) == 2)
    await asyncio.sleep(1.5)
    assert len(triton.orders) == 2


async def test_pinned_models_alone_may_be_too_many(triton: FakeTriton, demand: Any) -> None:
    unloaded(triton, *"abc")
    for model in triton.models.values():
        model.state = "READY"
    await demand(triton, max_loaded=1, pinned=["a", "b"], min_loaded_s=60)
    await until(lambda: in_memory(triton) == {"a", "b"})


async def test_pinned_models_stay(triton: FakeTriton, demand: Any) -> None:
    unloaded(triton, "a", "b", "c")
    pool = await demand(triton, max_loaded=2, pinned=["a"])
    for model in ("a", "b", "c"):
        await said(pool, model)
    assert in_memory(triton) == {"a", "c"}


async def test_what_gets_no_room_in_time_is_refused_with_the_reason(triton: FakeTriton, demand: Any) -> None:
    unloaded(triton, "a", "b")
    pool = await demand(triton, max_loaded=1, pinned=["a"])
    await said(pool, "a")
    soon = asyncio.get_running_loop().time() + 2
    with pytest.raises(UnavailableError, match="models in use take all the room") as raised:
        await ask(pool, "b", deadline=soon)
    assert raised.value.retry_after_s
    assert asyncio.get_running_loop().time() < soon
    assert triton.orders == ["load a"]


@pytest.mark.parametrize("answers_within_s", [15.0, 0.0])
async def test_a_model_in_use_makes_room_when_its_requests_have_ended(
    triton: FakeTriton, demand: Any, monkeypatch: pytest.MonkeyPatch, answers_within_s: float
) -> None:
    """Whether it was just loaded or long ago: whoever asks for it meanwhile waits for it to come back."""
    unloaded(triton, "a", "b")
    release = asyncio.Event()

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        await release.wait()
        yield finished("done", 1)

    triton.models["a"].answer = answer
    pool = await demand(triton, max_loaded=1)
    running = asyncio.create_task(said(pool, "a"))
    await until(lambda: bool(triton.requests))
    other = asyncio.create_task(said(pool, "b"))
    (replica,) = [each for each in pool.replicas() if each.model == "a"]
    await until(lambda: replica.yielding)
    monkeypatch.setattr(on_demand, "_ANSWERS_WITHIN_S", answers_within_s)
    later = asyncio.create_task(said(pool, "a"))  # waits for its turn behind the other
    await asyncio.sleep(0.5)
    assert len(triton.requests) == 1
    assert in_memory(triton) == {"a"}
    release.set()
    assert list(await asyncio.gather(running, other, later)) == ["done", "Hello", "done"]
    assert triton.orders == ["load a", "unload a", "load b", "unload b", "load a"]


async def test_a_model_goes_on_when_nobody_waits_for_its_room_any_more(
    triton: FakeTriton, demand: Any
) -> None:
    unloaded(triton, "a", "b")
    pool = await demand(triton, max_loaded=1)
    await said(pool, "a")
    (replica,) = [each for each in pool.replicas() if each.model == "a"]
    with replica.in_use():
        other = asyncio.create_task(said(pool, "b"))
        await until(lambda: replica.yielding)
        other.cancel()
        assert await said(pool, "a") == "Hello"
    assert triton.orders == ["load a"]


async def test_a_model_just_loaded_stays_its_time(triton: FakeTriton, demand: Any) -> None:
    unloaded(triton, "a", "b")
    pool = await demand(triton, max_loaded=1, min_loaded_s=1.5)
    await said(pool, "a")
    ready = asyncio.get_running_loop().time()
    await said(pool, "b")
    assert asyncio.get_running_loop().time() - ready > 1.0


async def test_an_idle_model_is_unloaded_and_comes_back(
    triton: FakeTriton, demand: Any, observer: Any
) -> None:
    unloaded(triton, "a", "b")
    pool = await demand(triton, unload_idle_s=0.3, pinned=["b"])
    await asyncio.gather(said(pool, "a"), said(pool, "b"))
    await until(lambda: in_memory(triton) == {"b"})
    # More than once, where the machine is so slow that it becomes idle before its request comes to it.
    await until(lambda: set(observer.unloads) == {("a", triton.address, "idle")})
    assert await said(pool, "a") == "Hello"


async def test_what_only_others_use_is_not_idle(triton: FakeTriton, demand: Any, observer: Any) -> None:
    unloaded(triton, "a", "b")
    busy, watching = [await demand(triton, unload_idle_s=4.0) for _ in range(2)]
    await asyncio.gather(said(busy, "a"), said(watching, "b"))
    while ("b", triton.address, "idle") not in observer.unloads:
        assert await said(busy, "a") == "Hello"  # over before a probe sees it
        await asyncio.sleep(0.05)
    assert "unload a" not in triton.orders


async def test_what_others_used_since_makes_no_room(triton: FakeTriton, demand: Any) -> None:
    unloaded(triton, "a", "b", "c")
    one, other = [await demand(triton, max_loaded=2, min_loaded_s=0) for _ in range(2)]
    assert [await said(other, model) for model in "ab"] == ["Hello"] * 2
    assert await said(one, "a") == "Hello"
    await until(lambda: any(each.used_elsewhere_at > 0 for each in other.replicas()))
    assert await said(other, "c") == "Hello"
    assert "unload b" in triton.orders
    assert "unload a" not in triton.orders


async def test_an_unload_by_hand_lasts_until_the_next_request(
    triton: FakeTriton, demand: Any, observer: Any
) -> None:
    unloaded(triton, "a")
    pool = await demand(triton)
    await said(pool, "a")
    await pool.unload("a", upstream=None)
    assert pool.model("a").unloaded
    assert await said(pool, "a") == "Hello"
    assert triton.orders == ["load a", "unload a", "load a"]
    assert observer.unloads == [("a", triton.address, "admin")]


async def test_a_model_that_cannot_be_loaded_is_refused_and_not_tried_by_each_request(
    triton: FakeTriton, demand: Any
) -> None:
    unloaded(triton, "a")

    async def fail(context: Any) -> None:
        await context.abort(grpc.StatusCode.INTERNAL, "failed to load 'a': /secret")

    triton.models["a"].load = fail
    pool = await demand(triton)
    for _ in range(3):
        with pytest.raises(UnavailableError, match="could not be loaded") as raised:
            await ask(pool, "a")
        assert raised.value.retry_after_s
        assert "secret" not in raised.value.message
    assert triton.orders == ["load a"]


async def test_a_triton_that_is_down_is_a_503_at_once(triton: FakeTriton, demand: Any) -> None:
    unloaded(triton, "a")
    await triton.stop()
    pool = await demand(triton)
    with pytest.raises(UnavailableError):
        await ask(pool, "a")


async def test_what_is_too_much_is_unloaded(triton: FakeTriton, demand: Any) -> None:
    unloaded(triton, *"abcd")
    for model in triton.models.values():
        model.state = "READY"
    await demand(triton, max_loaded=2, min_loaded_s=60)
    await until(lambda: len(in_memory(triton)) == 2)
    await asyncio.sleep(1.5)
    assert len(triton.orders) == 2


async def test_what_others_are_unloading_is_no_longer_too_much(
    triton: FakeTriton, demand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.choice", max)  # never a look that lets it be
    unloaded(triton, *"abc")
    for model in triton.models.values():
        model.state = "READY"
    triton.models["a"].state = "UNLOADING"
    await demand(triton, max_loaded=2, min_loaded_s=0)
    await asyncio.sleep(1.5)  # at least one look
    assert triton.orders == []


async def test_room_that_others_make_is_waited_for(triton: FakeTriton, demand: Any) -> None:
    unloaded(triton, *"abc")
    triton.models["a"].state, triton.models["b"].state = "UNLOADING", "READY"
    pool = await demand(triton, max_loaded=2, min_loaded_s=0)
    waiting = asyncio.create_task(said(pool, "c"))
    await asyncio.sleep(1)  # several looks
    triton.models["a"].state = "UNAVAILABLE"
    assert await waiting == "Hello"
    assert triton.orders == ["load c"]


async def test_what_is_too_much_goes_though_it_is_always_in_use(
    triton: FakeTriton, demand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that overlap would keep it for ever if it went on to take them."""
    monkeypatch.setattr(on_demand, "_READ_WITHIN_S", 60.0)  # however slow the machine
    unloaded(triton, "a", "b")
    pool = await demand(triton, max_loaded=2)
    assert [await said(pool, model) for model in "ab"] == ["Hello"] * 2
    first, second = pool.replicas()
    with first.in_use(), second.in_use():
        pool._on_demand._policy = replace(pool._on_demand._policy, max_loaded=1)
        await until(lambda: first.yielding or second.yielding)
        later = asyncio.create_task(said(pool, (first if first.yielding else second).model))
        await asyncio.sleep(1)  # several looks
        assert not later.done()
    assert await later == "Hello"
    await until(lambda: len(in_memory(triton)) == 1)


async def test_room_elsewhere_is_used_first(tritons: Any, demand: Any) -> None:
    first, second = await tritons(), await tritons()
    for each in (first, second):
        unloaded(each, *"ab")
    pool = await demand(first, second, max_loaded=1, min_loaded_s=60)
    await said(pool, "a")
    await said(pool, "b")
    assert in_memory(first) | in_memory(second) == {"a", "b"}
    assert len(first.orders + second.orders) == 2


async def test_another_gateways_unload_costs_a_load_and_no_request(
    triton: FakeTriton, serve: Any, demand: Any
) -> None:
    unloaded(triton, "a", "b")
    pool = await demand(triton, max_loaded=1)
    await said(pool, "a")
    # As Triton is when the other gateway has just taken the place, before a probe can see it.
    triton.models["a"].state, triton.models["a"].reason = "UNAVAILABLE", "unloaded"
    (replica,) = [each for each in pool.replicas() if each.model == "a"]
    assert replica.state is ReplicaState.READY
    assert await said(pool, "a") == "Hello"
    assert triton.orders == ["load a", "load a"]


async def test_gateways_that_share_a_triton_answer_everybody(triton: FakeTriton, demand: Any) -> None:
    """Three gateways, eight models, room for two: loads are bounded, and nobody is forgotten."""
    names = [f"m{number}" for number in range(8)]
    unloaded(triton, *names)

    async def load(context: Any) -> None:
        await asyncio.sleep(0.05)

    for model in triton.models.values():
        model.load = load
    pools = [await demand(triton, max_loaded=2) for _ in range(3)]
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(in_memory(triton)))
            await asyncio.sleep(0.002)

    watching = asyncio.create_task(watch())
    refused: list[str] = []
    deadline = asyncio.get_running_loop().time() + 120

    async def client(number: int) -> None:
        for turn in range(3):
            model = names[(number + turn) % 8]
            try:
                assert await said(pools[number % 3], model, deadline=deadline) == "Hello"
            except UnavailableError as error:
                refused.append(error.message)

    await asyncio.gather(*(client(number) for number in range(48)))
    watching.cancel()
    assert refused == []
    # A request may come when its model has just gone: each has at most one load of its own.
    assert len([order for order in triton.orders if order.startswith("load")]) <= 144
    assert most <= 2
    await until(lambda: len(in_memory(triton)) <= 2)


async def test_errors_of_the_request_itself_stay_what_they_are(triton: FakeTriton, demand: Any) -> None:
    unloaded(triton, "a")
    pool = await demand(triton)
    with pytest.raises(GatewayError) as raised:
        await ask(pool, "other")
    assert raised.value.status == 404
    assert triton.orders == []
