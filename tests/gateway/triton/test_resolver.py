"""What the pool makes of the answers of a resolver, and of their absence."""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from typing import Any

import pytest

from gateway.errors import UnavailableError
from gateway.triton.options import HealthPolicy
from gateway.triton.replicas import ReplicaState
from gateway.triton.resolver import Name, name_in, resolve
from tests.gateway.triton.fake_resolver import NAME, FakeResolver, addresses, ask, ready_on
from tests.gateway.triton.fake_triton import FakeTriton, until

NO_SERVER = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


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


@pytest.mark.parametrize("failure", [NO_SERVER, ()], ids=["failed", "none"])
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
    triton: FakeTriton, named: Any, resolver: FakeResolver
) -> None:
    resolver.records["triton"] = [triton.address]
    pool = await named()
    await ready_on(pool, triton)
    resolver.records["triton"] = ()
    await triton.stop()
    await until(lambda: not pool.replicas())
    assert [(card.id, card.ready, card.unloaded) for card in pool.models()] == [("m", False, False)]


async def test_the_dead_stay_while_nobody_can_say(
    triton: FakeTriton, named: Any, resolver: FakeResolver, observer: Any
) -> None:
    resolver.records["triton"] = [triton.address]
    pool = await named()
    await ready_on(pool, triton)
    resolver.records["triton"] = NO_SERVER
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


def test_names_are_told_from_addresses() -> None:
    assert name_in(NAME) == Name(NAME, "triton", 8001)
    assert name_in("dns:///[::1]:1") == Name("dns:///[::1]:1", "::1", 1)
    for address in ("triton:8001", "10.0.0.1:8001", "[::1]:8001", "dns:8001"):
        assert name_in(address) is None


async def test_the_systems_resolver_is_asked() -> None:
    assert "127.0.0.1:8001" in await resolve("localhost", 8001)
    assert await resolve("127.0.0.1", 1) == ["127.0.0.1:1"]


def answering(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def getaddrinfo(host: str, port: int, **options: Any) -> Any:
        assert options == {"type": socket.SOCK_STREAM, "flags": socket.AI_ADDRCONFIG}
        return answer(host, port) if callable(answer) else answer

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


async def test_addresses_of_both_families_are_written_as_grpc_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 8001)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 8001, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 8001)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1%eth0", 8001, 0, 2)),
    ]
    answering(monkeypatch, found)
    assert await resolve("triton", 8001) == ["10.0.0.1:8001", "[fd00::1]:8001", "[fe80::1%eth0]:8001"]


@pytest.mark.parametrize("number", [socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_ADDRFAMILY])
async def test_that_there_is_none_is_an_answer(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def none(host: str, port: int) -> Any:
        raise socket.gaierror(number, "none")

    answering(monkeypatch, none)
    assert await resolve("triton", 8001) == []


@pytest.mark.parametrize("number", [socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_SYSTEM])
async def test_that_nobody_can_say_is_none(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def failing(host: str, port: int) -> Any:
        raise socket.gaierror(number, "why")

    answering(monkeypatch, failing)
    with pytest.raises(OSError, match="why"):
        await resolve("triton", 8001)


async def test_what_is_no_name_is_a_failure_like_others() -> None:
    with pytest.raises(OSError, match="no name of the DNS"):
        await resolve("a" * 70, 8001)


def test_a_resolver_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the event loop nor its end; what comes of the look when all is over is nobody's business."""
    over, ended = threading.Event(), threading.Event()

    def hanging(host: str, port: int) -> Any:
        over.wait(20)
        ended.set()
        return []

    async def look() -> None:
        looking = asyncio.create_task(resolve("triton", 8001))
        for _ in range(10):
            await asyncio.sleep(0.01)
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking

    answering(monkeypatch, hanging)
    began = time.monotonic()
    asyncio.run(look())
    assert time.monotonic() - began < 10
    over.set()
    assert ended.wait(20)


async def test_the_interval_bounds_the_pauses(named: Any, resolver: FakeResolver) -> None:
    await named(health=HealthPolicy(backoff_first_s=3600, backoff_limit_s=3600), resolve_interval_s=0.02)
    await until(lambda: resolver.looks > 5)


async def test_no_failure_ends_the_watch(triton: FakeTriton, named: Any, observer: Any) -> None:
    """No thread to be had, for one: a container's processes are limited."""
    looks = 0

    async def resolve(host: str, port: int) -> list[str]:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise RuntimeError("can't start new thread")
        return [triton.address]

    pool = await named(resolve=resolve)
    await ready_on(pool, triton)
    assert observer.lookups[NAME, "failed"] == 2


async def test_only_changes_are_logged(
    triton: FakeTriton, named: Any, resolver: FakeResolver, caplog: pytest.LogCaptureFixture
) -> None:
    resolver.records["triton"] = [triton.address]
    with caplog.at_level(logging.INFO):
        pool = await named()
        await ready_on(pool, triton)
        for answer in (NO_SERVER, [triton.address]):
            resolver.records["triton"] = answer
            looks = resolver.looks
            await until(lambda looks=looks: resolver.looks > looks + 2)
    records = [record for record in caplog.records if record.getMessage().startswith("addresses")]
    assert [record.getMessage() for record in records] == [
        "addresses of a name: failed",
        "addresses of a name: found",
    ]
    assert (records[0].__dict__["upstream"], records[0].__dict__["detail"]) == (NAME, NO_SERVER.strerror)
