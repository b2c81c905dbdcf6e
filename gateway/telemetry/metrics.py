"""The gateway's Prometheus metrics, of several processes too. Their names are part of the public contract.

Every app has its own registry. `model` is a served model or `unknown`, `route` is a template or `unknown`,
`key` is a name from the configuration: clients cannot create label values. Where several processes serve,
each reports those of all, and the series of each have a label `worker`, its number: a sum over the processes
would fall when one of them is replaced, and Prometheus would take that for a reset and count the others'
values again. Knows nothing of where the numbers come from.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
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
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.telemetry.bulk import BulkCounter, BulkHistogram, BulkSeries, Count
from gateway.telemetry.vllm_names import vllm_families

UNKNOWN = "unknown"
CONTENT_TYPE = CONTENT_TYPE_LATEST

_ANSWER_WITHIN_S = 2.0
_PIECE = 2**16
_LABEL = "worker"
_PREFIX = "tritongate_"
_DURATIONS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 20, 40, 80)
_INTER_TOKEN_MS = (1, 2.5, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100, 250, 500, 1000, 2500)
_FAILURES = ("500", "502", "503", "504")
_REASONS = ("queue_full", "key_limit", "deadline")
"""Why a request for a model that is served is turned away."""
_OVERHEAD = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


@dataclass(frozen=True, slots=True)
class TokenMetrics:
    """The metrics of one model's tokens."""

    generated: Count
    time_to_first: Histogram
    inter_token: BulkSeries


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamState:
    """One model on one Triton as it is now; `waiting` and `kv_usage` by its latest probe, None: unknown."""

    model: str
    upstream: str
    healthy: bool
    waiting: int | None = None
    kv_usage: float | None = None


