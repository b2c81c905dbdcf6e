"""Bodies to choke on, at every door: they are refused, or read, and the process goes on answering."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from tritonclient.grpc.service_pb2 import ModelStreamInferResponse

from gateway.core.events import Event
from gateway.core.request import Generation, Turns
from gateway.kserve.grpc import GrpcServer
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.kserve.legacy import body, echo, over_grpc, predict_body, question
from tests.gateway.serving import CHAT, MESSAGES, Served, on_socket, until

JSON = {"Content-Type": "application/json"}
CHUNKS = 200_000
"""Half a second's work at each door, so none needs fewer."""
GRPC_MESSAGES = 1_000
"""A second's work: each is a request with a record and an answer of its own."""
AT_ONCE = 66
"""Requests of a stream: 64 that wait to be answered, the one that is next to be, and one more."""

DOORS: dict[str, dict[str, Any]] = {
    CHAT: {"model": "glm", "messages": MESSAGES},
    "/v1/completions": {"model": "glm", "prompt": "hi"},
    "/v1/responses": {"model": "glm", "input": "hi"},
    "/v1/responses/input_tokens": {"model": "glm", "input": "hi"},
    "/v1/messages": {"model": "glm", "messages": MESSAGES, "max_tokens": 5},
    "/v1/messages/count_tokens": {"model": "glm", "messages": MESSAGES},
    "/v1/embeddings": {"model": "glm", "input": "hi"},
    "/tokenize": {"model": "glm", "prompt": "hi"},
    "/detokenize": {"model": "glm", "tokens": [65]},
    "/MutilBackendService/Predict": predict_body(),
    "/v2/models/glm/infer": body(),
    "/v2/repository/index": {},
    "/v2/repository/models/glm/load": {},
}
"""With a body that each takes."""


def answer(request: Generation) -> AsyncGenerator[Event, None]:
    return echo(request) if isinstance(request.prompt, Turns) else say("a")


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with on_socket(FakeUpstream(answer)) as served:
        yield served


async def still_answers(served: Served, door: str) -> None:
    assert (await served.http.post(door, json=DOORS[door])).status_code == 200
    await until(lambda: served.gateway.bodies.held == 0)
    await served.until_idle()


@pytest.mark.parametrize("size", [5, 20])
@pytest.mark.parametrize("door", DOORS)
async def test_a_body_of_megabytes_is_refused(door: str, size: int, served: Served) -> None:
    content = json.dumps(DOORS[door] | {"x": "x" * size * 10**6}).encode()
    refused = await served.http.post(door, content=content, headers=JSON)
    assert refused.status_code == 413
    await still_answers(served, door)


@pytest.mark.parametrize(("size", "status"), [(1, 200), (30, 413)])
@pytest.mark.parametrize("door", DOORS)
async def test_hundreds_of_thousands_of_tiny_chunks(
    door: str, size: int, status: int, served: Served
) -> None:
    """As one body within the limit, and as one beyond it: each is a chunk of its own on the wire."""
    right = json.dumps(DOORS[door]).encode()
    piece = b"%x\r\n%s\r\n" % (size, b" " * size)
    reader, writer = await asyncio.open_connection(served.http.base_url.host, served.http.base_url.port)
    head = [
        f"POST {door} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Transfer-Encoding: chunked",
        "Connection: close",
    ]
    async with asyncio.timeout(60):
        writer.write("\r\n".join([*head, "", ""]).encode())
        for _ in range(CHUNKS // 1000):
            writer.write(piece * 1000)
            await writer.drain()
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(right), right))
        line = await reader.readline()
    writer.close()
    assert int(line.split()[1]) == status
    await still_answers(served, door)


@dataclass
class Running:
    """How many requests run at once, and how many there were."""

    now: int = 0
    most: int = 0
    ever: int = 0


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Running:
    counts, serve = Running(), GrpcServer._serve

    async def counted(self: GrpcServer, *request: Any) -> Any:
        counts.now, counts.ever = counts.now + 1, counts.ever + 1
        counts.most = max(counts.most, counts.now)
        try:
            return await serve(self, *request)
        finally:
            counts.now -= 1

    monkeypatch.setattr(GrpcServer, "_serve", counted)
    return counts


def stream(channel: grpc.aio.Channel, *messages: bytes) -> Any:
    async def each() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    return channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(each())


async def test_a_stream_of_tiny_messages_has_an_answer_to_each(running: Running) -> None:
    async with (
        over_grpc(FakeUpstream(answer)) as (served, stub, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        answers = [each async for each in stream(channel, *[b""] * GRPC_MESSAGES)]
        assert len(answers) == running.ever == GRPC_MESSAGES
        assert set(answers) == {answers[0]}
        assert ModelStreamInferResponse.FromString(answers[0]).error_message
        assert await stub.ModelInfer(question())
        await served.until_idle()
        assert served.gateway.bodies.held == 0


async def test_a_stream_is_served_a_few_requests_at_a_time(running: Running) -> None:
    go_on = asyncio.Event()

    async def once_told(request: Generation) -> AsyncGenerator[Event, None]:
        await go_on.wait()
        async for event in echo(request):
            yield event

    async with (
        over_grpc(FakeUpstream(once_told)) as (served, _, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = stream(channel, *[question().SerializeToString()] * 4 * AT_ONCE)

        async def answers() -> list[bytes]:
            return [each async for each in call]

        reading = asyncio.create_task(answers())
        await until(lambda: running.now == AT_ONCE)
        go_on.set()
        assert len(await reading) == running.ever == 4 * AT_ONCE
        assert running.most == AT_ONCE
        await served.until_idle()


async def test_a_client_that_reads_no_answers_is_not_served_for_ever(running: Running) -> None:
    large = question()
    large.id = "x" * 50_000  # each answer repeats it
    async with over_grpc(FakeUpstream(answer)) as (served, stub, address):
        async with grpc.aio.insecure_channel(address) as channel:
            call = stream(channel, *[large.SerializeToString()] * GRPC_MESSAGES)
            seen = -1
            while running.ever != seen or not seen:
                seen = running.ever
                await asyncio.sleep(0.5)
            assert running.ever < GRPC_MESSAGES
            call.cancel()
        await until(lambda: running.now == 0)
        assert await stub.ModelInfer(question())
        await served.until_idle()


@pytest.mark.parametrize("size", [5, 20])
async def test_a_message_of_megabytes_ends_its_stream(size: int) -> None:
    async with (
        over_grpc(FakeUpstream(answer)) as (served, stub, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream(channel, bytes(size * 10**6)).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await stub.ModelInfer(question())
        await served.until_idle()
