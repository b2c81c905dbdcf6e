"""The engine's metrics in Triton's own `/metrics`.

Only one thread may use Triton's custom metrics (two crash the whole server), and each call takes some 15
microseconds. So other threads only record what happened, and one thread writes it to Triton every quarter of
a second. Nothing is recorded per token, only per step and per request.
"""

import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from triton_models.engine.sequence import FinishReason
from triton_models.serving.worker import Worker

if TYPE_CHECKING:
    from triton_models.engine.engine import StepStats
    from triton_models.serving.service import Service

PREFIX = "tritongate_engine_"
FLUSH_INTERVAL_S = 0.25

_OBSERVATIONS_LIMIT = 100_000

_COUNTERS = {
    "prompt_tokens_total": "Prompt tokens of accepted requests",
    "generated_tokens_total": "Tokens sampled",
    "prefix_hit_tokens_total": "Prompt tokens found in the prefix cache",
    "draft_tokens_total": "Guesses at next tokens",
    "accepted_draft_tokens_total": "Guesses that became part of an answer",
    "preemptions_total": "Sequences that gave up their KV blocks and are computed again",
    "failed_steps_total": "Engine steps that failed, and the requests in them with it",
}
_GAUGES = {
    "requests_running": "Sequences holding KV blocks",
    "requests_waiting": "Requests in the waiting list",
    "kv_blocks_used": "KV blocks in use",
    "kv_blocks": "KV blocks in all",
    "heartbeat_timestamp_seconds": "Unix time when tokens could last leave; frozen: dead or stuck",
}

_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_STEP_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 4)
_WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "batch_size": ("Sequences per engine step", _BATCH_BUCKETS),
    "step_seconds": ("Seconds per engine step", _STEP_BUCKETS),
    "queue_seconds": ("Seconds from receipt to the first step", _WAIT_BUCKETS),
    "time_to_first_token_seconds": ("Seconds from receipt to the first token", _WAIT_BUCKETS),
}


class EngineMetrics:
    """Records events on any thread, and writes them to Triton on a thread of its own.

    Args:
        model: label of every metric, like `version`.
        version: of the entry.
        pb_utils: `triton_python_backend_utils`.
    """

    def __init__(self, model: str, version: int, pb_utils: Any) -> None:
        # Triton adds no labels; without the version, two versions would write to the same gauges.
        self._labels = {"model": model, "version": str(version)}
        self._pb_utils = pb_utils
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        """What the engine itself counts, as it was last written."""
        # Bounded: if Triton takes them too slowly, the oldest are dropped instead of filling the memory.
        self._observations: deque[tuple[str, float]] = deque(maxlen=_OBSERVATIONS_LIMIT)
        self._families: list[Any] = []
        """Kept, because Triton drops a family that nothing refers to."""
        self._metrics: dict[str, Any] = {}
        """Triton's objects by name, made and used by the writing thread alone."""
        self._worker = Worker[None](
            "engine-metrics",
            lambda _: self._write(last=True),
            idle=lambda: self._write(last=False),
            idle_s=FLUSH_INTERVAL_S,
        )

    def start(self, source: "Service") -> None:
        """Start the writing thread; the gauges show the state of `source`."""
        self._source = source
        self._worker.start()

    def stop(self) -> None:
        """Write what is left, set the gauges to zero (Triton keeps values across a reload) and join."""
        self._worker.put(None)
        self._worker.stop()

    def step(self, stats: "StepStats") -> None:
        """Note one engine step."""
        self._observations.append(("batch_size", stats.batch_size))
        self._observations.append(("step_seconds", stats.seconds))
        if stats.guessed_tokens:
            self._add("draft_tokens_total", stats.guessed_tokens)
            self._add("accepted_draft_tokens_total", stats.right_guesses)

    def first_token(self, queue_seconds: float, seconds: float) -> None:
        """Note a request's first token: seconds it waited, seconds from receipt to the token."""
        self._observations.append(("queue_seconds", queue_seconds))
        self._observations.append(("time_to_first_token_seconds", seconds))

    def accepted(self, prompt_tokens: int) -> None:
        """Note a request that was validated and queued."""
        self._add("prompt_tokens_total", prompt_tokens)

    def finished(self, reason: FinishReason, generated_tokens: int, cached_tokens: int) -> None:
        """Note the end of an accepted request."""
        self._add("generated_tokens_total", generated_tokens)
        self._add("prefix_hit_tokens_total", cached_tokens)
        self._add(f"requests_total:{reason}", 1)

    def _add(self, name: str, amount: int) -> None:
        with self._lock:
            self._counts[name] += amount

    def _write(self, *, last: bool) -> None:
        if not self._metrics:
            self._make()
        stats = self._source.stats()
        with self._lock:
            counts, self._counts = self._counts, Counter()
        totals = Counter(preemptions_total=stats.preemptions, failed_steps_total=stats.failed_steps)
        counts += totals - self._totals
        self._totals = totals
        for name, amount in counts.items():
            self._metrics[name].increment(amount)
        while self._observations:
            name, value = self._observations.popleft()
            self._metrics[name].observe(value)
        gauges = {name: getattr(stats, name.removeprefix("requests_"), 0) for name in _GAUGES}
        gauges["heartbeat_timestamp_seconds"] = time.time() - (time.monotonic() - self._source.heartbeat)
        for name, value in gauges.items():
            self._metrics[name].set(0 if last else value)

    def _make(self) -> None:
        kinds = self._pb_utils.MetricFamily
        for name, text in _COUNTERS.items():
            self._metrics[name] = self._family(name, text, kinds.COUNTER).Metric(labels=self._labels)
        requests = self._family("requests_total", "Requests ended, by reason", kinds.COUNTER)
        for reason in FinishReason:
            labels = self._labels | {"finish_reason": reason}
            self._metrics[f"requests_total:{reason}"] = requests.Metric(labels=labels)
        for name, text in _GAUGES.items():
            self._metrics[name] = self._family(name, text, kinds.GAUGE).Metric(labels=self._labels)
        for name, (text, buckets) in _HISTOGRAMS.items():
            family = self._family(name, text, kinds.HISTOGRAM)
            self._metrics[name] = family.Metric(
                labels=self._labels, buckets=[float(each) for each in buckets]
            )

    def _family(self, name: str, description: str, kind: Any) -> Any:
        family = self._pb_utils.MetricFamily(name=PREFIX + name, description=description, kind=kind)
        self._families.append(family)
        return family
