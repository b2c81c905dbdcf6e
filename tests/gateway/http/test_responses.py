"""`POST /v1/responses` over the official SDK and a real socket, on the fake upstream."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from gateway.core.events import (
    Accepted,
    CallPart,
    Delta,
    Event,
    Heartbeat,
    Usage,
)
from gateway.core.request import Generation
from gateway.errors import (
    ContextLengthError,
    GatewayError,
    RateLimitError,
    UnavailableError,
    UpstreamProtocolError,
)
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.openai.sdk_shapes import check_event, check_response
from tests.gateway.serving import MESSAGES, Served, in_process, on_socket

RESPONSES = "/v1/responses"
TOOL: Any = {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with on_socket(FakeUpstream(), ping_interval_s=0.1) as served:
        yield served


async def ask(served: Served, **parameters: Any) -> Any:
    return await served.http.post(RESPONSES, json={"model": "glm", "input": "hi", **parameters})


async def call(request: Generation) -> AsyncGenerator[Event, None]:
    """Call a function, and answer once its result is there."""
    if request.prompt.messages[-1].role == "tool":
        async for event in say("Noon."):
            yield event
        return
    yield Accepted(prompt_tokens=3)
    yield Delta(pieces=("Let me see.",), tokens=3)
    usage = Usage(prompt_tokens=3, completion_tokens=9)
    calls = (CallPart("now", '{"zone": "北京"}'),)
    yield Delta(tokens=6, pieces=calls, finish_reason="tool_calls", usage=usage)


def events_of(text: str) -> list[Any]:
    """Return the events of a stream, each checked against the SDK; comments are left out."""
    events = []
    for event in text.split("\n\n"):
        if event and not event.startswith(":"):
            name, data = event.split("\n")
            document = json.loads(data.removeprefix("data: "))
            assert name == f"event: {document['type']}"
            check_event(document)
            events.append(document)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_whole_response(served: Served) -> None:
    response = await served.sdk.responses.create(
        model="glm", input="hi", instructions="s", max_output_tokens=9
    )
    assert (response.output_text, response.status, response.model) == ("Hello world", "completed", "glm")
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (
        3,
        3,
        6,
    )
    check_response((await ask(served)).json())
    asked = served.upstream.requests[0]
    assert (asked.max_tokens, asked.stream) == (9, False)
    assert [message.role for message in asked.prompt.messages] == ["system", "user"]


async def test_stream(served: Served) -> None:
    stream = await served.sdk.responses.create(model="glm", input="hi", stream=True)
    events: list[Any] = [each async for each in stream]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events[4:7]) == events[-1].response.output_text == "Hello world"
    assert events[0].response.status == "in_progress"
    assert events[0].response.id == events[-1].response.id
    assert served.upstream.requests[0].stream


class Word(BaseModel):
    said: str


async def test_the_sdk_parses_what_it_asked_for(served: Served) -> None:
    served.upstream.script = lambda _: say('{"said": ', '"hi"}')
    whole = await served.sdk.responses.parse(model="glm", input="hi", text_format=Word)
    assert whole.output_parsed == Word(said="hi")
    async with served.sdk.responses.stream(model="glm", input="hi", text_format=Word) as stream:
        streamed = await stream.get_final_response()
    assert streamed.output_parsed == Word(said="hi")
    for asked in served.upstream.requests:
        assert asked.grammar is not None
        assert json.loads(asked.grammar.text)["required"] == ["said"]
    said: list[Any] = [*whole.output, {"role": "user", "content": "?"}, *streamed.output]
    await served.sdk.responses.create(model="glm", input=said)
    assert [message.content for message in served.upstream.requests[2].prompt.messages] == [
        '{"said": "hi"}',
        "?",
        '{"said": "hi"}',
    ]


async def test_the_stream_on_the_wire(served: Served) -> None:
    served.upstream.script = lambda _: say("a", gap_s=3)
    answer = await ask(served, stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events_of(answer.text)
    # OpenAI's ends with its last event; a mark behind it would be an event that has no name.
    assert "[DONE]" not in answer.text
    assert ": ping\n\n" in answer.text


async def test_the_response_is_announced_before_its_first_token() -> None:
    said = asyncio.Event()

    async def wait(_request: Generation) -> AsyncGenerator[Event, None]:
        yield Accepted(prompt_tokens=1)
        yield Heartbeat()
        await said.wait()
        yield Delta(
            pieces=("a",), tokens=1, finish_reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=1)
        )

    async with on_socket(FakeUpstream(wait)) as served:
        stream = await served.sdk.responses.create(model="glm", input="hi", stream=True)
        assert (await anext(stream)).type == "response.created"
        assert (await anext(stream)).type == "response.in_progress"
        said.set()
        assert [event async for event in stream][-1].type == "response.completed"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_and_its_result_by_sending_the_output_back(streamed: bool) -> None:
    async with on_socket(FakeUpstream(call)) as served:
        said: list[Any] = [{"role": "user", "content": "What time is it?"}]
        if streamed:
            async with served.sdk.responses.stream(model="glm", input=said, tools=[TOOL]) as stream:
                response: Any = await stream.get_final_response()
        else:
            response = await served.sdk.responses.create(model="glm", input=said, tools=[TOOL])
        message, called = response.output
        assert message.content[0].text == "Let me see."
        assert (called.name, json.loads(called.arguments)) == ("now", {"zone": "北京"})
        said += response.output
        said.append({"type": "function_call_output", "call_id": called.call_id, "output": "12:00"})
        again = await served.sdk.responses.create(model="glm", input=said, tools=[TOOL])
        assert again.output_text == "Noon."
        asked = served.upstream.requests[1].prompt.messages
        assert [(message.role, message.content) for message in asked] == [
            ("user", "What time is it?"),
            ("assistant", "Let me see."),
            ("tool", "12:00"),
        ]
        assert asked[1].calls[0].id == asked[2].answers == called.call_id
        said += again.output
        said.append({"role": "user", "content": "Thanks"})
        await served.sdk.responses.create(model="glm", input=said, tools=[TOOL])
        assert [message.content for message in served.upstream.requests[2].prompt.messages[-2:]] == [
            "Noon.",
            "Thanks",
        ]


@pytest.mark.parametrize("error", [UpstreamProtocolError("broken"), UnavailableError("gone")])
async def test_an_error_amid_the_stream_is_its_last_events(served: Served, error: GatewayError) -> None:
    async def break_off(_request: Generation) -> AsyncGenerator[Event, None]:
        yield Accepted(prompt_tokens=1)
        yield Delta(pieces=("Hel",), tokens=1)
        raise error

    served.upstream.script = break_off
    events = events_of((await ask(served, stream=True)).text)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert (events[-2]["message"], events[-1]["response"]["status"]) == (str(error), "failed")
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hel"
    assert served.metric("requests_total", route=RESPONSES, model="glm", status=str(error.status)) == 1
    assert "error" in (await ask(served)).json()


async def test_errors_before_the_first_byte_are_the_sdks_own(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await served.sdk.responses.create(model="other", input="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as stored:
        await served.sdk.responses.create(model="glm", input="a", background=True)
    assert stored.value.param == "background"
    for error, refusal in (
        (ContextLengthError("too long"), openai.BadRequestError),
        (RateLimitError("full", retry_after_s=1), openai.RateLimitError),
    ):

        async def refuse(_request: Generation, error: GatewayError = error) -> AsyncGenerator[Event, None]:
            raise error
            yield

        served.upstream.script = refuse
        with pytest.raises(refusal) as refused:
            await served.sdk.responses.create(model="glm", input="a", stream=True)
        assert refused.value.code == error.code


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bound_beyond_the_context_is_named_as_it_was_sent(stream: bool, served: Served) -> None:
    said = "You requested 11 tokens. Please reduce the prompt or max_tokens."

    async def refuse(_request: Generation) -> AsyncGenerator[Event, None]:
        raise ContextLengthError(said)
        yield

    served.upstream.script = refuse
    for path, prompt, field in (
        ("/v1/responses", {"input": "hi"}, "max_output_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "max_tokens"),
    ):
        body = {"model": "glm", "stream": stream, field: 6, **prompt}
        error = (await served.http.post(path, json=body)).json()["error"]
        assert error["message"] == said.replace("max_tokens", field)
        assert (error["param"], error["code"]) == (next(iter(prompt)), "context_length_exceeded")


async def test_a_client_that_hangs_up_cancels_the_upstream() -> None:
    async with on_socket(FakeUpstream(lambda _: say(*"abc", gap_s=30))) as served:
        for stream in (False, True):
            await served.hang_up(ask(served, stream=stream))
        await served.until_idle()
        assert served.upstream.cancelled == 2
        assert served.metric("requests_total", route=RESPONSES, model="glm", status="499") == 2


async def test_keys_and_metrics_are_those_of_every_generating_route() -> None:
    keys = [{"name": name, "key": name * 16, "scopes": [name]} for name in ("inference", "admin")]
    async with in_process(FakeUpstream(), api_keys=keys) as served:
        statuses = []
        for name in (None, "admin", "inference"):
            served.http.headers.update({"Authorization": f"Bearer {name * 16}"} if name else {})
            statuses.append((await ask(served)).status_code)
        assert statuses == [401, 403, 200]
        assert served.metric("requests_total", route=RESPONSES, model="glm", status="200") == 1
        assert served.metric("generated_tokens_total", model="glm") == 3


async def test_there_is_nothing_to_retrieve() -> None:
    async with in_process(FakeUpstream()) as served:
        assert (await served.http.get(RESPONSES + "/resp_1")).status_code == 404
        assert (await served.http.delete(RESPONSES + "/resp_1")).status_code == 404
        assert (await served.http.get(RESPONSES)).status_code == 405
