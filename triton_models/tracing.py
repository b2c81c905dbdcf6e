"""tritonserver's arguments for tracing. It reads W3C trace contexts, and passes its own span's to models."""

SERVICE = "triton"
TRACEPARENT = "traceparent"
_DELAY_MS = 500
"""Milliseconds between two exports, each of all spans that have accumulated."""


def trace_arguments(endpoint: str | None) -> list[str]:
    """Return tritonserver's arguments for spans that go to `endpoint` by OTLP/HTTP; none without one.

    Triton's own sampling rate is 0, but it traces every request with a `traceparent` header regardless of the
    rate: so the gateway decides what is traced. Triton also forwards that header to the models, because under
    load it fails to trace some of these requests (2.51: one in fifteen).
    """
    if endpoint is None:
        return []
    return [
        f"--grpc-header-forward-pattern={TRACEPARENT}",
        "--trace-config=mode=opentelemetry",
        "--trace-config=rate=0",
        "--trace-config=level=TIMESTAMPS",
        f"--trace-config=opentelemetry,url={endpoint}",
        f"--trace-config=opentelemetry,bsp_schedule_delay={_DELAY_MS}",
        f"--trace-config=opentelemetry,resource=service.name={SERVICE}",
    ]
