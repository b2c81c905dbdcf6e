"""Traces as OpenTelemetry spans: one of each request and one of each of its parts, none per chunk.

    POST /v1/chat/completions     the request, a child of the client's `traceparent` if there is one
    ├── admission                 waiting for admission
    └── call                      one for each Triton that was tried, with the events `accepted` and
                                  `first_token`; Triton's own spans are its children, the model's are theirs

Without an endpoint the spans are those of OpenTelemetry's no-op tracer: they record nothing, and a client's
`traceparent` goes on to Triton as it came. The SDK is an extra, imported only if there is one. Attributes
have the names of OpenTelemetry's conventions where there are any; others begin with `tritongate.`. Knows
nothing of HTTP or gRPC.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from opentelemetry.trace import (
    INVALID_SPAN,
    NoOpTracer,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Attribute = str | int | float | bool
Headers = Sequence[tuple[str, str]]
"""As gRPC metadata: lower-case names, printable ASCII values."""

_SERVICE: Final = "tritongate"
_w3c = TraceContextTextMapPropagator()
_no_tracer = NoOpTracer()


class Trace:
    """One request's trace.

    Args:
        tracer: makes the spans of the request's parts.
        span: the request's.
    """

    def __init__(self, tracer: Tracer = _no_tracer, span: Span = INVALID_SPAN) -> None:
        self.span = span
        self.calls: list[list[str]] = []
        """For each prompt, the addresses of the Tritons that were called for it, in order."""
        self._tracer = tracer
        context = span.get_span_context()
        self.trace_id = format_trace_id(context.trace_id) if context.is_valid else None
        """32 hexadecimal digits; None: there is no trace."""

    @contextmanager
    def part(self, name: str, attributes: Mapping[str, Attribute] | None = None) -> Iterator[Span]:
        """Record one part of the request during the block; an exception leaving it is the part's failure.

        Args:
            name: of the part.
            attributes: of its span; `server.address` marks a call to another process.
        """
        attributes = attributes or {}
        span = self._tracer.start_span(
            name,
            set_span_in_context(self.span),
            kind=SpanKind.CLIENT if "server.address" in attributes else SpanKind.INTERNAL,
            attributes=dict(attributes),
        )
        try:
            yield span
        except (asyncio.CancelledError, GeneratorExit):
            _fail(span, "cancelled")
            raise
        except Exception as error:
            # A failure of Triton says itself what traces call it.
            _fail(span, getattr(error, "error_type", type(error).__name__))
            raise
        finally:
            span.end()

    def headers(self, part: Span) -> Headers:
        """Return the headers with which a process that is called in `part` joins the trace."""
        headers: dict[str, str] = {}
        # Triton records every request that has a parent: where spans are made here, only recorded ones.
        if self._tracer is _no_tracer or part.is_recording():
            _w3c.inject(headers, set_span_in_context(part))
        return tuple(headers.items())


current_trace: ContextVar[Trace | None] = ContextVar("current_trace", default=None)
"""The trace of the request that the current task serves."""


class Tracing:
    """Begins traces, and sends them to a collector if there is one.

    Args:
        endpoint: the collector's URL for traces; None: nothing is recorded.
        share: of the requests without a `traceparent` to record, 0 to 1; a `traceparent` decides itself.
    """

    def __init__(self, endpoint: str | None = None, share: float = 1.0) -> None:
        self._telemetry = None
        self._tracer: Tracer = _no_tracer
        if endpoint is not None:
            from wire.telemetry import Telemetry  # noqa: PLC0415 - needs the extra `tracing`

            self._telemetry = Telemetry(endpoint, service=_SERVICE, share=share)
            self._tracer = self._telemetry.tracer

    def begin(self, method: str, given: Mapping[str, str]) -> Trace:
        """Begin a request's trace now; `given`: the request's headers, by lower-case names."""
        span = self._tracer.start_span(
            method, _w3c.extract(given), kind=SpanKind.SERVER, attributes={"http.request.method": method}
        )
        return Trace(self._tracer, span)

    def close(self) -> None:
        """Send what is left; may take two seconds."""
        if self._telemetry is not None:
            self._telemetry.close()


def _fail(span: Span, code: str) -> None:
    span.set_attribute("error.type", code)
    span.set_status(Status(StatusCode.ERROR, code))
