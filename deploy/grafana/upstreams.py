"""The dashboard *Upstreams*: the Tritons as the gateways see them, and the gateways themselves."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.panels import Query, distribution, frame, heat, lines, per_second, percentiles

_MODEL = 'model=~"$model"'
_GATEWAY = 'job="tritongate"'
_PROCESS = "{{instance}} {{worker}}"


def upstreams() -> Dashboard:
    """Return the dashboard."""
    health = [
        lines(
            "Healthy",
            Query(
                f"min by (model, upstream) (tritongate_upstream_healthy{{{_MODEL}}})",
                "{{model}} on {{upstream}}",
            ),
            unit="short",
            text="1: the model on that Triton takes requests, or is loaded by the next one, as the gateway "
            "that thinks worst of it says.",
        ),
        lines(
            "Failures by kind",
            Query(
                per_second("tritongate_upstream_errors_total", _MODEL, "model, upstream, code") + " > 0",
                "{{model}} on {{upstream}}: {{code}}",
            ),
            unit="reqps",
            text="Triton's gRPC statuses and texts, told apart; also where another Triton answered then.",
        ),
        lines(
            "Readable for Prometheus",
            Query('up{job=~"tritongate|triton"}', "{{job}} {{instance}}"),
            unit="short",
        ),
    ]
    gateways = [
        lines(
            "Gateway overhead",
            *percentiles("tritongate_overhead_seconds", _MODEL, "model"),
            unit="s",
            text="A generation's duration without its waits for its body, for admission and for Triton.",
        ),
        distribution("Gateway overhead", heat("tritongate_overhead_seconds", _MODEL), unit="s"),
        lines(
            "Clients that hung up",
            Query(
                per_second("tritongate_client_cancels_total", _MODEL, "model, instance"),
                "{{model}} {{instance}}",
            ),
            unit="reqps",
        ),
        lines(
            "At work, by gateway",
            Query(
                f"sum by (model, instance) (tritongate_requests_in_flight{{{_MODEL}}})",
                "{{model}} {{instance}}",
            ),
            unit="short",
        ),
        lines(
            "Processor",
            Query(f"rate(process_cpu_seconds_total{{{_GATEWAY}}}[$__rate_interval])", _PROCESS),
            unit="short",
            text="Cores in use. A process of the gateway is full at 1.",
        ),
        lines(
            "Memory",
            Query(f"process_resident_memory_bytes{{{_GATEWAY}}}", _PROCESS),
            unit="bytes",
        ),
    ]
    return frame(
        "tritongate: upstreams",
        "tritongate-upstreams",
        "The Tritons as the gateways see them, and the gateways themselves.",
        "tritongate_upstream_healthy",
        [("Tritons", health), ("Gateways", gateways)],
    )
