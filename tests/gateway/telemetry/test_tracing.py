import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from gateway.core.events import Accepted, Event
from gateway.core.request import Generation
from gateway.errors import UnavailableError
from gateway.telemetry.tracing import Trace, Tracing, current_trace
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import CHAT, MESSAGES, Served, in_process, on_socket, until
from tests.otlp_receiver import ERROR, Receiver, Span
from wire import telemetry

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-00"


@pytest.fixture
def collector() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


async def ask(served: Served, traceparent: str | None = TRACEPARENT, **parameters: Any) -> Any:
    body = {"model": "glm", "messages": MESSAGES, **parameters}
    headers = {} if traceparent is None else {"traceparent": traceparent}
    return await served.http.post(CHAT, json=body, headers=headers)


def request_span(collector: Receiver) -> Span:
    (span,) = collector.named("POST " + CHAT)
    return span


@pytest.mark.parametrize(
    ("given", "trace_id"),
    [
        (TRACEPARENT, TRACE_ID),
        (UNSAMPLED, TRACE_ID),
        (None, None),
        ("", None),
        (TRACEPARENT.upper(), None),
        (f"00-{'0' * 32}-{PARENT_ID}-01", None),
        (f"00-{TRACE_ID}-{'0' * 16}-01", None),
        (f"ff-{TRACE_ID}-{PARENT_ID}-01", None),
        (TRACEPARENT + "-more", None),
    ],
)
def test_what_is_passed_on_is_a_traceparent_or_nothing(given: str | None, trace_id: str | None) -> None:
    headers = {"tracestate": "a=1"} | ({} if given is None else {"traceparent": given})
    trace = Tracing().begin("GET", headers)
    assert trace.trace_id == trace_id
    with trace.part("call") as part:
        expected = (("traceparent", given), ("tracestate", "a=1")) if trace_id else ()
        assert trace.headers(part) == expected


def test_a_tracestate_that_cannot_be_a_header_stays_behind() -> None:
    trace = Tracing().begin("GET", {"traceparent": TRACEPARENT, "tracestate": "a=\x07"})
    with trace.part("call") as part:
        assert trace.headers(part) == (("traceparent", TRACEPARENT),)


