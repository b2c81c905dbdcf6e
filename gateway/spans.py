"""Records requests as OpenTelemetry spans: one per request and one for each of its parts, none per chunk.

    POST /v1/chat/completions     the request, a child of the client's `traceparent` if there is one
    ├── admission                 waiting for admission
    └── call                      one for each Triton that was tried, with the events `accepted` and
                                  `first_token`; Triton's own spans are its children, the model's are theirs

Attributes have the names of OpenTelemetry's conventions where there are any; others begin with `tritongate.`.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.exchange import Exchange
from gateway.metrics import UNKNOWN
from gateway.tracing import Attribute, Part, Trace
from wire.telemetry import Telemetry

_SERVICE: Final = "tritongate"
_SERVER_ERROR: Final = 500
_CANCELLED: Final = "cancelled"

_w3c = TraceContextTextMapPropagator()


class Recorded(Trace):
    """A trace whose spans are made here."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        super().__init__(f"{span.get_span_context().trace_id:032x}")
        self._tracer = tracer
        self._span = span

    def part(
        self, name: str, attributes: Mapping[str, Attribute] | None = None
    ) -> AbstractContextManager[Part]:
        """See `Trace.part`."""
        return self._recorded(name, attributes or {})

    @contextmanager
    def _recorded(self, name: str, attributes: Mapping[str, Attribute]) -> Iterator[Part]:
        kind = SpanKind.CLIENT if "server.address" in attributes else SpanKind.INTERNAL
        span = self._tracer.start_span(
            name, trace.set_span_in_context(self._span), kind=kind, attributes=dict(attributes)
        )
        part = _RecordedPart(span)
        try:
            yield part
        except (asyncio.CancelledError, GeneratorExit):
            part.fail(_CANCELLED)
            raise
        except Exception as error:
            part.fail(type(error).__name__)
            raise
        finally:
            span.end()

    def first_token(self) -> None:
        """See `Trace.first_token`."""
        self._span.add_event("first_token")

    def end(self, exchange: Exchange, route: str) -> None:
        """See `Trace.end`. Refused and cancelled requests have the status that they deserved."""
        span, status = self._span, exchange.outcome
        if route != UNKNOWN:
            span.update_name(f"{exchange.method} {route}")
            span.set_attribute("http.route", route)
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("tritongate.request_id", exchange.request_id)
        if exchange.generates:
            span.set_attributes(
                {
                    "gen_ai.request.model": exchange.model,
                    "gen_ai.usage.input_tokens": exchange.prompt_tokens,
                    "gen_ai.usage.output_tokens": exchange.generated_tokens,
                    "tritongate.stream": exchange.stream,
                }
            )
        if exchange.error is not None:
            span.set_attribute("error.type", type(exchange.error).__name__)
        if status >= _SERVER_ERROR:
            span.set_status(Status(StatusCode.ERROR))
        span.end()


class _RecordedPart(Part):
    def __init__(self, span: Span) -> None:
        headers: dict[str, str] = {}
        # Triton records every request that has a parent, so it gets one only if the parent is recorded.
        if span.is_recording():
            _w3c.inject(headers, trace.set_span_in_context(span))
        super().__init__(tuple(headers.items()))
        self._span = span
        self._failed = False

    def event(self, name: str) -> None:
        """See `Part.event`."""
        self._span.add_event(name)

    def fail(self, code: str) -> None:
        """See `Part.fail`; the first one counts."""
        if not self._failed:
            self._failed = True
            self._span.set_attribute("error.type", code)
            self._span.set_status(Status(StatusCode.ERROR, code))


class Recording:
    """A `gateway.tracing.Tracing` that sends its spans to a collector.

    Args:
        endpoint: its URL for traces.
        share: of the requests without a `traceparent` to record, 0 to 1; a `traceparent` decides itself.
    """

    def __init__(self, endpoint: str, share: float) -> None:
        self._telemetry = Telemetry(endpoint, service=_SERVICE, share=share)

    def begin(self, method: str, given: Mapping[str, str]) -> Trace:
        """See `Tracing.begin`."""
        tracer = self._telemetry.tracer
        context = _w3c.extract({name: given[name] for name in _w3c.fields if name in given})
        span = tracer.start_span(
            method, context, kind=SpanKind.SERVER, attributes={"http.request.method": method}
        )
        return Recorded(tracer, span)

    def close(self) -> None:
        """See `Tracing.close`."""
        self._telemetry.close()
