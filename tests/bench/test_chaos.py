"""That `bench.chaos` tells what had to happen from what need not have."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bench import chaos
from bench.chaos import Deed, Disturbance, Health
from bench.chaos_clients import Ending, Manner, Result
from bench.chaos_relay import Relay, network


class NoStack:
    """Stands for a stack that is never asked."""

    url = ""
    relays = ()


def ran(ending: Ending, began: float, ended: float) -> Result:
    return Result(Manner.STREAMS, ending, "why", "chaos-7", began, ended)


def undue(result: Result, *deeds: Deed, healthy: frozenset[int] = frozenset({0, 1}), log: str = "") -> bool:
    stack: Any = NoStack()
    disturbance, health = Disturbance(stack, random.Random(0)), Health(stack)
    disturbance.deeds.extend(deeds)
    health._seen = [(float(at), healthy) for at in range(100)]
    return bool(chaos._undue([result], disturbance, health, log))


KILLED = Deed(chaos._KILL_WORKER, 50, 50, None)
FIRST, SECOND = Deed("stop a server", 40, 52, 0), Deed("kill a stub", 55, 55, 1)


@pytest.mark.parametrize("ending", [Ending.LOST, Ending.BROKEN_OFF])
def test_only_the_death_of_a_gateway_process_ends_an_answer(ending: Ending) -> None:
    assert undue(ran(ending, 48, 58), FIRST, SECOND)
    assert not undue(ran(ending, 48, 58), KILLED)
    assert undue(ran(ending, 20, 30), KILLED)
    assert undue(ran(ending, 90, 95), KILLED)


def test_an_answer_breaks_off_after_four_tritons_or_all_of_its_time() -> None:
    failed = '{"message": "upstream failed: silent", "request_id": "chaos-7", "model": "m"}\n'
    broken_off = ran(Ending.BROKEN_OFF, 20, 30)
    assert undue(broken_off, log=3 * failed)
    assert undue(broken_off, log=9 * failed.replace("-7", "-77"))
    assert not undue(broken_off, log=4 * failed)
    assert undue(ran(Ending.LOST, 20, 30), log=4 * failed)
    assert not undue(ran(Ending.BROKEN_OFF, 0, 99.5))


def test_a_request_is_refused_only_if_no_triton_was_healthy_all_the_time() -> None:
    assert undue(ran(Ending.REFUSED, 48, 58))
    assert undue(ran(Ending.REFUSED, 48, 58), FIRST)
    assert not undue(ran(Ending.REFUSED, 48, 58), FIRST, SECOND)
    assert undue(ran(Ending.REFUSED, 70, 75), FIRST, SECOND)
    assert not undue(ran(Ending.REFUSED, 70, 75), healthy=frozenset())
    assert not undue(ran(Ending.REFUSED, 98, 120))


def test_answers_and_clients_that_left_are_due() -> None:
    assert not undue(ran(Ending.ANSWERED, 48, 58))
    assert not undue(ran(Ending.LEFT, 48, 58))


def test_a_triton_is_healthy_if_every_process_says_so() -> None:
    class Stack:
        url = ""

        class First:
            number, address = 0, "127.0.0.1:10"

        class Second:
            number, address = 1, "127.0.0.1:11"

        relays = (First, Second)

    stack: Any = Stack()
    lines = [
        f'tritongate_upstream_healthy{{model="m",upstream="127.0.0.1:{port}",worker="{worker}"}} {value}'
        for port, worker, value in ((10, 0, "1.0"), (10, 1, "1.0"), (11, 0, "1.0"), (11, 1, "0.0"))
    ]
    assert Health(stack)._healthy("\n".join(lines)) == {0}


@contextlib.asynccontextmanager
async def echoing() -> AsyncIterator[str]:
    handlers: list[asyncio.Task[None] | None] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        with contextlib.suppress(OSError):
            while piece := await reader.read(100):
                writer.write(piece)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server:
        yield "{}:{}".format(*server.sockets[0].getsockname())
        await asyncio.gather(*(each for each in handlers if each is not None))


async def test_a_network_passes_on_and_can_be_cut_and_held(tmp_path: Path) -> None:
    tritons = tmp_path / "tritons"
    writers: list[asyncio.StreamWriter] = []

    async def said(relay: Relay) -> asyncio.StreamReader:
        host, port = relay.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        writer.write(b"hello")
        return reader

    async def rest(reader: asyncio.StreamReader) -> bytes:
        with contextlib.suppress(ConnectionError):
            return await reader.read()
        return b""

    async with asyncio.timeout(60), echoing() as address:
        tritons.write_text(f"127.0.0.1:1\n{address}")
        with network(2, tritons) as (nowhere, relay):
            assert await rest(await said(nowhere)) == b""
            first = await said(relay)
            assert await first.readexactly(5) == b"hello"
            relay.hold()
            held = await said(relay)
            waiting = asyncio.create_task(held.readexactly(5))
            await asyncio.wait([waiting], timeout=0.2)
            assert not waiting.done()
            relay.mend()
            assert await waiting == b"hello"
            relay.cut()
            for each in (first, held, await said(relay)):
                assert await rest(each) == b""
            relay.mend()
            assert await (await said(relay)).readexactly(5) == b"hello"
            for writer in writers:
                writer.close()
