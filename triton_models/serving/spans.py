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
from collections.abc import Callable
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from triton_models.serving.request import OpenRequest
from wire.refusal import RefusalCode
from wire.request import traced_id
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
        now = time.monotonic()
        offset_ns = time.time_ns() - round(now * 1e9)

        def unix_ns(moment: float) -> int:
            return offset_ns + round(moment * 1e9)

        def part(name: str, start: float, end: float, attributes: dict[str, int]) -> None:
            span = tracer.start_span(name, inside, attributes=attributes, start_time=unix_ns(start))
            span.end(unix_ns(end))

        tracer, choices, queued = self._telemetry.tracer, request.choices, request.queued
        whole = tracer.start_span("generate", parent, start_time=unix_ns(request.received))
        inside = trace.set_span_in_context(whole)
        for choice in choices:
            if queued is None:
                break  # it never got into the engine
            end = now if choice.closed_at is None else choice.closed_at
            which = {"tritongate.choice": choice.index}
            if choice.first_token is None:
                part("no_token", queued, end, which)
                continue
            started, first = (queued + seconds for seconds in choice.first_token)
            part("queue", queued, started, which)
            part("prefill", started, first, which | {"tritongate.cached_tokens": choice.cached_tokens})
            part("decode", first, max(first, end), which | {_OUTPUT: choice.completion_tokens})
        whole.set_attributes(
            {
                _INPUT: request.prompt_tokens,
                _OUTPUT: sum(choice.completion_tokens for choice in choices),
                "gen_ai.response.finish_reasons": [choice.finish or "none" for choice in choices],
                "tritongate.request_id": traced_id(request.generation.request_id or request.key),
            }
        )
        if code is not None:
            whole.set_attribute("error.type", code.value)
            whole.set_status(Status(StatusCode.ERROR, code.value))
        whole.end(unix_ns(now))
