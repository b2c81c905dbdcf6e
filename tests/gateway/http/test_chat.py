"""`POST /v1/chat/completions` over the official SDK and a real socket, on the fake upstream."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import openai
import pytest

from gateway.core.events import (
    Accepted,
    Delta,
    Event,
    Heartbeat,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from gateway.core.request import Generation
from gateway.errors import (
    ContextLengthError,
    DeadlineError,
    GatewayError,
    RateLimitError,
    UnavailableError,
    UpstreamProtocolError,
)
from tests.gateway.fake_upstream import FakeUpstream, say, say_after, say_and_hang, say_once_loaded
from tests.gateway.serving import CHAT, MESSAGES, Served, in_process, on_socket, until


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with on_socket(FakeUpstream(), ping_interval_s=0.1) as served:
        yield served


def data_of(text: str) -> list[Any]:
    """Return the events of a stream; comments are left out."""
    events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
    assert all(event.startswith("data: ") for event in events)
    return [event if event == "data: [DONE]" else json.loads(event[6:]) for event in events]


async def test_whole_answer(served: Served) -> None:
    answer = await served.sdk.chat.completions.create(model="glm", messages=MESSAGES, max_tokens=9)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "Hello world",
        "stop",
    )
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        3,
        3,
        6,
    )
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.system_fingerprint
    assert served.upstream.requests[0].max_tokens == 9
    assert not served.upstream.requests[0].stream


async def test_the_answer_can_be_sent_back(served: Served) -> None:
    answer = await served.sdk.chat.completions.create(model="glm", messages=MESSAGES)
    again = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "more"}]
    await served.sdk.chat.completions.create(model="glm", messages=again)
    assert [message.content for message in served.upstream.requests[1].prompt.messages] == [
        "hi",
        "Hello world",
        "more",
    ]


async def test_stream(served: Served) -> None:
    stream = await served.sdk.chat.completions.create(
        model="glm", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == [
        "assistant",
        *[None] * (len(chunks) - 2),
    ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello world"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 6
    assert served.upstream.requests[0].stream


async def test_stream_on_the_wire(served: Served) -> None:
    answer = await served.chat(stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = data_of(answer.text)
    assert events[-1] == "data: [DONE]"
    assert all("usage" not in event for event in events[:-1])


async def test_continuous_usage_grows() -> None:
    async with in_process(FakeUpstream()) as served:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = data_of((await served.chat(stream=True, stream_options=options)).text)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [0, 1, 2, 3, 3, 3]  # the role, the text, its end, and the total
    assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_log_probabilities() -> None:
    token = TokenLogprob(
        id=5,
        token="é",
        utf8="é".encode(),
        logprob=-0.5,
        top=(TopLogprob(id=1, token="e", utf8=b"e", logprob=-1.0),),
    )

    async def script(_request: Generation) -> AsyncGenerator[Event, None]:
        yield Accepted(prompt_tokens=1)
        usage = Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=1)
        yield Delta(tokens=1, logprobs=(token,))
        yield Delta(pieces=("é",), tokens=1, logprobs=(token,), finish_reason="length", usage=usage)

    async with in_process(FakeUpstream(script)) as served:
        whole = (await served.chat(logprobs=True, top_logprobs=1)).json()
        events = data_of((await served.chat(stream=True, logprobs=True)).text)
    expected = {
        "token": "é",
        "logprob": -0.5,
        "bytes": [0xC3, 0xA9],
        "top_logprobs": [{"token": "e", "logprob": -1.0, "bytes": [0x65]}],
    }
    assert whole["choices"][0]["logprobs"]["content"] == [expected, expected]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert whole["choices"][0]["finish_reason"] == "length"
    streamed = [event["choices"][0]["logprobs"] for event in events[:-1]]
    assert [logprobs["content"] for logprobs in streamed if logprobs] == [[expected], [expected]]
    assert [request.logprobs for request in served.upstream.requests] == [1, 0]


async def test_tokens_are_named_by_ids_and_special_ones_have_no_bytes() -> None:
    top = (
        TopLogprob(id=1, token="e", utf8=b"e", logprob=-1.0),
        TopLogprob(id=2, token="</s>", utf8=b"", logprob=-2.0),
    )
    token = TokenLogprob(id=2, token="</s>", utf8=b"", logprob=-2.0, top=top)

    async def script(_request: Generation) -> AsyncGenerator[Event, None]:
        yield Accepted(prompt_tokens=1)
        usage = Usage(prompt_tokens=1, completion_tokens=1)
        yield Delta(pieces=("a",), tokens=1, logprobs=(token,), finish_reason="stop", usage=usage)

    def told(choice: Any) -> Any:
        (content,) = choice["logprobs"]["content"]
        return [(each["token"], each["bytes"]) for each in (content, *content["top_logprobs"])]

    asked = {"logprobs": True, "top_logprobs": 2}
    by_id = {**asked, "return_tokens_as_token_ids": True}
    async with in_process(FakeUpstream(script)) as served:
        named = (await served.chat(**asked)).json()["choices"][0]
        whole = (await served.chat(**by_id)).json()["choices"][0]
        events = data_of((await served.chat(**by_id, stream=True)).text)
        body = {"model": "glm", "prompt": "a", "logprobs": 2, "return_tokens_as_token_ids": True}
        text = (await served.http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
        parts = data_of((await served.http.post("/v1/completions", json=body | {"stream": True})).text)
    assert told(named) == [("</s>", None), ("e", [0x65]), ("</s>", None)]
    expected = [("token_id:2", None), ("token_id:1", [0x65]), ("token_id:2", None)]
    streamed = [event["choices"][0] for event in events[:-1] if event["choices"][0]["logprobs"]]
    assert told(whole) == expected
    assert [told(choice) for choice in streamed] == [expected]
    assert text["tokens"] == ["token_id:2"]
    assert text["top_logprobs"] == [{"token_id:1": -1.0, "token_id:2": -2.0}]
    assert parts[0]["choices"][0]["logprobs"] == text


async def test_pings_while_nothing_comes() -> None:
    pinged, text = asyncio.Event(), ""
    async with on_socket(FakeUpstream(lambda _: say_after(pinged)), ping_interval_s=0.1) as served:
        body = {"model": "glm", "messages": MESSAGES, "stream": True}
        async with served.http.stream("POST", CHAT, json=body) as answer:
            async for piece in answer.aiter_text():
                text += piece
                if ": ping\n" in text:
                    pinged.set()
    assert data_of(text)[-1] == "data: [DONE]"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("fails", [False, True])
async def test_pings_while_the_model_is_loaded(path: str, fails: bool) -> None:
    loaded, text = asyncio.Event(), ""
    error = UnavailableError("no room", retry_after_s=7) if fails else None
    upstream = FakeUpstream(lambda _: say_once_loaded(loaded, error=error))
    async with on_socket(upstream, ping_interval_s=0.1) as served:
        body = {"model": "glm", "stream": True}
        body |= {CHAT: {"messages": MESSAGES}, "/v1/completions": {"prompt": "x"}}.get(path, {"input": "x"})
        async with served.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            async for piece in answer.aiter_text():
                text += piece
                if ": ping\n" in text:
                    loaded.set()
    assert ("no room" in text) == fails
    assert ('"a"' in text) != fails
    if path != "/v1/responses":
        assert data_of(text)[-1] == "data: [DONE]"


@pytest.mark.parametrize("fails", [False, True])
async def test_pings_while_the_gateway_is_full(*, fails: bool) -> None:
    free, text = asyncio.Event(), ""
    upstream = FakeUpstream(lambda _: say_after(free))
    async with on_socket(
        upstream, ping_interval_s=0.1, max_in_flight=1, request_timeout_s=2 if fails else 60
    ) as served:
        first = asyncio.create_task(served.http.post(CHAT, json={"model": "glm", "messages": MESSAGES}))
        await until(lambda: upstream.running == 1)
        body = {"model": "glm", "messages": MESSAGES, "stream": True}
        async with served.http.stream("POST", CHAT, json=body) as answer:
            assert answer.status_code == 200
            async for piece in answer.aiter_text():
                text += piece
                if ": ping\n" in text and not fails:
                    free.set()
        await first
    assert ('"finish_reason":"stop"' in text) != fails
    assert data_of(text)[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("path", "field", "said"),
    [(CHAT, "messages", MESSAGES), ("/v1/completions", "prompt", "x"), ("/v1/responses", "input", "x")],
)
async def test_a_prompt_too_long_for_a_model_that_was_loaded_is_named(
    path: str, field: str, said: Any
) -> None:
    loaded, text = asyncio.Event(), ""
    upstream = FakeUpstream(lambda _: say_once_loaded(loaded, error=ContextLengthError("too long")))
    async with on_socket(upstream, ping_interval_s=0.1) as served:
        body = {"model": "glm", "stream": True, field: said}
        async with served.http.stream("POST", path, json=body) as answer:
            async for piece in answer.aiter_text():
                text += piece
                loaded.set()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    error = next(each for each in events if "error" in each or each.get("type") == "error")
    assert error.get("error", error)["param"] == field


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_is_not_loaded_in_time_is_a_status(stream: bool) -> None:
    loaded, error = asyncio.Event(), UnavailableError("no room", retry_after_s=7)
    upstream = FakeUpstream(lambda _: say_once_loaded(loaded, error=error))
    async with in_process(upstream) as served:
        body = {"model": "glm", "messages": MESSAGES, "stream": stream}
        asking = asyncio.create_task(served.http.post(CHAT, json=body))
        await asyncio.sleep(0.1)
        assert not asking.done()
        loaded.set()
        answer = await asking
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")


REFUSALS = [
    (ContextLengthError("too long", param="messages"), 400, openai.BadRequestError),
    (RateLimitError("full", retry_after_s=1), 429, openai.RateLimitError),
    (UpstreamProtocolError("broken"), 502, openai.InternalServerError),
    (UnavailableError("away", retry_after_s=7), 503, openai.InternalServerError),
    (DeadlineError("late"), 504, openai.InternalServerError),
]


@pytest.mark.parametrize(("error", "status", "kind"), REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_are_statuses(
    error: GatewayError, status: int, kind: type[openai.APIStatusError], stream: bool
) -> None:
    async def refuse(_request: Generation) -> AsyncGenerator[Event, None]:
        raise error
        yield

    async with on_socket(FakeUpstream(refuse)) as served:
        with pytest.raises(kind) as caught:
            await served.sdk.chat.completions.create(model="glm", messages=MESSAGES, stream=stream)
        assert caught.value.status_code == status
        assert caught.value.code == error.code
        expected = None if error.retry_after_s is None else str(error.retry_after_s)
        assert caught.value.response.headers.get("retry-after") == expected
        await served.until_idle()


async def test_a_request_whose_time_is_over_is_not_sent_again_by_the_sdk() -> None:
    asked = []

    async def refuse(request: Generation) -> AsyncGenerator[Event, None]:
        asked.append(request)
        raise DeadlineError("late")
        yield

    async with on_socket(FakeUpstream(refuse)) as served:
        sdk = served.sdk.with_options(max_retries=2)
        with pytest.raises(openai.InternalServerError):
            await sdk.chat.completions.create(model="glm", messages=MESSAGES)
    assert len(asked) == 1


class UnforeseenError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "status"), [(UnavailableError("lost"), 503), (UnforeseenError("secret"), 500)]
)
async def test_errors_after_the_first_byte_end_the_stream(error: Exception, status: int) -> None:
    async def fail(_request: Generation) -> AsyncGenerator[Event, None]:
        yield Accepted(prompt_tokens=1)
        yield Delta(pieces=("par",), tokens=1)
        raise error

    async with in_process(FakeUpstream(fail)) as served:
        answer = await served.chat(stream=True)
        assert answer.status_code == 200
        events = data_of(answer.text)
        assert set(events[-2]["error"]) == {"message", "type", "param", "code"}
        assert events[-1] == "data: [DONE]"
        assert "secret" not in answer.text
        assert served.metric("requests_total", route=CHAT, model="glm", status=str(status)) == 1
        whole = await served.chat()
        assert whole.status_code == status
        assert "secret" not in whole.text


async def test_an_answer_without_an_end_is_the_upstreams_fault() -> None:
    async def stop_short(_request: Generation) -> AsyncGenerator[Event, None]:
        yield Accepted(prompt_tokens=1)
        yield Delta(pieces=("par",), tokens=1)

    async def begin_wrong(_request: Generation) -> AsyncGenerator[Event, None]:
        yield Heartbeat()

    async with in_process(FakeUpstream(stop_short)) as served:
        assert (await served.refusal())[0] == 502
        assert data_of((await served.chat(stream=True)).text)[-2]["error"]["code"] == "upstream_error"
        served.upstream.script = begin_wrong
        assert (await served.refusal(stream=True))[0] == 502


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_ends_a_request(stream: bool) -> None:
    async with on_socket(FakeUpstream(lambda _: say("a", "b", gap_s=30)), request_timeout_s=3) as served:
        answer = await served.chat(stream=stream)
        if stream:
            assert data_of(answer.text)[-2]["error"]["code"] == "deadline_exceeded"
        else:
            assert answer.status_code == 504
        await served.until_idle()
        assert served.upstream.cancelled == 1
        assert served.metric("requests_total", route=CHAT, model="glm", status="504") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_cancels_the_upstream(stream: bool) -> None:
    async with on_socket(FakeUpstream(lambda _: say_and_hang("a"))) as served:
        await served.hang_up(served.chat(stream=stream), tokens=1)
        await served.until_idle()
        assert served.upstream.cancelled == 1
        assert served.metric("client_cancels_total", model="glm") == 1
        assert served.metric("requests_total", route=CHAT, model="glm", status="499") == 1


async def test_a_client_that_hangs_up_before_acceptance_cancels_the_upstream() -> None:
    async def never(_request: Generation) -> AsyncGenerator[Event, None]:
        await asyncio.sleep(60)
        yield Accepted(prompt_tokens=1)

    async with on_socket(FakeUpstream(never)) as served:
        await served.hang_up(served.chat(stream=True))
        await served.until_idle()
        assert served.metric("client_cancels_total", model="glm") == 1


async def test_a_client_that_does_not_read_is_gone() -> None:
    async def flood(_request: Generation) -> AsyncGenerator[Event, None]:
        yield Accepted(prompt_tokens=1)
        for _ in range(2000):
            yield Delta(pieces=("x" * 65536,), tokens=1)

    async with on_socket(FakeUpstream(flood), send_timeout_s=0.3) as served:
        body = {"model": "glm", "messages": MESSAGES, "stream": True}
        async with served.http.stream("POST", CHAT, json=body):
            await until(lambda: served.metric("client_cancels_total", model="glm") == 1)
            await served.until_idle()


async def test_ten_requests_of_ten_tokens() -> None:
    async with in_process(FakeUpstream(lambda _: say(*"0123456789"))) as served:
        for number in range(10):
            await served.chat(stream=number % 2 == 0)
        assert served.metric("time_to_first_token_seconds_count", model="glm") == 10
        assert served.metric("inter_token_latency_seconds_count", model="glm") == 90
        assert served.metric("prompt_tokens_total", model="glm") == 30
        assert served.metric("generated_tokens_total", model="glm") == 100
        assert served.metric("overhead_seconds_count", model="glm") == 10
        assert served.metric("requests_total", route=CHAT, model="glm", status="200") == 10
        assert served.metric("client_cancels_total", model="glm") == 0


async def test_tokens_that_come_together_share_their_gap() -> None:
    async def joined(_request: Generation) -> AsyncGenerator[Event, None]:
        yield Accepted(prompt_tokens=1)
        yield Delta(pieces=("abcd",), tokens=4)
        await asyncio.sleep(0.2)
        usage = Usage(prompt_tokens=1, completion_tokens=6)
        yield Delta(pieces=("ef",), tokens=2, finish_reason="stop", usage=usage)

    async with in_process(FakeUpstream(joined)) as served:
        await served.chat(stream=True)
        assert served.metric("inter_token_latency_seconds_count", model="glm") == 5
        assert served.metric("inter_token_latency_seconds_bucket", model="glm", le="0.001") == 3
        assert served.metric("inter_token_latency_seconds_bucket", model="glm", le="0.05") == 3
        # The gap is counted once, not once for each token: twice would be more than the whole request took.
        took = served.metric("request_duration_seconds_sum", route=CHAT, model="glm")
        assert 0.19 < served.metric("inter_token_latency_seconds_sum", model="glm") < took


async def test_overhead_leaves_out_the_upstream() -> None:
    async with in_process(FakeUpstream(lambda _: say("a", gap_s=0.5))) as served:
        await served.chat()
        took = served.metric("request_duration_seconds_sum", route=CHAT, model="glm")
        assert took - served.metric("overhead_seconds_sum", model="glm") > 0.49


async def test_the_default_bound_gives_way_to_the_context_and_a_clients_does_not() -> None:
    async with in_process(FakeUpstream(), default_max_tokens=50) as served:
        for given in ({}, {"max_tokens": 60}):
            assert (await served.chat(**given)).status_code == 200
        bounds = [(request.max_tokens, request.max_tokens_yields) for request in served.upstream.requests]
        assert bounds == [(50, True), (60, False)]


async def test_the_default_bound_gives_way_to_min_tokens() -> None:
    async with in_process(FakeUpstream(), default_max_tokens=5) as served:
        await served.chat(min_tokens=7)
        await served.chat(min_tokens=3)
        assert [request.max_tokens for request in served.upstream.requests] == [7, 5]
