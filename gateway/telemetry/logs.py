"""Log lines on standard error, each with the ids of its request and its trace, and its process's number.

Answers and keys are never logged, and prompts only if `log_prompts` is set (`gateway.http.record`): no other
code in this package passes them to a logger.
"""

import logging
import sys
from contextvars import ContextVar

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from gateway.telemetry.tracing import current_trace

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PLAIN = "%(message)s"

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that the current task serves."""


class _AddContext(logging.Filter):
    def __init__(self, worker: int | None) -> None:
        super().__init__()
        self._worker = worker

    def filter(self, record: logging.LogRecord) -> bool:
        if (trace := current_trace.get()) is not None and trace.trace_id is not None:
            record.trace_id = trace.trace_id
        if not hasattr(record, "request_id") and (current := request_id.get()) is not None:
            record.request_id = current
        if not hasattr(record, "worker") and self._worker is not None:
            record.worker = self._worker
        return True


class _TextFormatter(logging.Formatter):
    """Adds everything that is known besides, as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        first, *traceback = super().format(record).split("\n")
        extra = " ".join(
            f"{name}={value!r}" for name, value in vars(record).items() if name not in RESERVED_ATTRS
        )
        return "\n".join([f"{first} {extra}".rstrip(), *traceback])


def _json_formatter() -> JsonFormatter:
    return JsonFormatter(
        "{levelname}{name}{message}",
        style="{",
        timestamp="time",
        rename_fields={"levelname": "level", "name": "logger"},
        json_ensure_ascii=False,
    )


def configure_logging(level: str, form: str = "json", *, worker: int | None = None) -> None:
    """Send every logger's lines of `level` and above to standard error, replacing earlier handlers.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        form: `json`; `text` for people; `plain`, the same without time and logger.
        worker: this process's number, where several serve; None: it is the only one, or serves nothing.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_AddContext(worker))
    handler.setFormatter(
        _json_formatter() if form == "json" else _TextFormatter(_TEXT if form == "text" else _PLAIN)
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # It repeats our own lines.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