class UpstreamStates(Collector):
    """Reports what `look` tells when somebody asks: nothing is left of a Triton that has gone."""

    LABELS = ("model", "upstream")

    def __init__(self, registry: CollectorRegistry) -> None:
        self.look: Callable[[], Iterable[UpstreamState]] = tuple
        self.codes: Sequence[str] = ()
        """Of all faults that a Triton may have."""
        registry.register(self)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return a series for each model on each Triton, of what is known of it."""
        families = [
            GaugeMetricFamily(_PREFIX + "upstream_" + name, text, labels=self.LABELS)
            for name, text in (
                ("healthy", "1 when the model on that Triton takes requests, or is loaded by the next one."),
                (
                    "requests_waiting",
                    "Requests on the engine's waiting list, those of other gateways among them.",
                ),
                ("kv_usage_ratio", "Share of the engine's KV blocks in use."),
            )
        ]
        for state in self.look():
            values = (state.healthy, state.waiting, state.kv_usage)
            for family, value in zip(families, values, strict=True):
                if value is not None:
                    family.add_metric((state.model, state.upstream), float(value))
        return families


class Metrics:
    """The gateway's metrics in a registry of their own.

    Args:
        vllm_names: report them under vLLM's names too.
    """

    def __init__(self, *, vllm_names: bool = False) -> None:
        self._vllm_names = vllm_names
        # The library would export a second series, `_created`, beside each counter; its switch is global.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(_PREFIX + name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(_PREFIX + name, text, labels, buckets=buckets, registry=registry)

        self.requests = counter(
            "requests",
            "Answered HTTP requests by the status they deserved: an error inside a stream counts as its own "
            "status, a client that hung up as 499.",
            "route",
            "model",
            "status",
        )
        self.request_duration = histogram(
            "request_duration_seconds",
            "From a request's head to the end of its answer.",
            _DURATIONS,
            "route",
            "model",
        )
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds",
            "From a request's head to the first generated token's arrival from Triton; only where that is "
            "told before the answer's end.",
            _FIRST_TOKEN,
            "model",
        )
        self.inter_token_latency = BulkHistogram(
            _PREFIX + "inter_token_latency_seconds",
            "Between generated tokens: n tokens that are told of together after a gap g are n times g/n; "
            "those told of with the first one are 0.",
            label="model",
            buckets=[bound / 1000 for bound in _INTER_TOKEN_MS],
            registry=registry,
        )
        self.overhead = histogram(
            "overhead_seconds",
            "A generation's duration without what was spent waiting for its body, for admission and for "
            "Triton: validation, encoding, and writing to the client.",
            _OVERHEAD,
            "model",
        )
        self.in_flight = gauge(
            "requests_in_flight",
            "Places that generations at work hold, of `max_in_flight`: each choice of each prompt has one.",
            "model",
        )
        self.waiting = gauge("requests_waiting", "Generations waiting for admission or a Triton.", "model")
        self.rejected = counter(
            "requests_rejected",
            "Requests turned away before any work: queue_full, key_limit, deadline (passed in the queue), "
            "connections (too many) or draining.",
            "model",
            "reason",
        )
        self.client_cancels = counter(
            "client_cancels", "Generations whose client hung up before the end.", "model"
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted generations.", "model")
        self.generated_tokens = BulkCounter(
            _PREFIX + "generated_tokens", "Tokens received from Triton.", label="model", registry=registry
        )
        self.choices = counter("choices", "Complete answers, by why they ended.", "model", "finish_reason")
        self.key_requests = counter(
            "key_requests",
            "Answered requests that came with a key, by its owner's name and the status they deserved.",
            "key",
            "model",
            "status",
        )
        self.key_tokens = counter(
            "key_tokens",
            "Tokens of ended requests that came with a key: of kind prompt or generated.",
            "key",
            "model",
            "kind",
        )
        self.upstream_errors = counter(
            "upstream_errors",
            "Generations that failed on a Triton, by kind of fault, also if another Triton then served them.",
            "model",
            "upstream",
            "code",
        )
        self.resumes = counter("resumed", "Answers that went on at another or a restarted Triton.", "model")
        self.upstreams = UpstreamStates(registry)
        self.models = gauge(
            "models", "Models that are known, ready or not; 0: none was found, so every request is refused."
        )
        self.upstream_lookups = counter(
            "upstream_lookups",
            "Looks at the addresses of an upstream given as a name, by outcome: found, none, or failed.",
            "upstream",
            "outcome",
        )
        self.model_loads = counter(
            "model_loads",
            "Loads of a model by this gateway, by outcome: loaded or failed.",
            "model",
            "upstream",
            "outcome",
        )
        self.model_load_duration = histogram(
            "model_load_seconds", "Duration of loads that succeeded.", _DURATIONS, "model"
        )
        self.model_unloads = counter(
            "model_unloads",
            "Unloads of a model by this gateway, by reason: admin, idle, or room for another model.",
            "model",
            "upstream",
            "reason",
        )
        self.models_file_reloads = counter(
            "models_file_reloads",
            "Changes of the models file while it was followed, by outcome: applied, or refused as a whole.",
            "outcome",
        )
        self.keys_file_reloads = counter(
            "keys_file_reloads", "The same of the keys file, by outcome: applied, or refused.", "outcome"
        )
        for reloads in (self.models_file_reloads, self.keys_file_reloads):
            for outcome in ("applied", "refused"):
                reloads.labels(outcome)
        self.certificate_not_after = gauge(
            "tls_certificate_not_after_timestamp_seconds",
            "Until when the certificate for TLS with clients is valid; absent without TLS.",
            "path",
        )

    def answered(self, route: str, model: str, status: int, seconds: float) -> None:
        """Count an answered request by the status that it deserved."""
        # All failures at once: Prometheus sees no increase in a series that begins with its first failures.
        for each in _FAILURES if model != UNKNOWN else ():
            self.requests.labels(route, model, each)
        self.requests.labels(route, model, str(status)).inc()
        self.request_duration.labels(route, model).observe(seconds)

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

    def upstream_lookup(self, upstream: str, outcome: str) -> None:
        """Count a lookup of the name `upstream`."""
        for each in ("found", "none", "failed"):
            # Create all series at the first lookup: an alert cannot compare with a series that is missing.
            self.upstream_lookups.labels(upstream, each).inc(each == outcome)

    def model_loaded(self, model: str, upstream: str, seconds: float, *, failed: bool) -> None:
        """Count a load."""
        self.model_loads.labels(model, upstream, "failed" if failed else "loaded").inc()
        if not failed:
            self.model_load_duration.labels(model).observe(seconds)

    def file_read(self, reloads: Counter, outcome: str) -> None:
        """Count a change of a file: `applied` or `refused`."""
        reloads.labels(outcome).inc()

    def upstream_forgotten(self, upstream: str) -> None:
        """Remove all series of `upstream`: in a cluster every start of a Triton has another address."""
        for metric in (self.upstream_errors, self.model_loads, self.model_unloads):
            (family,) = metric.collect()
            for labels in [each.labels for each in family.samples if each.labels["upstream"] == upstream]:
                metric.remove(*labels.values())

    def families(self) -> list[Metric]:
        """Return what this process has counted, also that there was none yet of a failure that may come."""
        for state in self.upstreams.look():
            for code in self.upstreams.codes:
                self.upstream_errors.labels(state.model, state.upstream, code)
            for reason in _REASONS:
                self.rejected.labels(state.model, reason)
            self.resumes.labels(state.model)
            self.client_cancels.labels(state.model)
        return list(self.registry.collect())

    def render(self) -> bytes:
        """Return the exposition in the text format that `CONTENT_TYPE` names."""
        return self.exposition(self.families())

    def exposition(self, families: Sequence[Metric]) -> bytes:
        """Return the exposition of `families`, which are this process's or those of all."""
        registry = CollectorRegistry()
        registry.register(_Listed([*families, *(vllm_families(families) if self._vllm_names else ())]))
        return generate_latest(registry)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A process's place among those of its gateway."""

    number: int
    """From 0."""
    count: int
    """Number of processes."""
    table: int
    """The descriptor of the memory that they share (see `gateway.limits.counters`)."""
    applied: dict[str, int]
    """Descriptors of what they applied last, by names of settings (see `gateway.settings.follow`)."""
    asks: list[int]
    """For each process, the descriptor of the socket that takes questions to it."""
    asked: int
    """Of the socket from which this process reads questions."""


