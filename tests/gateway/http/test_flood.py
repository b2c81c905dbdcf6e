"""More clients than places, some of which hang up: nobody waits for ever and nothing is left behind."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import suppress

import pytest

from gateway.core.events import Event
from gateway.core.request import Generation
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import CHAT, MESSAGES, Served, on_socket, until


async def test_flood() -> None:
    full = asyncio.Event()

    async def answer(_request: Generation) -> AsyncGenerator[Event, None]:
        await full.wait()  # however slowly they come
        async for event in say("a", "b", "c", gap_s=0.05):
            yield event

    upstream = FakeUpstream(answer)
    async with on_socket(upstream, max_in_flight=4, max_waiting=8) as served:
        asked = asyncio.gather(*(served.chat(stream=number % 2 == 0) for number in range(40)))

        def turned_away() -> float:
            """Return how many were refused; before its body is read, nobody knows a request's model."""
            return sum(
                served.metric("requests_rejected_total", model=model, reason="queue_full")
                for model in ("glm", "unknown")
            )

        await until(lambda: turned_away() > 0)
        full.set()
        answers = await asked
        statuses = [answer.status_code for answer in answers]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert statuses.count(200) + len(refused) == 40
        assert statuses.count(200) >= 12
        assert refused
        assert all(answer.headers["retry-after"] == "1" for answer in refused)
        assert all(answer.json()["error"]["code"] == "rate_limit_exceeded" for answer in refused)
        assert turned_away() == len(refused)
        await served.until_idle()
        assert len(upstream.requests) == statuses.count(200)


async def asked_without_body(served: Served, path: str, key: str = "") -> bytes:
    """Return the status line that a request gets whose body never comes."""
    reader, writer = await asyncio.open_connection(served.http.base_url.host, served.http.base_url.port)
    head = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {key}",
        "Content-Type: application/json",
        "Content-Length: 4000000",
    ]
    writer.write("\r\n".join([*head, "", ""]).encode())
    try:
        async with asyncio.timeout(20):
            return await reader.readline()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "path",
    [
        CHAT,
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/messages",
        "/v2/models/glm/infer",
        "/MutilBackendService/Predict",
    ],
)
async def test_a_full_gateway_refuses_before_the_body(path: str) -> None:
    async with on_socket(FakeUpstream(), max_in_flight=1, max_waiting=0) as served:
        await served.gateway.admission.acquire()
        assert b" 429 " in await asked_without_body(served, path)
        answer = await served.http.post("/tokenize", json={"model": "glm", "prompt": "x"})
        assert answer.status_code == 200, "tokenizers are not full"
        served.gateway.admission.release()
        assert (await served.chat()).status_code == 200
        await served.until_idle()


async def test_full_tokenizers_refuse_before_the_body() -> None:
    async with on_socket(FakeUpstream(), max_waiting=0) as served:
        await served.gateway.tokenizing.acquire(1000)
        counting = ("/v1/responses/input_tokens", "/v1/messages/count_tokens")
        for path in ("/tokenize", "/detokenize", *counting):
            assert b" 429 " in await asked_without_body(served, path)
        assert (await served.chat()).status_code == 200
        served.gateway.tokenizing.release(1000)


async def test_a_key_at_its_limit_is_refused_before_the_body_and_not_charged() -> None:
    keys = [{"name": "k", "key": "one", "requests_per_minute": 1}]
    async with on_socket(FakeUpstream(models=("glm",)), api_keys=keys) as served:
        body, headers = {"model": "glm", "messages": MESSAGES}, {"authorization": "Bearer one"}
        assert (await served.http.post(CHAT, json=body, headers=headers)).status_code == 200
        for _ in range(3):
            assert b" 429 " in await asked_without_body(served, CHAT, key="one")
        refused = await served.http.post(CHAT, json=body, headers=headers)
        assert 0 < int(refused.headers["retry-after"]) <= 60
        assert served.metric("requests_rejected_total", model="glm", reason="key_limit") == 4
        assert (await served.http.get("/v1/models", headers=headers)).status_code == 200


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
