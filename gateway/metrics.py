"""The gateway's Prometheus metrics. Their names are part of the public contract.

Every app has its own registry. `model` is a served model or `unknown`, `route` is a template or `unknown`,
`key` is a name from the configuration: clients cannot create label values. Knows nothing of
where the numbers come from.
"""

from dataclasses import dataclass

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from gateway.histogram import BulkHistogram, BulkSeries

UNKNOWN = "unknown"
CONTENT_TYPE = CONTENT_TYPE_LATEST

_PREFIX = "tritongate_"
_DURATIONS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 20, 40, 80)
_INTER_TOKEN = (
    0.001,
    0.0025,
    0.004,
    0.005,
    0.006,
    0.008,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
)
_OVERHEAD = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


@dataclass(frozen=True, slots=True)
class TokenMetrics:
    """The metrics of one model's tokens."""

    generated: Counter
    time_to_first: Histogram
    inter_token: BulkSeries


class Metrics:
    """The gateway's metrics in a registry of their own."""

    def __init__(self) -> None:
        # The library would export a second series, `_created`, beside each counter; its switch is global.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            _PREFIX + "requests",
            "Answered HTTP requests by the status they deserved: an error inside a stream counts as its own "
            "status, a client that hung up as 499.",
            ["route", "model", "status"],
            registry=registry,
        )
        self.request_duration = Histogram(
            _PREFIX + "request_duration_seconds",
            "From a request's head to the end of its answer.",
            ["route", "model"],
            buckets=_DURATIONS,
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            _PREFIX + "time_to_first_token_seconds",
            "From a request's head to the first generated token's arrival from Triton.",
            ["model"],
            buckets=_FIRST_TOKEN,
            registry=registry,
        )
        self.inter_token_latency = BulkHistogram(
            _PREFIX + "inter_token_latency_seconds",
            "Between generated tokens: n tokens that arrive together after a gap g are n times g/n; those "
            "that arrive with the first one are 0.",
            label="model",
            buckets=_INTER_TOKEN,
            registry=registry,
        )
        self.overhead = Histogram(
            _PREFIX + "overhead_seconds",
            "A generation's duration without what was spent waiting for its body, for admission and for "
            "Triton: validation, encoding, and writing to the client.",
            ["model"],
            buckets=_OVERHEAD,
            registry=registry,
        )
        self.in_flight = Gauge(
            _PREFIX + "requests_in_flight",
            "Places that generations at work hold, of `max_in_flight`: each choice of each prompt has one.",
            ["model"],
            registry=registry,
        )
        self.waiting = Gauge(
            _PREFIX + "requests_waiting", "Generations waiting for admission.", ["model"], registry=registry
        )
        self.rejected = Counter(
            _PREFIX + "requests_rejected",
            "Requests turned away before any work: queue_full, key_limit, deadline (passed in the queue) or "
            "draining.",
            ["model", "reason"],
            registry=registry,
        )
        self.client_cancels = Counter(
            _PREFIX + "client_cancels",
            "Generations whose client hung up before the end.",
            ["model"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            _PREFIX + "prompt_tokens", "Prompt tokens of accepted generations.", ["model"], registry=registry
        )
        self.generated_tokens = Counter(
            _PREFIX + "generated_tokens", "Tokens received from Triton.", ["model"], registry=registry
        )
        self.key_requests = Counter(
            _PREFIX + "key_requests",
            "Answered requests that came with a key, by its owner's name and the status they deserved.",
            ["key", "model", "status"],
            registry=registry,
        )
        self.key_tokens = Counter(
            _PREFIX + "key_tokens",
            "Tokens of ended requests that came with a key: of kind prompt or generated.",
            ["key", "model", "kind"],
            registry=registry,
        )
        self.upstream_errors = Counter(
            _PREFIX + "upstream_errors",
            "Generations that failed on a Triton, by kind of fault, also if another Triton then served them.",
            ["model", "upstream", "code"],
            registry=registry,
        )
        self.upstream_healthy = Gauge(
            _PREFIX + "upstream_healthy",
            "1 when the model on that Triton takes requests.",
            ["model", "upstream"],
            registry=registry,
        )
        self.upstream_lookups = Counter(
            _PREFIX + "upstream_lookups",
            "Looks at the addresses of an upstream given as a name, by outcome: found, none, or failed.",
            ["upstream", "outcome"],
            registry=registry,
        )

    def tokens_of(self, model: str) -> TokenMetrics:
        """Look up the metrics of `model`'s tokens, for a whole answer."""
        return TokenMetrics(
            self.generated_tokens.labels(model),
            self.time_to_first_token.labels(model),
            self.inter_token_latency.labels(model),
        )

    def key_used(self, key: str, model: str, status: int, *, prompt: int, generated: int) -> None:
        """Count a request that came with the key of the owner `key`, and its tokens."""
        self.key_requests.labels(key, model, str(status)).inc()
        if prompt or generated:
            self.key_tokens.labels(key, model, "prompt").inc(prompt)
            self.key_tokens.labels(key, model, "generated").inc(generated)

    def upstream_error(self, model: str, upstream: str, code: str) -> None:
        """Count a generation that failed on `upstream`."""
        self.upstream_errors.labels(model, upstream, code).inc()

    def upstream_health(self, model: str, upstream: str, *, healthy: bool) -> None:
        """Note whether `model` on `upstream` takes requests."""
        self.upstream_healthy.labels(model, upstream).set(healthy)

    def upstream_lookup(self, upstream: str, outcome: str) -> None:
        """Count a lookup of the name `upstream`."""
        for each in ("found", "none", "failed"):
            # Create all series at the first lookup: an alert cannot compare with a series that is missing.
            self.upstream_lookups.labels(upstream, each).inc(each == outcome)

    def upstream_left(self, upstream: str) -> None:
        """Remove the health of `upstream`."""
        _remove(self.upstream_healthy, upstream)

    def upstream_forgotten(self, upstream: str) -> None:
        """Remove all series of `upstream`: in a cluster every start of a Triton has another address."""
        _remove(self.upstream_errors, upstream)

    def render(self) -> bytes:
        """Return the exposition in the text format that `CONTENT_TYPE` names."""
        return generate_latest(self.registry)


def _remove(metric: Counter | Gauge, upstream: str) -> None:
    """Remove the series of `upstream` from one metric."""
    (family,) = metric.collect()
    series = [sample.labels for sample in family.samples if sample.labels["upstream"] == upstream]
    for labels in series:
        metric.remove(*labels.values())
