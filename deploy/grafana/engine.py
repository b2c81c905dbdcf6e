"""The dashboard *Engine and GPU*: what happens behind Triton."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.panels import Panel, Query, distribution, frame, heat, lines, per_second, percentiles

_MODEL = 'model=~"$model"'
_PREFIX = "tritongate_engine_"


def engine() -> Dashboard:
    """Return the dashboard."""
    return frame(
        "tritongate: engine and GPU",
        "tritongate-engine",
        "What happens behind Triton: batches, the KV cache, steps, Triton's queue, the GPU.",
        f"{_PREFIX}heartbeat_timestamp_seconds",
        [("Requests", _requests()), ("Cache and steps", _cache()), ("Triton", _triton()), ("GPU", _gpu())],
    )


def _requests() -> list[Panel]:
    return [
        lines(
            "Running and waiting",
            Query(f"sum by (model) ({_PREFIX}requests_running{{{_MODEL}}})", "{{model}} running"),
            Query(f"sum by (model) ({_PREFIX}requests_waiting{{{_MODEL}}})", "{{model}} waiting"),
            unit="short",
        ),
        lines(
            "Ended, by reason",
            Query(_rate("requests_total", "model, finish_reason"), "{{model}} {{finish_reason}}"),
            unit="reqps",
            stacked=True,
        ),
        lines(
            "Tokens",
            Query(_rate("generated_tokens_total"), "{{model}} out"),
            Query(_rate("prompt_tokens_total"), "{{model}} in"),
            unit="short",
            text="A second. Counted when a request ends, or is accepted: the gateway's curve is smoother.",
        ),
        lines(
            "Sequences per step",
            Query(
                f"{_rate('batch_size_sum')} / {_rate('batch_size_count')}",
                "{{model}} mean",
            ),
            unit="short",
        ),
        distribution("Sequences per step", heat(f"{_PREFIX}batch_size", _MODEL), unit="short"),
        lines(
            "From receipt to the first step",
            *percentiles(f"{_PREFIX}queue_seconds", _MODEL, "model"),
            unit="s",
            text="The engine's own queue.",
        ),
    ]


def _cache() -> list[Panel]:
    return [
        lines(
            "KV blocks in use",
            Query(f"model:tritongate_kv_used:ratio{{{_MODEL}}}", "{{model}} {{instance}}"),
            unit="percentunit",
            text="Blocks that requests hold. What the prefix cache keeps for later is free to take.",
        ),
        lines(
            "Prompt tokens found in the prefix cache",
            Query(
                f"{_rate('prefix_hit_tokens_total')} / ({_rate('prompt_tokens_total')} > 0)",
                "{{model}}",
            ),
            unit="percentunit",
            text="Share of all prompt tokens.",
        ),
        lines(
            "Preemptions and failed steps",
            Query(_rate("preemptions_total"), "{{model}} preemptions"),
            Query(_rate("failed_steps_total"), "{{model}} failed steps"),
            unit="ops",
            text="Sequences that gave up their KV blocks to others, and are computed again; steps of the"
            " engine that ended the requests in them with an error.",
        ),
        lines("Step time", *percentiles(f"{_PREFIX}step_seconds", _MODEL, "model"), unit="s"),
        distribution("Step time", heat(f"{_PREFIX}step_seconds", _MODEL), unit="s"),
        lines(
            "Last heartbeat",
            Query(f"model:tritongate_heartbeat_age:seconds{{{_MODEL}}}", "{{model}} {{instance}}"),
            unit="s",
            text="Seconds ago. One that grows: the engine's process is dead or stuck.",
        ),
    ]


def _triton() -> list[Panel]:
    return [
        lines(
            "Triton's queue",
            Query(
                f"{per_second('nv_inference_queue_duration_us', _MODEL, 'model')} / 1e6"
                f" / ({per_second('nv_inference_request_success', _MODEL, 'model')} > 0)",
                "{{model}}",
            ),
            unit="s",
            text="Mean wait in front of the engine, which takes what comes: long only where it is stuck.",
        ),
        lines(
            "Pending in Triton",
            Query(f"sum by (model) (nv_inference_pending_request_count{{{_MODEL}}})", "{{model}}"),
            unit="short",
        ),
        lines(
            "Requests through Triton",
            Query(
                per_second("nv_inference_request_success", _MODEL, "model"),
                "{{model}} taken",
            ),
            Query(
                per_second("nv_inference_request_failure", _MODEL, "model, reason"),
                "{{model}} {{reason}}",
            ),
            unit="reqps",
            text="Probes, cancels and counts of tokens among them.",
        ),
    ]


def _gpu() -> list[Panel]:
    return [
        lines(
            "GPU memory",
            Query("nv_gpu_memory_used_bytes", "{{gpu_uuid}} used"),
            Query("nv_gpu_memory_total_bytes", "{{gpu_uuid}} in all"),
            unit="bytes",
        ),
        lines("GPU utilisation", Query("nv_gpu_utilization", "{{gpu_uuid}}"), unit="percentunit"),
        lines(
            "GPU power",
            Query("nv_gpu_power_usage", "{{gpu_uuid}}"),
            Query("nv_gpu_power_limit", "{{gpu_uuid}} limit"),
            unit="watt",
        ),
    ]


def _rate(name: str, by: str = "model") -> str:
    return per_second(_PREFIX + name, _MODEL, by)
