"""Every way in which the real Triton fails, seen through the gateway's upstream: the error table, proven."""

import asyncio

import httpx
import pytest

from gateway.core.events import Delta
from gateway.core.request import PlainText, TokenIds
from gateway.core.upstream import Tokenization
from gateway.errors import (
    ContextLengthError,
    DeadlineError,
    GatewayError,
    InvalidRequestError,
    RateLimitError,
    UnavailableError,
    UpstreamProtocolError,
)
from gateway.triton.errors import Fault
from gateway.triton.pool import TritonUpstream
from tests.e2e.scripted_triton import (
    Scripted,
    ask,
    asking,
    failure,
    ready,
    stream_failure,
    until,
    upstream_of,
)
from tests.e2e.serve_process import ServeProcess
from tests.e2e.up_process import wait_until
from wire.refusal import RefusalCode

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


PATIENCE_S = 5.0
"""The model must have had the request before: it notes that it was cancelled."""


@pytest.mark.parametrize("stream", [True, False])
async def test_models_are_found_and_answer(upstream: TritonUpstream, *, stream: bool) -> None:
    assert [card.id for card in upstream.models()] == ["m"]
    assert upstream.model("m").max_context == 8
    deltas = [event for event in await ask(upstream, "hello", stream=stream) if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == "hello"
    assert deltas[-1].finish_reason == "stop"


async def test_tokens_are_counted_by_the_same_entry(upstream: TritonUpstream) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    fields = {"request_id": "statuses", "model": "m", "deadline": deadline}
    there = await upstream.tokenize(Tokenization(prompt=PlainText("你好"), **fields))
    back = await upstream.tokenize(Tokenization(prompt=TokenIds(tuple(there.ids)), **fields))
    assert back.text == "你好"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (RefusalCode.INVALID_REQUEST, InvalidRequestError),
        (RefusalCode.CONTEXT_LENGTH_EXCEEDED, ContextLengthError),
        (RefusalCode.QUEUE_FULL, RateLimitError),
        (RefusalCode.DEADLINE_EXCEEDED, DeadlineError),
        (RefusalCode.CANCELLED, UnavailableError),
        (RefusalCode.SHUTTING_DOWN, UnavailableError),
        (RefusalCode.UNAVAILABLE, UnavailableError),
        (RefusalCode.INTERNAL, UpstreamProtocolError),
    ],
)
async def test_refusals(upstream: TritonUpstream, code: RefusalCode, error: type[GatewayError]) -> None:
    assert type(await failure(upstream, f"refuse {code}")) is error


def test_what_clients_get_over_http(scripted: Scripted) -> None:
    codes = {"invalid_request": 400, "context_length_exceeded": 400, "queue_full": 429}
    codes |= {"internal": 502, "shutting_down": 503, "deadline_exceeded": 504}
    scripts = {"hello": 200, "raise": 502} | {f"refuse {code}": status for code, status in codes.items()}
    with ServeProcess(scripted.address, key=scripted.repository_key) as gateway:
        for script, status in scripts.items():
            body = {"model": "m", "messages": [{"role": "user", "content": script}], "stream": True}
            answer = httpx.post(gateway.base_url + "/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == status, script
            assert ("retry-after" in answer.headers) == (status in {429, 503}), script
            assert status == 200 or set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert not any(secret in answer.text for secret in ("secret", "Traceback", "m_0"))
            # After a refusal that puts the replica in doubt the gateway has none until its next probe.
            wait_until(gateway.is_ready)


async def test_a_burst_of_refusals_leaves_the_server_alive(upstream: TritonUpstream) -> None:
    """Asked for their statuses by `triton_grpc_error`, tritonserver 2.51 dies of one in some hundreds."""
    for _ in range(1500):
        assert type(await failure(upstream, "refuse invalid_request")) is InvalidRequestError


async def test_an_exception_in_execute(upstream: TritonUpstream) -> None:
    assert type(await failure(upstream, "raise")) is UpstreamProtocolError


async def test_tensors_of_another_shape(scripted: Scripted) -> None:
    client = scripted.connect()
    try:
        error = await stream_failure(client, "m", [1])
        assert error.fault is Fault.UNKNOWN
        assert "unexpected shape" in error.detail
    finally:
        await client.close()


async def test_the_requests_own_deadline(upstream: TritonUpstream, scripted: Scripted) -> None:
    scripted.forget_cancels()
    errors = await asyncio.gather(
        *(failure(upstream, "beat", time_s=PATIENCE_S, stream=stream) for stream in (True, False))
    )
    assert [type(error) for error in errors] == [DeadlineError] * 2
    await until(lambda: scripted.cancels() == 2)


async def test_silence(scripted: Scripted) -> None:
    async with upstream_of(scripted, idle_timeout_s=PATIENCE_S) as upstream:
        await ready(upstream)
        scripted.forget_cancels()
        for error in await asyncio.gather(
            *(failure(upstream, "hang", stream=stream) for stream in (True, False))
        ):
            assert type(error) is UnavailableError
            assert "stopped answering" in error.message
        await until(lambda: scripted.cancels() == 2)
        await ready(upstream)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", ["hang", "beat"])
async def test_hanging_up_is_seen_by_the_model(
    upstream: TritonUpstream, scripted: Scripted, script: str, *, stream: bool
) -> None:
    scripted.forget_cancels()
    events = upstream.generate(asking(script, stream=stream))
    await anext(events)
    await events.aclose()
    await until(lambda: scripted.cancels() == 1)