def test_without_an_endpoint_there_is_no_sdk() -> None:
    """In a process of its own, where importing the SDK would fail."""
    program = """
import asyncio, sys
sys.modules["opentelemetry.sdk"] = sys.modules["opentelemetry.exporter"] = None
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import in_process
async def main():
    async with in_process(FakeUpstream()) as served:
        for stream in (False, True):
            answer = await served.chat(stream=stream)
            assert answer.status_code == 200
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_its_parts_and_its_first_token(collector: Receiver, *, stream: bool) -> None:
    async with in_process(FakeUpstream(), trace_endpoint=collector.endpoint) as served:
        answer = await ask(served, stream=stream)
    span = request_span(collector)
    assert (span.trace_id, span.parent_id) == (TRACE_ID, PARENT_ID)
    assert (span.service, span.status, span.events) == ("tritongate", 0, ["first_token"])
    assert span.attributes == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "tritongate.request_id": answer.headers["x-request-id"],
        "gen_ai.request.model": "glm",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "tritongate.stream": stream,
    }
    (admission,) = collector.named("admission")
    assert (admission.trace_id, admission.parent_id) == (TRACE_ID, span.span_id)
    assert len(collector.spans) == 2  # none per chunk


async def test_a_request_without_a_parent_begins_a_trace(collector: Receiver) -> None:
    async with in_process(FakeUpstream(), trace_endpoint=collector.endpoint) as served:
        await ask(served, None)
        await served.http.get("/v1/models")
        await served.http.get("/health")
        await served.http.get("/metrics")
    roots = [span for span in collector.spans if not span.parent_id]
    assert sorted(span.name for span in roots) == ["GET /v1/models", "POST " + CHAT]
    assert len({span.trace_id for span in roots}) == 2


@pytest.mark.parametrize(
    ("share", "given", "recorded"), [(0, None, 0), (0, TRACEPARENT, 1), (1, UNSAMPLED, 0)]
)
async def test_who_is_recorded(collector: Receiver, share: float, given: str | None, recorded: int) -> None:
    """By share, unless the client decided; Triton hears only of what is recorded, or it would record it."""
    seen: list[Any] = []

    async def look(_: Generation) -> AsyncIterator[Event]:
        trace = current_trace.get()
        with trace.part("call") as part:
            seen.append(trace.headers(part))
        async for event in say("a"):
            yield event

    settings = {"trace_endpoint": collector.endpoint, "trace_sample": share}
    async with in_process(FakeUpstream(look), **settings) as served:
        await ask(served, given)
    assert len(collector.named("POST " + CHAT)) == recorded
    assert [bool(headers) for headers in seen] == [bool(recorded)]


async def test_a_refused_request_has_its_status(collector: Receiver) -> None:
    async with in_process(FakeUpstream(), trace_endpoint=collector.endpoint) as served:
        await ask(served, temperature=99)
    span = request_span(collector)
    assert span.attributes["http.response.status_code"] == 400
    assert span.attributes["error.type"] == "InvalidRequestError"
    assert span.status != ERROR  # the client's fault, by the conventions


async def test_a_failure_after_the_first_byte_has_the_status_that_it_deserved(collector: Receiver) -> None:
    async def fail(_: Generation) -> AsyncIterator[Event]:
        yield Accepted(prompt_tokens=1)
        raise UnavailableError("gone")

    async with in_process(FakeUpstream(fail), trace_endpoint=collector.endpoint) as served:
        assert (await ask(served, stream=True)).status_code == 200
    span = request_span(collector)
    assert (span.attributes["http.response.status_code"], span.status) == (503, ERROR)
    assert span.attributes["error.type"] == "UnavailableError"


async def test_a_hang_up_in_the_queue(collector: Receiver) -> None:
    async def never(_: Generation) -> AsyncIterator[Event]:
        await asyncio.sleep(60)
        yield Accepted(prompt_tokens=1)

    async with on_socket(
        FakeUpstream(never), trace_endpoint=collector.endpoint, max_in_flight=1, request_timeout_s=30
    ) as served:
        first = asyncio.create_task(ask(served, None))
        await until(lambda: served.upstream.running == 1)
        second = asyncio.create_task(ask(served))
        await until(lambda: served.gateway.admission.waiting == 1)
        second.cancel()
        await until(lambda: served.gateway.admission.waiting == 0)  # before the first one's place is free
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await served.until_idle()
    (span,) = (span for span in collector.named("POST " + CHAT) if span.trace_id == TRACE_ID)
    assert span.attributes["http.response.status_code"] == 499
    assert span.attributes["error.type"] == "ClientGoneError"
    (admission,) = (span for span in collector.named("admission") if span.trace_id == TRACE_ID)
    assert admission.attributes["error.type"] == "ClientGoneError"
    assert admission.status == ERROR


def test_a_collector_that_goes_and_comes_back_is_a_line_each(
    collector: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry, "_TIMEOUT_S", 2.5)
    exporter = telemetry._Exporter(collector.endpoint.replace("127.0.0.1", "127.0.0.2"))  # nobody is there
    for _ in range(2):
        exporter.export([])
    monkeypatch.setattr(OTLPSpanExporter, "export", lambda *_: SpanExportResult.SUCCESS)
    for _ in range(2):
        exporter.export([])
    told = [(record.name, record.getMessage().split(":")[0]) for record in caplog.records]
    takes = "the trace collector takes "
    assert told == [("wire.telemetry", takes + "no spans"), ("wire.telemetry", takes + "spans again")]
    assert "refused" in caplog.records[0].detail  # type: ignore[attr-defined]


async def test_a_collector_that_is_away_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_TIMEOUT_S", 60.0)
    monkeypatch.setattr(telemetry, "_LAST_WORDS_S", 0.1)
    before = set(threading.enumerate())
    async with in_process(FakeUpstream(), trace_endpoint="http://127.0.0.1:9/v1/traces") as served:
        assert (await ask(served)).status_code == 200
        sending = set(threading.enumerate()) - before
        assert sending
    # Its retries, which would go on for half a minute, end with the gateway.
    for thread in sending:
        thread.join(15)
    assert not any(thread.is_alive() for thread in sending)


def test_a_trace_that_is_not_recorded_takes_every_call() -> None:
    trace = Trace()
    with trace.part("call", {"server.address": "a"}) as part:
        part.add_event("x")
    assert trace.calls == []
    assert trace.headers(part) == ()
