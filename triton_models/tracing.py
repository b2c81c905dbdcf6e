"""tritonserver's arguments for tracing. It understands W3C contexts, and passes its own span's to models."""

SERVICE = "triton"
TRACEPARENT = "traceparent"
_DELAY_MS = 500
"""Between two exports, of as many spans as there are."""


def trace_arguments(endpoint: str | None) -> list[str]:
    """Return tritonserver's arguments for spans that go to `endpoint` by OTLP/HTTP; none without one.

    It traces what comes with a `traceparent`, whatever its rate, which is 0: the gateway decides. It forwards
    that header to the models too, since under load it leaves some requests untraced (2.51: one in fifteen).
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
