"""`/v1/messages` over HTTP, on the fake upstream: keys, errors, streams, and what all routes share."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import datetime
from typing import Any

import httpx
import pytest

from gateway.core.events import Accepted, Delta, Event
from gateway.core.upstream import Tokenization, Tokens
from gateway.errors import (
    ContextLengthError,
    GatewayError,
    InternalError,
    RateLimitError,
    UnavailableError,
    UpstreamProtocolError,
)
from tests.gateway.fake_upstream import FakeUpstream, say, say_and_hang, say_once_loaded
from tests.gateway.serving import MESSAGES, Served, in_process, on_socket

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
KEYS = [
    {"name": "ann", "key": "sk-1", "requests_per_minute": 2},
    {"name": "operator", "key": "sk-2", "scopes": ["admin"]},
]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with on_socket(FakeUpstream(), ping_interval_s=0.1) as served:
        yield served


async def ask(
    served: Served, path: str = PATH, *, key: str | None = None, **parameters: Any
) -> httpx.Response:
    body = {"model": "glm", "messages": MESSAGES, "max_tokens": 9, **parameters}
    return await served.http.post(path, json=body, headers={} if key is None else {"x-api-key": key})


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    """Return the status, type and message of an error, whose form and id are checked."""
    document = answer.json()
    assert set(document) == {"type", "error", "request_id"}
    assert set(document["error"]) == {"type", "message"}
    assert document["type"] == "error"
    assert document["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return answer.status_code, document["error"]["type"], document["error"]["message"]


def events_of(text: str) -> list[Any]:
    events = []
    for event in text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_an_answer(served: Served) -> None:
    answer = await ask(served, system="Be brief.", cache_control={"type": "ephemeral"})
    assert answer.status_code == 200
    assert answer.json()["content"] == [{"type": "text", "text": "Hello world"}]
    assert answer.headers["x-tritongate-ignored"] == "cache_control"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    (asked,) = served.upstream.requests
    assert (asked.max_tokens, asked.stream) == (9, False)
    assert [message.role for message in asked.prompt.messages] == ["system", "user"]


async def test_a_stream(served: Served) -> None:
    answer = await ask(served, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [event["type"] for event in events_of(answer.text)] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert served.upstream.requests[0].stream


async def test_tokens_are_counted_without_an_answer(served: Served) -> None:
    answer = await ask(served, COUNT, system="Be brief.")
    assert (answer.status_code, answer.json()) == (200, {"input_tokens": len("Be brief.hi")})
    assert not served.upstream.requests


async def test_headers_and_query_of_its_clients_are_no_trouble(served: Served) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    body = {"model": "glm", "messages": MESSAGES, "max_tokens": 9}
    answer = await served.http.post(PATH + "?beta=true", json=body, headers=headers)
    assert answer.status_code == 200
    assert "x-tritongate-ignored" not in answer.headers


async def test_models_are_also_listed_in_its_form(served: Served) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = (await served.http.get("/v1/models", headers=headers)).json()
    names = [each["id"] for each in listed["data"]]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, names[0], names[-1])
    model = listed["data"][names.index("glm")]
    assert (model["type"], model["display_name"], model["lifecycle"]) == ("model", "glm", "active")
    assert model["max_input_tokens"] == model["max_model_len"]
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]
    assert (await served.http.get("/v1/models/glm", headers=headers)).json() == model
    others = (await served.http.get("/v1/models")).json()
    assert set(others) == {"object", "data"}
    assert not {"type", "display_name", "created_at", "lifecycle"} & set(others["data"][0])


async def test_keys() -> None:
    async with in_process(FakeUpstream(), api_keys=KEYS) as served:
        for key in (None, "sk-3", ""):
            assert error_of(await ask(served, key=key))[:2] == (401, "authentication_error")
            assert error_of(await ask(served, COUNT, key=key))[:2] == (401, "authentication_error")
        assert error_of(await ask(served, key="sk-2"))[:2] == (403, "permission_error")
        assert (await ask(served, key="sk-1")).status_code == 200
        body = {"model": "glm", "messages": MESSAGES, "max_tokens": 9}
        bearer = await served.http.post(PATH, json=body, headers={"Authorization": "Bearer sk-1"})
        assert bearer.status_code == 200
        limited = await ask(served, key="sk-1")
        assert error_of(limited)[:2] == (429, "rate_limit_error")
        assert int(limited.headers["retry-after"]) > 0
        models = await served.http.get("/v1/models", headers={"x-api-key": "sk-1"})
        assert models.status_code == 200


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (ContextLengthError("too long", param="messages"), 400, "invalid_request_error"),
        (RateLimitError("full", retry_after_s=3), 429, "rate_limit_error"),
        (UpstreamProtocolError("odd"), 502, "api_error"),
        (UnavailableError("away", retry_after_s=3), 503, "overloaded_error"),
        (InternalError("oh"), 500, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_answer_is_a_status(
    failure: GatewayError, status: int, kind: str, stream: bool
) -> None:
    async def fail(_: object) -> AsyncGenerator[Event, None]:
        raise failure
        yield

    async with in_process(FakeUpstream(fail)) as served:
        answer = await ask(served, stream=stream)
        assert error_of(answer)[:2] == (status, kind)
        assert answer.headers.get("retry-after") == (None if failure.retry_after_s is None else "3")


async def test_an_error_within_the_answer_is_an_event(caplog: pytest.LogCaptureFixture) -> None:
    async def break_off(_: object) -> AsyncGenerator[Event, None]:
        yield Accepted(prompt_tokens=3)
        yield Delta(pieces=("a",), tokens=1)
        raise UnavailableError("away")

    async with in_process(FakeUpstream(break_off)) as served:
        with caplog.at_level(logging.INFO, "gateway.access"):
            answer = await ask(served, stream=True)
        last = events_of(answer.text)[-1]
        assert last == {
            "type": "error",
            "error": {"type": "overloaded_error", "message": "away"},
            "request_id": answer.headers["request-id"],
        }
        assert served.metric("requests_total", route=PATH, model="glm", status="503") == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("GET", PATH, None, 405, "invalid_request_error"),
        ("POST", PATH + "/batches", {}, 404, "not_found_error"),
        ("POST", PATH, [], 400, "invalid_request_error"),
        ("POST", PATH, None, 415, "invalid_request_error"),
        ("POST", PATH, {"model": "no", "messages": MESSAGES, "max_tokens": 9}, 404, "not_found_error"),
        ("POST", PATH, {"model": "glm", "messages": MESSAGES}, 400, "invalid_request_error"),
        ("POST", PATH, {"model": "x" * 2000}, 413, "request_too_large"),
    ],
)
async def test_what_the_routes_share_has_this_form_too(
    method: str, path: str, body: Any, status: int, kind: str
) -> None:
    async with in_process(FakeUpstream(), max_body_bytes=1024) as served:
        sent = {} if body is None else {"json": body}
        assert error_of(await served.http.request(method, path, **sent))[:2] == (status, kind)


async def test_a_tool_runner_is_told_to_send_whole_conversations(served: Served) -> None:
    """By the details that the SDK (2.14) reads. Its next request would have had a tool's result alone."""
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        answer = await ask(served, thread=thread)
        assert (answer.status_code, answer.json()["error"]["details"]) == (
            400,
            {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )
    error_of(await ask(served, container="c"))  # has no details
    assert not served.upstream.requests


async def test_a_fault_of_the_gateway_has_this_form_too() -> None:
    async def fall_over(_: Tokenization) -> Tokens:
        raise ZeroDivisionError

    async with in_process(FakeUpstream()) as served:
        served.upstream.tokenizing = fall_over
        assert error_of(await ask(served, COUNT))[:2] == (500, "api_error")


@pytest.mark.parametrize("fails", [False, True])
async def test_pings_while_the_model_is_loaded(fails: bool) -> None:
    loaded, text = asyncio.Event(), ""
    error = UnavailableError("no room") if fails else None
    upstream = FakeUpstream(lambda _: say_once_loaded(loaded, error=error))
    async with on_socket(upstream, ping_interval_s=0.1) as served:
        body = {"model": "glm", "messages": MESSAGES, "max_tokens": 9, "stream": True}
        async with served.http.stream("POST", PATH, json=body) as answer:
            async for piece in answer.aiter_text():
                text += piece
                if "event: ping" in text:
                    loaded.set()
    kinds = [event["type"] for event in events_of(text)]
    assert kinds[0] == "ping"
    assert kinds[-1] == ("error" if fails else "message_stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hang_up_frees_the_engine(stream: bool) -> None:
    async with on_socket(FakeUpstream(lambda _: say_and_hang("a"))) as served:
        await served.hang_up(ask(served, stream=stream), tokens=1)
        await served.until_idle()
        assert served.upstream.cancelled == 1


async def test_what_is_counted_and_logged_is_that_of_every_route(caplog: pytest.LogCaptureFixture) -> None:
    async with in_process(FakeUpstream(lambda _: say("a", "b", prompt_tokens=4))) as served:
        with caplog.at_level(logging.INFO, "gateway.access"):
            await ask(served)
        assert served.metric("requests_total", route=PATH, model="glm", status="200") == 1
        assert served.metric("prompt_tokens_total", model="glm") == 4
        assert served.metric("generated_tokens_total", model="glm") == 2
    (line,) = (record for record in caplog.records if record.name == "gateway.access")
    assert (line.route, line.generated_tokens) == (PATH, 2)  # type: ignore[attr-defined]


async def test_timings_and_limits_are_those_of_every_route() -> None:
    async with in_process(FakeUpstream(), models={"glm": {"limits": {"max_tokens": 9}}}) as served:
        answer = await ask(served, include_timings=True)
        assert answer.json()["usage"]["timings"]["server_ms"] > 0
        events = events_of((await ask(served, include_timings=True, stream=True)).text)
        assert events[-2]["usage"]["timings"]["server_ms"] > 0
        status, _, message = error_of(await ask(served, max_tokens=10))
    assert (status, message) == (400, "max_tokens is 10, and this model allows 9.")
