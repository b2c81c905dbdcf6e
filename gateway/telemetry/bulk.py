"""Metrics that are counted for every token: in plain numbers of the one thread that serves, without locks."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class BulkSeries:
    """The observations of one label value.

    Args:
        bounds: of the buckets, ascending, without infinity.
    """

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Of each bucket by itself."""
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value` `count` times."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count


class BulkHistogram(Collector):
    """A histogram with one label, registered with `registry`. Belongs to one thread.

    `prometheus_client.Histogram` takes one observation per call. A delta of n tokens is n observations, and
    an answer that comes whole is thousands: that must be a single call.

    Args:
        name: full metric name.
        help_text: shown beside it.
        label: the label's name.
        buckets: upper bounds, ascending, without infinity.
        registry: where it is exported.
    """

    def __init__(
        self, name: str, help_text: str, *, label: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._help = help_text
        self._label = label
        self._bounds = tuple(buckets)
        self._series: dict[str, BulkSeries] = {}
        registry.register(self)

    def labels(self, label_value: str) -> BulkSeries:
        """Return the series of `label_value`."""
        series = self._series.get(label_value)
        if series is None:
            series = self._series[label_value] = BulkSeries(self._bounds)
        return series

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Return the cumulative buckets and the sum of every label value."""
        family = HistogramMetricFamily(self._name, self._help, labels=[self._label])
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for value, series in self._series.items():
            buckets = list(zip(bounds, accumulate(series.counts), strict=True))
            family.add_metric([value], buckets=buckets, sum_value=series.sum)
        yield family


class Count:
    """How much was counted for one label value; whoever counts adds to it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class BulkCounter(Collector):
    """A counter with one label, registered with `registry`. Belongs to one thread.

    `prometheus_client.Counter` takes a lock for each addition, a twentieth of what a token costs.

    Args:
        name: full metric name, without `_total`.
        help_text: shown beside it.
        label: the label's name.
        registry: where it is exported.
    """

    def __init__(self, name: str, help_text: str, *, label: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._help = help_text
        self._label = label
        self._counts: defaultdict[str, Count] = defaultdict(Count)
        registry.register(self)

    def labels(self, label_value: str) -> Count:
        """Return the count of `label_value`."""
        return self._counts[label_value]

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Return the count of every label value."""
        family = CounterMetricFamily(self._name, self._help, labels=[self._label])
        for label_value, count in self._counts.items():
            family.add_metric([label_value], count.value)
        yield family
