"""vLLM's own counters and gauges, copied from its process into Triton's metrics.

They keep vLLM's names. Histograms stay behind: Triton's can be observed, but not set. A call of Triton's
metrics takes some 15 microseconds, and calls from several threads crash tritonserver 2.51: so there is one
thread, which copies what changed.
"""

import logging
import threading
from collections.abc import Iterable
from typing import Any, Final

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric

log = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
_PREFIX: Final = "vllm:"
_OWN: Final = ("model_name", "engine")
"""Labels that give way to the entry's own, `model` and `version`."""

_Key = tuple[str, tuple[tuple[str, str], ...]]


class Metrics:
    """Copies metrics until it is stopped.

    Args:
        families: Triton's MetricFamily.
        model: the entry's name, a label of each.
        version: its version, another one.
        registry: where vLLM's metrics are.
    """

    def __init__(self, families: Any, *, model: str, version: str, registry: Any = REGISTRY) -> None:
        self._families = families
        self._labels = {"model": model, "version": version}
        self._registry = registry
        self._known: dict[str, Any] = {}
        """Triton drops the metrics of a family that nothing refers to."""
        self._metrics: dict[_Key, Any] = {}
        self._values: dict[_Key, float] = {}
        self._gauges: set[_Key] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Set gauges to zero, since Triton keeps them, and join the thread."""
        self._stopped.set()
        self._thread.join()

    def copy(self, found: Iterable[Metric]) -> None:
        """Copy what changed since the last time."""
        for family in found:
            if family.type not in ("counter", "gauge") or not family.name.startswith(_PREFIX):
                continue
            sums: dict[_Key, float] = {}
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    labels = {name: text for name, text in sample.labels.items() if name not in _OWN}
                    key = sample.name, tuple(sorted((labels | self._labels).items()))
                    sums[key] = sums.get(key, 0.0) + sample.value
            for key, value in sums.items():
                self._set(key, value, family)

    def _set(self, key: _Key, value: float, family: Metric) -> None:
        before = self._values.get(key)
        if value == before:
            return
        counts = family.type == "counter"
        if key not in self._metrics:
            name, labels = key
            if name not in self._known:
                kind = self._families.COUNTER if counts else self._families.GAUGE
                self._known[name] = self._families(name=name, description=family.documentation, kind=kind)
            self._metrics[key] = self._known[name].Metric(labels=dict(labels))
        if counts:
            self._metrics[key].increment(max(0.0, value - (before or 0.0)))
        else:
            self._gauges.add(key)
            self._metrics[key].set(value)
        self._values[key] = value

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            try:
                self.copy(self._registry.collect())
            except Exception:
                # A server without metrics refuses them: serving goes on.
                log.exception("vLLM's metrics cannot be copied")
                break
        for key in self._gauges:
            self._metrics[key].set(0.0)
