"""The gateway's metrics under the names of vLLM's, which autoscalers and dashboards for vLLM read.

Nothing is counted here: the families are made of ours when somebody asks. Sources: vLLM's metrics, and the
model server protocol of Kubernetes' Gateway API inference extension. The gauges are one number for all
processes of a gateway; counters and histograms keep the label `worker`, as ours do and for the same reason.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric

Labels = dict[str, str]
Relabel = Callable[[Labels], Labels | None]
"""Returns the labels of a series under its other name; None: it has none."""

_PREFIX: Final = "tritongate_"
_GENERATING: Final = frozenset(
    {"completions", "responses", "messages", "infer", "Predict", "ModelInfer", "ModelStreamInfer"}
)
"""How the routes end that generate text."""
_REASONS: Final = {"tool_calls": "stop"}
"""Reasons that vLLM's engine calls otherwise."""


def _of_model(labels: Labels) -> Labels | None:
    """Name the model as vLLM does; what was asked of no model is left out."""
    if labels["model"] == "unknown":
        return None
    return {"model_name" if name == "model" else name: value for name, value in labels.items()}


def _of_generations(labels: Labels) -> Labels | None:
    route = labels["route"].rpartition("/")[2]
    kept = {name: value for name, value in labels.items() if name != "route"}
    return _of_model(kept) if route in _GENERATING else None


def _of_reasons(labels: Labels) -> Labels | None:
    reason = labels["finish_reason"]
    kept = {name: value for name, value in labels.items() if name != "finish_reason"}
    return _of_model(kept | {"finished_reason": _REASONS.get(reason, reason)})


_NAMES: Final[tuple[tuple[str, str, Relabel], ...]] = (
    ("time_to_first_token_seconds", "time_to_first_token_seconds", _of_model),
    ("inter_token_latency_seconds", "inter_token_latency_seconds", _of_model),
    ("inter_token_latency_seconds", "time_per_output_token_seconds", _of_model),  # its older name
    ("request_duration_seconds", "e2e_request_latency_seconds", _of_generations),
    ("prompt_tokens", "prompt_tokens", _of_model),
    ("generated_tokens", "generation_tokens", _of_model),
    ("choices", "request_success", _of_reasons),
)
"""Our names, vLLM's, and how the labels change."""


def vllm_families(families: Iterable[Metric]) -> Iterator[Metric]:
    """Yield what vLLM would report, of our `families`."""
    ours = {family.name.removeprefix(_PREFIX): family for family in families}
    for name, theirs, relabel in _NAMES:
        if name in ours:
            yield _renamed(ours[name], "vllm:" + theirs, relabel)
    yield from _gauges(ours)


def _renamed(family: Metric, name: str, relabel: Relabel) -> Metric:
    """Return `family` under another name; series that get the same labels are added up."""
    renamed = Metric(name, family.documentation, family.type)
    sums: defaultdict[tuple[str, frozenset[tuple[str, str]]], float] = defaultdict(float)
    for sample in family.samples:
        labels = relabel(sample.labels)
        if labels is not None:
            sums[name + sample.name.removeprefix(family.name), frozenset(labels.items())] += sample.value
    for (sample_name, labels_of), value in sums.items():
        renamed.add_sample(sample_name, dict(labels_of), value)
    return renamed


def _gauges(ours: Mapping[str, Metric]) -> Iterator[Metric]:
    """Yield what there is now, of each model that is known to any process."""

    def total(name: str) -> dict[str, float]:
        found: defaultdict[str, float] = defaultdict(float)
        for sample in ours[name].samples if name in ours else ():
            found[sample.labels["model"]] += sample.value
        return found

    def engines(name: str) -> dict[str, list[float]]:
        """Return the values of a model's engines, each once, although every process reports it."""
        seen: dict[tuple[str, str], float] = {}
        for sample in ours[name].samples if name in ours else ():
            key = sample.labels["model"], sample.labels["upstream"]
            seen[key] = max(sample.value, seen.get(key, 0.0))
        found: defaultdict[str, list[float]] = defaultdict(list)
        for (model, _), value in seen.items():
            found[model].append(value)
        return found

    here, places = total("requests_waiting"), total("requests_in_flight")
    there, kv_usage = engines("upstream_requests_waiting"), engines("upstream_kv_usage_ratio")
    models = {*here, *places, *there, *engines("upstream_healthy")} - {"unknown"}
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting",
        "Generations waiting for admission to the gateway, for their model to be loaded or, where an engine "
        "tells, on its waiting list.",
        labels=["model_name"],
    )
    running = GaugeMetricFamily(
        "vllm:num_requests_running", "Generations at work that do not wait.", labels=["model_name"]
    )
    usage = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc",
        "Share of the KV blocks in use, 0 to 1: the mean of the engines that tell.",
        labels=["model_name"],
    )
    for model in sorted(models):
        queued = sum(there.get(model, ()))
        waiting.add_metric([model], here.get(model, 0.0) + queued)
        running.add_metric([model], max(places.get(model, 0.0) - queued, 0.0))
        if shares := kv_usage.get(model):
            usage.add_metric([model], sum(shares) / len(shares))
    yield from (waiting, running, usage)