class _Family(msgspec.Struct, frozen=True):
    """One metric of one process."""

    name: str
    help: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


_decode = msgspec.msgpack.Decoder(list[_Family]).decode


class WorkerMetrics:
    """Answers the other processes' requests for metrics, and requests theirs.

    Args:
        place: this process's place.
        metrics: this process's metrics.
        lives: tells whether the process with a number is there; one that is not is not asked.
    """

    def __init__(self, place: Place, metrics: Metrics, lives: Callable[[int], bool]) -> None:
        self._place = place
        self._metrics = metrics
        self._lives = lives
        self._asked: socket.socket
        self._answering: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start answering, also those who have asked since the process that this one replaces died."""
        self._asked = _line(self._place.asked)
        asyncio.get_running_loop().add_reader(self._asked, self._hear)

    async def close(self) -> None:
        """Stop answering."""
        asyncio.get_running_loop().remove_reader(self._asked)
        self._asked.close()
        await asyncio.gather(*self._answering)

    async def render(self) -> bytes:
        """Return the exposition of all processes; one that does not answer is reported as down."""
        answers = await asyncio.gather(*map(self._ask, range(self._place.count)))
        return self._metrics.exposition(_joined(answers))

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for descriptor in socket.recv_fds(self._asked, 1, 1)[1]:
                task = asyncio.create_task(self._answer(descriptor))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    async def _answer(self, descriptor: int) -> None:
        # Whoever does not read must not keep this process from ending.
        with socket.socket(fileno=descriptor) as asker, contextlib.suppress(TimeoutError, ConnectionError):
            asker.settimeout(0)
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                answer = msgspec.msgpack.encode(_encodable(self._metrics.families()))
                await asyncio.get_running_loop().sock_sendall(asker, answer)

    async def _ask(self, number: int) -> list[_Family] | None:
        if number == self._place.number:
            return _encodable(self._metrics.families())
        if not self._lives(number):
            return None
        with contextlib.suppress(msgspec.MsgspecError):
            answer = await _read(self._place, number)
            return None if answer is None else _decode(answer)
        return None


async def answers(place: Place) -> bool:
    """Tell whether the process in that place is there and able to answer."""
    return bool(await _read(place, place.number))


async def _read(place: Place, number: int) -> bytes | None:
    """Return what the process with that number says; None: it ended, hangs, or has not started yet."""
    mine, other = socket.socketpair()
    answer = b""
    try:
        with mine:
            with other, _line(place.asks[number]) as line:
                socket.send_fds(line, [b"?"], [other.fileno()])
            mine.settimeout(0)
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                while piece := await asyncio.get_running_loop().sock_recv(mine, _PIECE):
                    answer += piece
    except (TimeoutError, OSError):
        return None
    return answer


def _line(descriptor: int) -> socket.socket:
    line = socket.fromfd(descriptor, socket.AF_UNIX, socket.SOCK_DGRAM)
    line.settimeout(0)
    return line


class _Listed(Collector):
    """Families as they are."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _joined(answers: Sequence[list[_Family] | None]) -> list[Metric]:
    """Return the families of several processes, grouped by name as the text format requires."""
    up = GaugeMetricFamily(
        "tritongate_worker_up", "1 when that process of the gateway answers.", labels=[_LABEL]
    )
    joined: dict[str, Metric] = {}
    for number, families in enumerate(answers):
        worker = {_LABEL: str(number)}
        up.add_metric([str(number)], families is not None)
        for family in families or ():
            metric = joined.setdefault(family.name, Metric(family.name, family.help, family.type))
            for name, labels, value in family.samples:
                metric.add_sample(name, worker | labels, value)
    return [up, *joined.values()]


def _encodable(families: Iterable[Metric]) -> list[_Family]:
    return [
        _Family(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, sample.labels, sample.value) for sample in metric.samples],
        )
        for metric in families
    ]
