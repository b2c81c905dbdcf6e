"""Log lines as JSON on standard error, each with the id of the request that it belongs to.

Prompts, answers and keys are never logged; no call in this package hands them to a logger.
"""

import logging
import sys
from contextvars import ContextVar

from pythonjsonlogger.json import JsonFormatter

from gateway.tracing import current_trace

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Of the request that the current task serves."""


class _AddRequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if (trace := current_trace.get()) is not None and trace.trace_id is not None:
            record.trace_id = trace.trace_id
        if not hasattr(record, "request_id") and (current := request_id.get()) is not None:
            record.request_id = current
        return True


def configure_logging(level: str) -> None:
    """Send every logger's lines of `level` and above to standard error, replacing earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_AddRequestId())
    handler.setFormatter(
        JsonFormatter(
            "{levelname}{name}{message}",
            style="{",
            timestamp="time",
            rename_fields={"levelname": "level", "name": "logger"},
            json_ensure_ascii=False,
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # It repeats what we say ourselves.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
