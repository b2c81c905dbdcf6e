"""Public names over pools: what is set for a name, and what becomes of pools when the names change."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.app import triton_upstream
from gateway.core.events import Delta
from gateway.core.request import Conversation, Message, PlainText, Turns
from gateway.core.upstream import Embedding, Tokenization
from gateway.errors import InvalidRequestError, ModelNotFoundError
from gateway.settings import Settings
from gateway.telemetry.metrics import Metrics
from gateway.triton.pool import TritonUpstream
from gateway.triton.public import PublicModels
from tests.gateway.triton.fake_triton import FakeModel, FakeTriton, generation, inputs_of, refusing, until
from wire.history import Turn, decode_history
from wire.request import Generation as Sent
from wire.request import decode_request


class Serving:
    def __init__(self, triton: FakeTriton, models: Any) -> None:
        self.triton = triton
        self.metrics = Metrics()
        self.upstream = triton_upstream(self.settings(models), self.metrics)

    def settings(self, models: Any, **more: Any) -> Settings:
        return Settings(**{"upstreams": [self.triton.address], "models": models} | more)

    async def apply(self, models: Any, **more: Any) -> None:
        await self.upstream.apply(self.settings(models, **more))

    def healthy(self) -> dict[str, bool]:
        return {state.model: state.healthy for state in self.upstream.states()}

    async def ready(self) -> None:
        await until(lambda: all(card.ready for card in self.upstream.models()))

    async def sent(self, **changes: Any) -> tuple[str, Any, list[Turn]]:
        """Have a generation answered; return the entry, parameters and history that Triton got."""
        self.triton.requests.clear()
        await text_of(self.upstream, generation(**changes))
        (request,) = self.triton.requests
        inputs = inputs_of(request)
        asked = decode_request(inputs["sampling"])
        assert isinstance(asked, Sent)
        return request.model_name, asked, list(decode_history(inputs["history"]))


async def text_of(upstream: PublicModels, request: Any) -> str:
    async with aclosing(upstream.generate(request)) as events:
        return "".join([event.text async for event in events if isinstance(event, Delta)])


def counting(model: str) -> Tokenization:
    prompt = Conversation((Message(role="user", content="hi"),))
    deadline = asyncio.get_running_loop().time() + 30
    return Tokenization(request_id="r", model=model, prompt=prompt, deadline=deadline)


@pytest.fixture
async def serving(triton: FakeTriton) -> AsyncIterator[Serving]:
    triton.models["n"] = FakeModel()
    given = {
        "brief": {
            "entry": "m",
            "aliases": ["short"],
            "system": "Be brief.",
            "stop": ["###"],
            "defaults": {"max_tokens": 7},
            "limits": {"max_tokens": 20},
        },
        "m": {"limits": {"max_tokens": 20}},
    }
    serving = Serving(triton, given)
    await serving.upstream.start()
    await serving.ready()
    yield serving
    await serving.upstream.close()


async def test_what_is_set_for_a_name_reaches_its_entry(serving: Serving) -> None:
    entry, sampling, history = await serving.sent(model="short", stop=["x", "###"])
    assert (entry, sampling.stop, sampling.max_tokens) == ("m", ["x", "###"], 7)
    assert history == [Turn("system", "Be brief.")]
    entry, sampling, history = await serving.sent(model="m")
    assert (entry, sampling.stop, sampling.max_tokens, history) == ("m", [], 20, [])
    assert (await serving.sent(model="brief", max_tokens=9))[1].max_tokens == 9
    own = Conversation((Message(role="system", content="Mine."), Message(role="user", content="hi")))
    assert (await serving.sent(model="brief", prompt=own))[2] == [Turn("system", "Mine.")]
    legacy = Turns((Turn("user", "q"), Turn("assistant", "a")), "hi")
    _, sampling, history = await serving.sent(model="brief", prompt=legacy, max_total_tokens=99)
    assert (history[0], sampling.max_tokens) == (Turn("system", "Be brief."), 20)
    assert (await serving.sent(model="brief", prompt=PlainText("hi")))[2] == []


async def test_a_prompt_is_counted_as_it_is_sent(serving: Serving) -> None:
    await serving.upstream.tokenize(counting("brief"))
    history = inputs_of(serving.triton.requests[-1])["history"]
    assert decode_history(history) == [Turn("system", "Be brief.")]


async def test_more_stop_strings_than_there_may_be_are_refused(serving: Serving) -> None:
    with pytest.raises(InvalidRequestError, match="there are 17 stop strings") as caught:
        await text_of(serving.upstream, generation(model="brief", stop=[str(n) for n in range(16)]))
    assert caught.value.param == "stop"


async def test_only_names_and_aliases_are_found(serving: Serving) -> None:
    assert [card.id for card in serving.upstream.models()] == ["brief", "m"]
    assert serving.upstream.model("short").id == "brief"
    with pytest.raises(ModelNotFoundError):
        serving.upstream.model("n")
    with pytest.raises(ModelNotFoundError):
        serving.upstream.generate(generation(model="n"))


async def test_health_and_errors_are_told_by_public_names(serving: Serving) -> None:
    assert serving.healthy() == {"brief": 1, "m": 1}
    serving.triton.model.answer = refusing("the model is broken")
    with pytest.raises(Exception, match=r"."):
        await text_of(serving.upstream, generation(model="short"))
    (family,) = serving.metrics.upstream_errors.collect()
    assert {sample.labels["model"] for sample in family.samples} == {"brief"}


async def test_a_pool_that_would_be_the_same_stays(serving: Serving) -> None:
    (before,) = {replica for _, replica in serving.upstream.replicas()}
    await serving.apply({"other": {"entry": "m", "system": "New."}})
    assert serving.upstream.replicas() == [("other", before)]
    assert serving.healthy() == {"other": 1}
    await serving.apply({"other": {"entry": "n"}})
    assert serving.healthy() == {"other": 1}  # it had met its Triton before
    assert serving.upstream.model("other").ready


def listed(upstream: PublicModels) -> list[tuple[str, str | None]]:
    return [(card.id, card.parent) for card in upstream.models()]


async def test_adapters_stand_behind_their_models_and_follow_them(serving: Serving) -> None:
    assert listed(serving.upstream) == [("brief", None), ("m", None)]
    models = {"other": {"entry": "m", "aliases": ["o"], "adapters": ["org/tuned"]}, "m": {}}
    await serving.apply(models, adapters=["old=other"])
    assert listed(serving.upstream) == [
        ("other", None),
        ("old", "other"),
        ("org/tuned", "other"),
        ("m", None),
    ]
    card = serving.upstream.model("org/tuned")
    assert (card.id, card.parent, card.ready, card.settings.aliases) == ("org/tuned", "other", True, ())
    await serving.apply({"other": {"entry": "m"}})
    assert listed(serving.upstream) == [("other", None)]
    with pytest.raises(ModelNotFoundError):
        serving.upstream.model("org/tuned")


@pytest.mark.parametrize("name", ["other", "o", "m"])
async def test_the_model_of_an_adapter_is_given_by_any_of_its_names(serving: Serving, name: str) -> None:
    await serving.apply({"other": {"entry": "m", "aliases": ["o"]}}, adapters=[f"tuned={name}"])
    assert listed(serving.upstream) == [("other", None), ("tuned", "other")]
    assert serving.upstream.model("tuned").parent == "other"


async def test_the_entry_gets_the_request_and_the_adapters_name(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    await serving.apply({"brief": {"entry": "m", "system": "Be brief.", "adapters": ["org/tuned"]}})
    sent: list[Any] = []
    generate = TritonUpstream.generate

    def generating(pool: TritonUpstream, request: Any) -> Any:
        sent.append(request)
        return generate(pool, replace(request, adapter=None))

    monkeypatch.setattr(TritonUpstream, "generate", generating)
    for model in ("brief", "org/tuned"):
        assert await text_of(serving.upstream, generation(model=model)) == "Hello"
        assert (await serving.upstream.tokenize(counting(model))).ids == [0, 5]
    assert [(each.model, each.public_name, each.adapter) for each in sent] == [
        ("m", "brief", None),
        ("m", "brief", "org/tuned"),
    ]
    assert sent[1].prompt == sent[0].prompt


async def test_what_an_adapter_cannot_do(serving: Serving) -> None:
    await serving.apply({"other": {"entry": "m", "adapters": ["org/tuned"]}})
    for change in (partial(serving.upstream.load, reload=False), serving.upstream.unload):
        with pytest.raises(InvalidRequestError, match="with other"):
            await change("org/tuned", upstream=None)
    work = Embedding(request_id="r", model="org/tuned", prompt=PlainText("a"), deadline=0.0)
    with pytest.raises(InvalidRequestError, match="adapter"):
        await serving.upstream.embed(work)
    assert await serving.upstream.load("other", reload=False, upstream=None)


async def test_a_request_that_began_as_the_names_changed_ends_too(serving: Serving, tritons: Any) -> None:
    second = await tritons()
    events = serving.upstream.generate(generation(model="brief"))
    await serving.apply({"brief": {"entry": "m", "upstreams": [second.address]}})
    assert "".join([event.text async for event in events if isinstance(event, Delta)]) == "Hello"
    assert serving.triton.requests


async def test_a_request_ends_on_the_pool_it_began_on(
    serving: Serving, tritons: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, closed, close = asyncio.Event(), [], TritonUpstream.close

    async def closing(pool: TritonUpstream) -> None:
        closed.append(pool)
        await close(pool)

    monkeypatch.setattr(TritonUpstream, "close", closing)
    whole = serving.triton.model.answer

    async def slowly(request: Any, context: Any) -> AsyncIterator[Any]:
        async for response in whole(request, context):
            yield response
            await go_on.wait()

    serving.triton.model.answer = slowly
    old = next(replica for _, replica in serving.upstream.replicas())
    running = asyncio.create_task(text_of(serving.upstream, generation(model="brief")))
    await until(lambda: bool(old.outstanding))
    second = await tritons()
    await serving.apply({"brief": {"entry": "m", "upstreams": [second.address]}})
    assert await text_of(serving.upstream, generation(model="brief")) == "Hello"
    assert second.requests
    assert not running.done()
    assert not closed
    assert old.client not in [replica.client for _, replica in serving.upstream.replicas()]
    go_on.set()
    assert await running == "Hello"
    await until(lambda: bool(closed))


async def test_what_is_found_is_served_where_nothing_is_named(triton: FakeTriton) -> None:
    serving = Serving(triton, ())
    await serving.upstream.start()
    try:
        await until(lambda: bool(serving.upstream.models()))
        await serving.ready()
        assert await text_of(serving.upstream, generation()) == "Hello"
        assert serving.upstream.model("m").settings.entry == "m"
        assert serving.healthy() == {"m": 1}
    finally:
        await serving.upstream.close()


async def test_on_demand_models_take_the_memory_that_is_set_for_their_names(triton: FakeTriton) -> None:
    triton.models = {entry: FakeModel(state="") for entry in "ab"}
    models = {name: {"entry": entry, "memory_gib": 6} for name, entry in (("one", "a"), ("two", "b"))}
    policy: Any = {"load_on_demand": True, "max_loaded_gib": 10, "min_loaded_s": 0}
    upstream = triton_upstream(Settings(**{"upstreams": [triton.address], "models": models} | policy))
    await upstream.start()
    try:
        for name in models:
            assert await text_of(upstream, generation(model=name)) == "Hello"
    finally:
        await upstream.close()
    assert triton.orders == ["load a", "unload a", "load b"]


@pytest.mark.parametrize("pinned", ["one", "uno", "a"])
async def test_a_model_is_pinned_by_any_of_its_names(triton: FakeTriton, pinned: str) -> None:
    triton.models = {entry: FakeModel(state="") for entry in "abc"}
    models = {"one": {"entry": "a", "aliases": ["uno"]}, "two": {"entry": "b"}, "three": {"entry": "c"}}
    policy = {"load_on_demand": True, "max_loaded_models": 2, "min_loaded_s": 0, "pinned_models": [pinned]}
    upstream = triton_upstream(Settings(**{"upstreams": [triton.address], "models": models} | policy))
    await upstream.start()
    try:
        for name in models:
            assert await text_of(upstream, generation(model=name)) == "Hello"
    finally:
        await upstream.close()
    assert triton.orders == ["load a", "load b", "unload b", "load c"]


async def test_a_model_that_the_next_request_loads_is_healthy(triton: FakeTriton) -> None:
    # Else an alert would say, all night, that requests for a model that was unused get a 503.
    triton.models = {"a": FakeModel(state=""), "b": FakeModel(state="")}
    serving, other = Serving(triton, ["a", "b"]), Serving(triton, ["a", "b"])
    serving.upstream = triton_upstream(serving.settings(["a", "b"], load_on_demand=True))
    await serving.upstream.start()
    try:
        await until(lambda: serving.healthy() == {"a": True, "b": True})
        assert await text_of(serving.upstream, generation(model="a")) == "Hello"
        assert triton.orders == ["load a"]
        seen: list[dict[str, bool]] = []

        async def slow(_: Any) -> None:
            for _ in range(10):
                await asyncio.sleep(0.05)
                seen.extend((serving.healthy(), other.healthy()))

        triton.models["b"].load = slow
        other.upstream = triton_upstream(other.settings(["a", "b"], load_on_demand=True))
        await other.upstream.start()
        try:
            await until(lambda: other.healthy() == {"a": True, "b": True})
            assert await text_of(serving.upstream, generation(model="b")) == "Hello"
        finally:
            await other.upstream.close()
        assert len(seen) == 20
        assert all(all(each.values()) for each in seen)
        triton.models["b"].load = None
        await triton.stop()
        await until(lambda: serving.healthy() == {"a": False, "b": False})
    finally:
        await serving.upstream.close()
