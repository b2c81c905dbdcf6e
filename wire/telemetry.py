"""Exports a process's spans by OTLP over HTTP, in batches, on a thread of the SDK.

The SDK comes with the extra `tracing`, so only this module and those that create spans import it, and only if
an endpoint is set. This module does not know which spans there are.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

_SCOPE: Final = "tritongate"
_DELAY_MS: Final = 500.0
_TIMEOUT_S: Final = 5.0
"""For one export, including its retries."""
_LAST_WORDS_S: Final = 2.0
"""How long a process that exits waits for the collector to take the last spans."""

_log = logging.getLogger(__name__)
_sdk_log = logging.getLogger(OTLPSpanExporter.__module__)


class _Exporter(OTLPSpanExporter):
    """Says once that the collector takes no spans, and once that it does again; the SDK says each failure."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, timeout=_TIMEOUT_S)
        self._takes = True
        self._where = {"endpoint": endpoint}

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        said: list[str] = []

        def keep(record: logging.LogRecord) -> bool:
            said.append(record.getMessage())
            return False

        _sdk_log.addFilter(keep)
        try:
            result = super().export(spans)
        finally:
            _sdk_log.removeFilter(keep)
        takes = result is SpanExportResult.SUCCESS
        if takes and not self._takes:
            _log.warning("the trace collector takes spans again", extra=self._where)
        elif self._takes and not takes:
            extra = {**self._where, "detail": "".join(said[:1])}  # what follows is that it gives up
            _log.warning("the trace collector takes no spans: they are lost", extra=extra)
        self._takes = takes
        return result


class Telemetry:
    """Creates a process's spans and sends them. Thread-safe; only `close` waits for the collector.

    If the collector is missing, spans are lost but no requests: spans that do not fit into the queue of 2,048
    are dropped.

    Args:
        endpoint: the collector's URL for traces, such as `http://127.0.0.1:4318/v1/traces`.
        service: this process's name in traces.
        share: the sampled share, 0 to 1, of traces that begin here; other traces carry the decision with
            them.
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
        self._exporter = _Exporter(endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter, schedule_delay_millis=_DELAY_MS))
        self.tracer = self._provider.get_tracer(_SCOPE)

    def close(self) -> None:
        """Send the remaining spans, for at most two seconds; later spans are dropped."""
        # The SDK would wait for half a minute.
        closing = threading.Thread(target=self._provider.shutdown, name="telemetry-close", daemon=True)
        closing.start()
        closing.join(_LAST_WORDS_S)
        if closing.is_alive():
            # Which ends its retries, and with them both threads.
            self._exporter.shutdown()  # type: ignore[no-untyped-call]
