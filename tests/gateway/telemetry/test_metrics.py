from prometheus_client.parser import text_string_to_metric_families

from gateway.app import create_app
from gateway.settings import load_settings
from gateway.telemetry.metrics import Metrics, UpstreamState
from gateway.triton.backends import Outcome

CONTRACT = {
    "requests": {"route", "model", "status"},
    "request_duration_seconds": {"route", "model"},
    "time_to_first_token_seconds": {"model"},
    "inter_token_latency_seconds": {"model"},
    "overhead_seconds": {"model"},
    "requests_in_flight": {"model"},
    "requests_waiting": {"model"},
    "requests_rejected": {"model", "reason"},
    "client_cancels": {"model"},
    "prompt_tokens": {"model"},
    "generated_tokens": {"model"},
    "choices": {"model", "finish_reason"},
    "key_requests": {"key", "model", "status"},
    "key_tokens": {"key", "model", "kind"},
    "upstream_errors": {"model", "upstream", "code"},
    "resumed": {"model"},
    "models": set(),
    "upstream_healthy": {"model", "upstream"},
    "upstream_requests_waiting": {"model", "upstream"},
    "upstream_kv_usage_ratio": {"model", "upstream"},
    "upstream_lookups": {"upstream", "outcome"},
    "model_loads": {"model", "upstream", "outcome"},
    "model_load_seconds": {"model"},
    "model_unloads": {"model", "upstream", "reason"},
    "models_file_reloads": {"outcome"},
    "keys_file_reloads": {"outcome"},
    "tls_certificate_not_after_timestamp_seconds": {"path"},
}


def test_names_and_labels_are_the_contract() -> None:
    metrics = Metrics()
    for value in vars(metrics).values():
        if labels := getattr(value, "_labelnames", None):
            value.labels(*labels)
    metrics.upstreams.look = lambda: [
        UpstreamState(model="m", upstream="h:1", healthy=True, waiting=0, kv_usage=0.0)
    ]
    metrics.inter_token_latency.labels("m").observe(0.1)
    metrics.generated_tokens.labels("m").value += 1
    found = {
        family.name.removeprefix("tritongate_"): set(family.samples[0].labels) - {"le"}
        for family in text_string_to_metric_families(metrics.render().decode())
        if family.name.startswith("tritongate_")
    }
    assert found == CONTRACT


def test_what_upstreams_report() -> None:
    metrics = Metrics()
    metrics.upstream_errors.labels("m", "h:1", "silent").inc()
    metrics.upstreams.look = lambda: [UpstreamState(model="m", upstream="h:1", healthy=True)]
    text = metrics.render().decode()
    assert 'tritongate_upstream_errors_total{code="silent",model="m",upstream="h:1"} 1.0' in text
    assert 'tritongate_upstream_healthy{model="m",upstream="h:1"} 1.0' in text


def test_looks_at_names_are_counted_by_what_came_of_them() -> None:
    metrics = Metrics()
    for outcome in Outcome:
        assert metrics.registry.get_sample_value(
            "tritongate_upstream_lookups_total", {"upstream": "dns:///h:1", "outcome": outcome.value}
        ) == (None if outcome is Outcome.FOUND else 0)
        metrics.upstream_lookup("dns:///h:1", outcome.value)
    text = metrics.render().decode()
    assert text.count('upstream="dns:///h:1"} 1.0') == len(Outcome)


def test_nothing_is_left_of_an_upstream_that_left() -> None:
    metrics = Metrics()
    for upstream in ("h:1", "h:2"):
        for model in ("m", "n"):
            metrics.upstream_errors.labels(model, upstream, "silent").inc()
            metrics.upstream_errors.labels(model, upstream, "internal").inc()
        metrics.model_loaded("m", upstream, 2.5, failed=False)
        metrics.model_loaded("m", upstream, 1.0, failed=True)
        metrics.model_unloads.labels("m", upstream, "idle").inc()
    assert metrics.registry.get_sample_value("tritongate_model_load_seconds_sum", {"model": "m"}) == 5
    assert metrics.render().decode().count('upstream="h:1"') == 7
    metrics.upstream_forgotten("h:1")
    text = metrics.render().decode()
    assert 'upstream="h:1"' not in text
    assert text.count('upstream="h:2"') == 7


def test_apps_share_nothing() -> None:
    one, other = Metrics(), Metrics()
    one.client_cancels.labels("m").inc()
    assert 'client_cancels_total{model="m"}' not in other.render().decode()


def value(text: str, name: str, **labels: str) -> float | None:
    """What an exposition says of a series; None: nothing."""
    families = text_string_to_metric_families(text)
    samples = (sample for family in families for sample in family.samples)
    return next((each.value for each in samples if each.name == name and each.labels == labels), None)


def test_failures_that_may_come_are_there_before_they_do() -> None:
    """`increase` over a series that begins with the 50 answers that a Triton took along says 0."""
    metrics = Metrics()
    metrics.upstreams.codes = ("unreachable", "silent")
    metrics.upstreams.look = lambda: [UpstreamState(model="m", upstream="h:1", healthy=True)]
    errors = {"model": "m", "upstream": "h:1", "code": "unreachable"}
    rejected = {"model": "m", "reason": "queue_full"}
    for name, labels in (
        ("tritongate_upstream_errors_total", errors),
        ("tritongate_requests_rejected_total", rejected),
        ("tritongate_resumed_total", {"model": "m"}),
        ("tritongate_client_cancels_total", {"model": "m"}),
    ):
        assert value(metrics.render().decode(), name, **labels) == 0, name
    metrics.upstream_errors.labels("m", "h:1", "unreachable").inc(50)
    assert value(metrics.render().decode(), "tritongate_upstream_errors_total", **errors) == 50
    metrics.upstreams.look = tuple
    metrics.upstream_forgotten("h:1")
    assert 'upstream="h:1"' not in metrics.render().decode()


def test_a_model_that_was_asked_has_failed_never_rather_than_not_yet() -> None:
    metrics = Metrics()
    metrics.answered("/v1/chat/completions", "m", 200, 0.5)
    metrics.answered("/v1/chat/completions", "unknown", 404, 0.5)
    text = metrics.render().decode()
    for status, count in (("200", 1), ("500", 0), ("502", 0), ("503", 0), ("504", 0), ("429", None)):
        labels = {"route": "/v1/chat/completions", "model": "m", "status": status}
        assert value(text, "tritongate_requests_total", **labels) == count
    assert text.count('tritongate_requests_total{model="unknown"') == 1


def test_a_refused_file_is_an_increase() -> None:
    metrics = Metrics()
    assert value(metrics.render().decode(), "tritongate_keys_file_reloads_total", outcome="refused") == 0
    metrics.file_read(metrics.keys_file_reloads, "refused")
    text = metrics.render().decode()
    assert value(text, "tritongate_keys_file_reloads_total", outcome="refused") == 1
    assert value(text, "tritongate_models_file_reloads_total", outcome="refused") == 0


def test_a_gateway_knows_the_faults_that_its_tritons_may_have() -> None:
    codes = create_app(load_settings()).state.gateway.metrics.upstreams.codes
    assert {"unreachable", "silent", "stub_dead"} <= {*codes}
    assert "invalid_request" not in codes  # the client's, which is not counted
