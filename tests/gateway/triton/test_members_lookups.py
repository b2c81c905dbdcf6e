"""What the pool makes of the answers of a resolver, and of their absence."""

import asyncio
import socket
from typing import Any

import pytest

from gateway.errors import UnavailableError
from gateway.triton.health import ReplicaState
from tests.gateway.triton.fake_resolver import NAME, FakeResolver, addresses, ask, ready_on
from tests.gateway.triton.fake_triton import (
    FakeTriton,
    until,
)

NOBODY = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


async def test_a_name_without_addresses_leads_to_tritons_when_they_come(
    triton: FakeTriton, named: Any, resolver: FakeResolver, observer: Any
) -> None:
    pool = await named(resolve_interval_s=3600)
    await until(lambda: observer.lookups[NAME, "none"] > 2)
    assert not pool.model("m").ready
    assert not pool.model("m").unloaded
    with pytest.raises(UnavailableError) as raised:
        await ask(pool)
    assert raised.value.retry_after_s
    with pytest.raises(UnavailableError):
        await pool.load("m", reload=False, upstream=None)
    resolver.records["triton"] = [triton.address]
    await ready_on(pool, triton)
    assert await ask(pool) == "Hello"


@pytest.mark.parametrize("failure", [NOBODY, ()], ids=["failed", "none"])
async def test_a_resolver_that_fails_takes_no_triton_away(
    tritons: Any, named: Any, resolver: FakeResolver, observer: Any, *, failure: Any, caplog: Any
) -> None:
    """Nor does one that has lost its data: "there is none" is not believed of a Triton that serves."""
    found = [await tritons() for _ in range(2)]
    resolver.records["triton"] = [each.address for each in found]
    pool = await named()
    await ready_on(pool, *found)
    resolver.records["triton"] = failure
    outcome = "failed" if failure else "none"
    await until(lambda: observer.lookups[NAME, outcome] > 3)
    assert len(addresses(pool, ReplicaState.READY)) == 2
    assert await ask(pool) == "Hello"
    told = [record for record in caplog.records if "addresses of a name" in record.getMessage()]
    assert [record.getMessage() for record in told] == [f"addresses of a name: {outcome}"]


async def test_a_name_that_has_none_any_more_takes_the_dead_ones_with_it(
    triton: FakeTriton, named: Any, resolver: FakeResolver, observer: Any
) -> None:
    resolver.records["triton"] = [triton.address]
    pool = await named()
    await ready_on(pool, triton)
    resolver.records["triton"] = ()
    await triton.stop()
    await until(lambda: not pool.replicas())
    assert observer.healthy == {}
    assert [(card.id, card.ready, card.unloaded) for card in pool.models()] == [("m", False, False)]


async def test_the_dead_stay_while_nobody_can_say(
    triton: FakeTriton, named: Any, resolver: FakeResolver, observer: Any
) -> None:
    resolver.records["triton"] = [triton.address]
    pool = await named()
    await ready_on(pool, triton)
    resolver.records["triton"] = NOBODY
    await triton.stop()
    await until(lambda: addresses(pool, ReplicaState.UNREACHABLE) == [triton.address])
    failed = observer.lookups[NAME, "failed"]
    await until(lambda: observer.lookups[NAME, "failed"] > failed + 2)
    await triton.start()
    await ready_on(pool, triton)


async def test_a_name_is_looked_at_again_when_all_that_it_led_to_have_failed(
    tritons: Any, named: Any, resolver: FakeResolver
) -> None:
    first, second, third = [await tritons() for _ in range(3)]
    resolver.records["triton"] = [first.address, second.address]
    pool = await named(resolve_interval_s=3600)
    await ready_on(pool, first, second)
    await asyncio.sleep(0.1)
    looks = resolver.looks
    resolver.records["triton"] = [third.address]
    await first.stop()
    await until(lambda: addresses(pool, ReplicaState.READY) == [second.address])
    assert resolver.looks == looks
    await second.stop()
    await ready_on(pool, third)
    assert await ask(pool) == "Hello"


async def test_names_and_addresses_mix_and_who_is_named_twice_is_there_once(
    tritons: Any, named: Any, resolver: FakeResolver
) -> None:
    first, second = [await tritons() for _ in range(2)]
    resolver.records = {
        "triton": [first.address, second.address, first.address],
        "other": [second.address],
    }
    pool = await named(first, names=(NAME, NAME, "dns:///other:8001"))
    await ready_on(pool, first, second)
    assert addresses(pool) == [first.address, second.address]
    # Each keeps whom it names, also when the others do not any more.
    resolver.records["triton"] = ["127.0.0.1:1"]
    await until(lambda: "127.0.0.1:1" in addresses(pool))
    await ready_on(pool, first, second)
    resolver.records["other"] = ["127.0.0.1:1"]
    await until(lambda: addresses(pool) == [first.address, "127.0.0.1:1"])
