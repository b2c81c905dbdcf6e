"""The dashboard *Service*: what clients see."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.panels import Query, distribution, frame, heat, lines, number, per_second, percentiles

_MODEL = 'model=~"$model"'
_ANSWERS = f'route=~"/v1/.+|/v2/.+/infer|/inference.+Infer|/MutilBackendService/.+",{_MODEL}'
_ALL = per_second("tritongate_requests_total", _ANSWERS)
_FAILED = per_second("tritongate_requests_total", f'{_ANSWERS},status=~"5.."')


def service() -> Dashboard:
    """Return the dashboard."""
    numbers = [
        number("Requests", Query(_ALL, "requests"), unit="reqps"),
        number(
            "Failed",
            Query(
                f"({_FAILED} or vector(0)) / {_ALL}",
                "failed",
            ),
            unit="percentunit",
            text="Share of the requests that ended with a 5xx, in a stream too.",
        ),
        number("At work", Query(f"sum(tritongate_requests_in_flight{{{_MODEL}}})", "at work"), unit="short"),
        number(
            "Waiting",
            Query(f"sum(tritongate_requests_waiting{{{_MODEL}}})", "waiting"),
            unit="short",
            text="For admission, in the gateway. The engine's own waiting list is on the next dashboard.",
        ),
        number(
            "First token, p95",
            Query(percentiles("tritongate_time_to_first_token_seconds", _MODEL, "job")[1].expr, "p95"),
            unit="s",
        ),
        number(
            "Output tokens",
            Query(per_second("tritongate_generated_tokens_total", _MODEL), "tokens/s"),
            unit="short",
            text="A second.",
        ),
    ]
    traffic = [
        lines(
            "Requests by model",
            Query(
                per_second("tritongate_requests_total", _ANSWERS, "model"),
                "{{model}}",
            ),
            unit="reqps",
        ),
        lines(
            "Requests by status",
            Query(
                per_second("tritongate_requests_total", _ANSWERS, "status"),
                "{{status}}",
            ),
            unit="reqps",
            text="The status deserved: an error in a stream as its own, a client that hung up as 499.",
            stacked=True,
        ),
        lines(
            "Requests by route",
            Query(
                per_second("tritongate_requests_total", _ANSWERS, "route"),
                "{{route}}",
            ),
            unit="reqps",
        ),
        lines(
            "Tokens",
            Query(
                per_second("tritongate_generated_tokens_total", _MODEL, "model"),
                "{{model}} out",
            ),
            Query(
                per_second("tritongate_prompt_tokens_total", _MODEL, "model"),
                "{{model}} in",
            ),
            unit="short",
            text="A second.",
        ),
        lines(
            "Clients that hung up",
            Query(
                per_second("tritongate_client_cancels_total", _MODEL, "model"),
                "{{model}}",
            ),
            unit="reqps",
        ),
        lines(
            "Turned away",
            Query(
                per_second("tritongate_requests_rejected_total", _MODEL, "model, reason") + " > 0",
                "{{model}} {{reason}}",
            ),
            unit="reqps",
            text="By the gateway, before any work. The engine's full waiting list is a status 429 only.",
        ),
    ]
    times = [
        lines(
            "Time to first token",
            *percentiles("tritongate_time_to_first_token_seconds", _MODEL, "model"),
            unit="s",
        ),
        lines(
            "Inter-token latency",
            *percentiles("tritongate_inter_token_latency_seconds", _MODEL, "model"),
            unit="s",
        ),
        lines("Duration", *percentiles("tritongate_request_duration_seconds", _ANSWERS, "model"), unit="s"),
        distribution("Time to first token", heat("tritongate_time_to_first_token_seconds", _MODEL), unit="s"),
        distribution("Inter-token latency", heat("tritongate_inter_token_latency_seconds", _MODEL), unit="s"),
        distribution("Duration", heat("tritongate_request_duration_seconds", _ANSWERS), unit="s"),
    ]
    keys = [
        lines(
            "Requests by key",
            Query(per_second("tritongate_key_requests_total", _MODEL, "key"), "{{key}}"),
            unit="reqps",
            text="By the name that the configuration gives a key.",
        ),
        lines(
            "Tokens by key",
            Query(
                per_second("tritongate_key_tokens_total", f'{_MODEL},kind="generated"', "key"), "{{key}} out"
            ),
            Query(per_second("tritongate_key_tokens_total", f'{_MODEL},kind="prompt"', "key"), "{{key}} in"),
            unit="short",
            text="A second, counted when a request ends.",
        ),
        lines(
            "Failed and refused requests by key",
            Query(
                per_second("tritongate_key_requests_total", f'{_MODEL},status=~"[45].."', "key, status"),
                "{{key}} {{status}}",
            ),
            unit="reqps",
            text="A 429 may be the key's own bound.",
        ),
    ]
    objectives = [
        lines(
            f"{title}: share of the last hour, beside its budget",
            Query(f"{record}:ratio_rate1h{{{_MODEL}}}", "{{model}}"),
            Query(f"vector({budget})", "budget"),
            unit="percentunit",
        )
        for title, record, budget in (
            ("Failed requests", "model:tritongate_request_errors", 0.001),
            ("First tokens after 2.5 s", "model:tritongate_late_first_tokens", 0.01),
            ("Gaps over 0.1 s", "model:tritongate_slow_tokens", 0.01),
        )
    ]
    return frame(
        "tritongate: service",
        "tritongate-service",
        "What clients see: traffic, statuses, latencies, tokens.",
        "tritongate_requests_total",
        [
            ("Now", numbers),
            ("Traffic", traffic),
            ("Keys", keys),
            ("Latency", times),
            ("Objectives", objectives),
        ],
    )
