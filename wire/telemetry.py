"""Exports a process's spans: OTLP over HTTP, in batches, on a thread of the SDK's.

Only this module and those that make spans import the SDK, and only if an endpoint is set: it comes with the
extra `tracing`. Knows nothing of which spans there are.
"""

import threading
from collections.abc import Mapping
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

_SCOPE: Final = "tritongate"
_DELAY_MS: Final = 500.0
_TIMEOUT_S: Final = 5.0
"""For one export, including its retries."""
_LAST_WORDS_S: Final = 2.0
"""How long a process that ends waits for the collector to take the last spans."""


class Telemetry:
    """Makes a process's spans and sends them. Thread-safe; only `close` waits for the collector.

    A missing collector costs spans, never requests: what does not fit into the queue of 2,048 is dropped.

    Args:
        endpoint: the collector's URL for traces, such as `http://127.0.0.1:4318/v1/traces`.
        service: this process's name in traces.
        share: of the traces that begin here, 0 to 1; those from elsewhere carry the decision themselves.
        attributes: further attributes of this process.
    """

    def __init__(
        self, endpoint: str, *, service: str, share: float = 1.0, attributes: Mapping[str, str] | None = None
    ) -> None:
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(share)),
            resource=Resource.create({"service.name": service, **(attributes or {})}),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint, timeout=_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_DELAY_MS))
        self.tracer = self._provider.get_tracer(_SCOPE)

    def close(self) -> None:
        """Send what is left, for at most two seconds; later spans are dropped."""
        # The SDK would wait for half a minute.
        closing = threading.Thread(target=self._provider.shutdown, name="telemetry-close", daemon=True)
        closing.start()
        closing.join(_LAST_WORDS_S)
