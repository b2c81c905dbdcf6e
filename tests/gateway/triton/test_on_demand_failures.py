"""Loading on demand where Tritons hang, die or leave, models are dead, or the gateway closes."""

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import UnavailableError
from gateway.triton.on_demand import _alone
from gateway.triton.replicas import ReplicaState
from tests.gateway.triton.fake_resolver import NAME
from tests.gateway.triton.fake_triton import FakeTriton, refusing, until
from tests.gateway.triton.on_demand import ask, in_memory, said, unloaded


async def test_a_triton_that_was_gone_for_a_moment_is_used_again(
    triton: FakeTriton, demand: Any, resolver: Any
) -> None:
    unloaded(triton, "a")
    resolver.records["triton"] = [triton.address]
    named = {"names": [NAME], "resolve": resolver, "resolve_interval_s": 0.01}
    pool = await demand(models=["a"], options=named)
    await until(lambda: bool(pool.replicas()))
    assert await said(pool, "a") == "Hello"
    await pool.unload("a", upstream=None)
    resolver.records["triton"] = []
    await until(lambda: not pool.replicas())
    resolver.records["triton"] = [triton.address]
    await until(lambda: bool(pool.replicas()))
    assert await said(pool, "a") == "Hello"


@pytest.mark.parametrize("in_line", [False, True])
async def test_a_triton_that_dies_is_waited_for_by_those_in_line_too(
    triton: FakeTriton, demand: Any, *, in_line: bool
) -> None:
    """Also by who comes before a probe tells that it is gone."""
    unloaded(triton, "a", "b")
    pool = await demand(triton, max_loaded=1, options={"upstream_wait_s": 60})
    await said(pool, "a")
    (replica,) = [each for each in pool.replicas() if each.model == "a"]
    with replica.in_use():  # so that there is no room
        other = asyncio.create_task(said(pool, "b"))
        if in_line:
            await until(lambda: replica.yielding)
        await triton.stop()
        unloaded(triton, "a", "b")
        await until(lambda: {each.state for each in pool.replicas()} == {ReplicaState.UNREACHABLE})
        await asyncio.sleep(0.5)  # in which the repository is looked at
        await triton.start()
    assert await other == "Hello"


async def test_closing_ends_requests_that_wait_for_a_load(triton: FakeTriton, demand: Any) -> None:
    unloaded(triton, "a")

    async def slow(context: Any) -> None:
        await asyncio.sleep(60)

    triton.models["a"].load = slow
    pool = await demand(triton)
    waiting = asyncio.create_task(said(pool, "a"))
    await until(lambda: in_memory(triton) == {"a"})
    await pool.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        async with asyncio.timeout(5):
            await waiting


@pytest.mark.parametrize("models", ["ab", "b"])
async def test_a_triton_that_hangs_does_not_delay_the_others(tritons: Any, demand: Any, models: str) -> None:
    """Whether or not it has the model."""
    hanging, other = await tritons(), await tritons()
    unloaded(hanging, *models)
    unloaded(other, "a")
    pool = await demand(hanging, other, models=["a", "b"])
    await said(pool, "b")
    hanging.answers.clear()
    async with asyncio.timeout(4):  # a call is given up after 5 s
        assert await said(pool, "a") == "Hello"
    assert other.orders == ["load a"]
    hanging.answers.set()
    await pool.unload("b", upstream=None)
    assert await said(pool, "b") == "Hello"


async def test_a_triton_that_is_slow_to_say_what_it_has_is_waited_for(
    triton: FakeTriton, demand: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("gateway.triton.on_demand._READ_WITHIN_S", 0.0)
    unloaded(triton, "a", "b")
    pool = await demand(triton, max_loaded=1, min_loaded_s=0)
    for model in "abab":
        assert await said(pool, model) == "Hello"
    assert triton.orders == ["load a", "unload a", "load b", "unload b", "load a", "unload a", "load b"]


async def test_a_model_that_is_dead_at_one_triton_is_loaded_at_another(tritons: Any, demand: Any) -> None:
    dead, other = await tritons(), await tritons()
    for each in (dead, other):
        unloaded(each, "a")
    dead.models["a"].state = "READY"
    dead.models["a"].probe = refusing("Stub process 'a_0_0' is not healthy.")
    pool = await demand(dead, other)
    await until(lambda: pool.replicas()[0].state is ReplicaState.STUCK)
    assert await said(pool, "a") == "Hello"
    assert (dead.orders, other.orders) == ([], ["load a"])


async def test_a_load_whose_triton_dies_is_begun_at_another(tritons: Any, demand: Any) -> None:
    both = [await tritons(), await tritons()]
    dying: list[asyncio.Task[None]] = []

    async def die(context: Any) -> None:
        if not dying:
            dying.extend(asyncio.create_task(each.stop()) for each in both if each.orders)
            await asyncio.sleep(60)

    for each in both:
        unloaded(each, "a")
        each.models["a"].load = die
    pool = await demand(*both)
    assert await said(pool, "a") == "Hello"
    assert [each.orders for each in both] == [["load a"], ["load a"]]


async def test_a_model_that_takes_its_tritons_along_is_not_loaded_on_all_of_them(
    tritons: Any, demand: Any
) -> None:
    all_of_them = [await tritons() for _ in range(3)]
    dying: list[asyncio.Task[None]] = []

    async def die(context: Any) -> None:
        dying.extend(asyncio.create_task(each.stop()) for each in all_of_them if each.orders)
        await asyncio.sleep(60)

    for each in all_of_them:
        unloaded(each, "a")
        each.models["a"].load = die
    pool = await demand(*all_of_them)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="could not be loaded"):
            await ask(pool, "a")
    assert sum(len(each.orders) for each in all_of_them) == 2


def test_one_process_at_a_time_begins_a_load_and_no_lock_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with _alone("a:1") as first, _alone("a:1") as second, _alone("b:1") as elsewhere:
        assert (first, second, elsewhere) == (True, False, True)
    assert list(tmp_path.iterdir()) == []

    opened = os.open

    def late(path: Path, *rest: int) -> int:
        """Another process ends between this one's two steps, opening and locking."""
        file = opened(path, *rest)
        path.unlink()
        return file

    monkeypatch.setattr(os, "open", late)
    with _alone("a:1") as alone:
        assert not alone


def test_without_a_temporary_folder_nobody_is_kept_from_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a root file system that is read-only, and nothing mounted at /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    with _alone("a:1") as alone:
        assert alone
