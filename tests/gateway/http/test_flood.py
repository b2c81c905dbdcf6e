"""More clients than places, some of which hang up: nobody waits for ever and nothing is left behind."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import suppress

from gateway.core.events import Event
from gateway.core.request import Generation
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import CHAT, on_socket, until


async def test_flood() -> None:
    full = asyncio.Event()

    async def answer(_request: Generation) -> AsyncGenerator[Event, None]:
        await full.wait()  # however slowly they come
        async for event in say("a", "b", "c", gap_s=0.05):
            yield event

    upstream = FakeUpstream(answer)
    async with on_socket(upstream, max_in_flight=4, max_waiting=8) as served:
        asked = asyncio.gather(*(served.chat(stream=number % 2 == 0) for number in range(40)))
        await until(lambda: served.metric("requests_rejected_total", model="glm", reason="queue_full") > 0)
        full.set()
        answers = await asked
        statuses = [answer.status_code for answer in answers]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert statuses.count(200) + len(refused) == 40
        assert statuses.count(200) >= 12
        assert refused
        assert all(answer.headers["retry-after"] == "1" for answer in refused)
        assert all(answer.json()["error"]["code"] == "rate_limit_exceeded" for answer in refused)
        assert served.metric("requests_rejected_total", model="glm", reason="queue_full") == len(refused)
        await served.until_idle()
        assert len(upstream.requests) == statuses.count(200)


async def test_flood_with_hang_ups() -> None:
    choose = random.Random(7)
    upstream = FakeUpstream(lambda _: say(*"abcdefgh", gap_s=0.05))
    async with on_socket(upstream, max_in_flight=4, max_waiting=30) as served:

        async def visit(number: int) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(choose.uniform(0, 0.8)):
                    await served.chat(stream=number % 2 == 0)

        await asyncio.gather(*(visit(number) for number in range(40)))
        await served.until_idle()
        assert (await served.chat()).status_code == 200
        await served.until_idle()


async def test_a_request_whose_time_passed_in_the_queue_never_goes_upstream() -> None:
    upstream = FakeUpstream()
    async with on_socket(upstream, max_in_flight=1, request_timeout_s=0.2) as served:
        await served.gateway.admission.acquire()
        assert (await served.chat(stream=True)).status_code == 504
        served.gateway.admission.release()
        await served.until_idle()
        assert not upstream.requests
        assert served.metric("requests_rejected_total", model="glm", reason="deadline") == 1
        assert served.metric("requests_total", route=CHAT, model="glm", status="504") == 1
