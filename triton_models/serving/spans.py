"""The model's own part of a request's trace, created when the request has ended, from recorded times.

    generate                  from receipt to the last response; a child of Triton's span of the request
    ├── queue                 of each choice: from the waiting list to its first step
    ├── prefill               to its first token
    └── decode                to its last response

A choice that never got a token has one span instead, `no_token`: whether it waited or ran is not known.
Imported only if an endpoint is set; needs the extra `tracing`.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from triton_models.serving.request import Choice, OpenRequest
from wire.refusal import RefusalCode
from wire.telemetry import Telemetry

_SERVICE: Final = "tritongate-model"
_INPUT: Final = "gen_ai.usage.input_tokens"
_OUTPUT: Final = "gen_ai.usage.output_tokens"

OnEnd = Callable[[OpenRequest, RefusalCode | None], None]
"""Called at a request's end with the code of its refusal; None if it was answered."""

_w3c = TraceContextTextMapPropagator()


class ModelSpans:
    """Creates the spans of one model's requests. Thread-safe.

    Args:
        endpoint: the collector's URL for traces.
        model: the model's name.
        version: the entry's version.
    """

    def __init__(self, endpoint: str, model: str, version: int) -> None:
        attributes = {"tritongate.model": model, "tritongate.version": str(version)}
        self._telemetry = Telemetry(endpoint, service=_SERVICE, attributes=attributes)

    def begin(self, context: str | None) -> OnEnd | None:
        """Return the function that creates a request's spans at its end; None if the request is not traced.

        Args:
            context: trace context of Triton's span, as the Python backend gives it: a JSON object with
                `traceparent`.
        """
        if not context:
            return None
        parent = _w3c.extract(json.loads(context))
        if not trace.get_current_span(parent).get_span_context().is_valid:
            return None
        return lambda request, code: self._record(parent, request, code)

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
        self._telemetry.close()

    def _record(self, parent: Context, request: OpenRequest, code: RefusalCode | None) -> None:
        spans = _Spans(self._telemetry.tracer, now=time.monotonic())
        choices = request.choices
        span = spans.begin("generate", parent, request.received)
        inside = trace.set_span_in_context(span)
        if request.queued is not None:
            for choice in choices:
                _record_choice(spans, inside, request.queued, choice)
        span.set_attributes(
            {
                _INPUT: request.prompt_tokens,
                _OUTPUT: sum(choice.completion_tokens for choice in choices),
                "gen_ai.response.finish_reasons": [choice.finish or "none" for choice in choices],
                "tritongate.request_id": request.generation.request_id or request.key,
            }
        )
        if code is not None:
            span.set_attribute("error.type", code.value)
            span.set_status(Status(StatusCode.ERROR, code.value))
        spans.end(span, spans.now)


def _record_choice(spans: "_Spans", inside: Context, queued: float, choice: Choice) -> None:
    end = spans.now if choice.closed_at is None else choice.closed_at
    which = {"tritongate.choice": choice.index}
    if choice.first_token is None:
        spans.end(spans.begin("no_token", inside, queued, which), end)
        return
    started, first = (queued + seconds for seconds in choice.first_token)
    cached = {"tritongate.cached_tokens": choice.cached_tokens}
    spans.end(spans.begin("queue", inside, queued, which), started)
    spans.end(spans.begin("prefill", inside, started, which | cached), first)
    made = {_OUTPUT: choice.completion_tokens}
    spans.end(spans.begin("decode", inside, first, which | made), max(first, end))


class _Spans:
    """Creates spans from moments in monotonic seconds; `now` relates them to Unix time."""

    def __init__(self, tracer: Tracer, *, now: float) -> None:
        self.now = now
        self._tracer = tracer
        self._offset_ns = time.time_ns() - round(now * 1e9)

    def begin(
        self, name: str, context: Context, moment: float, attributes: Mapping[str, int] | None = None
    ) -> Span:
        return self._tracer.start_span(name, context, attributes=attributes, start_time=self._unix_ns(moment))

    def end(self, span: Span, moment: float) -> None:
        span.end(self._unix_ns(moment))

    def _unix_ns(self, moment: float) -> int:
        return self._offset_ns + round(moment * 1e9)
