from gateway.telemetry.bulk import BulkCounter, BulkHistogram
from gateway.telemetry.metrics import Metrics


def test_a_counter_without_a_lock() -> None:
    metrics = Metrics()
    counter = BulkCounter("c", "help", label="model", registry=metrics.registry)
    counter.labels("m").value += 3
    counter.labels("m").value += 4
    counter.labels("n").value += 1
    sample = metrics.registry.get_sample_value
    assert [sample("c_total", {"model": each}) for each in "mno"] == [7, 1, None]
    assert "# TYPE c_total counter" in metrics.render().decode()


def test_many_observations_at_once() -> None:
    metrics = Metrics()
    histogram = BulkHistogram("h", "help", label="model", buckets=(1, 2), registry=metrics.registry)
    histogram.labels("m").observe(1.0, 3)
    histogram.labels("m").observe(1.5)
    histogram.labels("m").observe(9.0, 2)
    sample = metrics.registry.get_sample_value
    counts = [sample("h_bucket", {"model": "m", "le": le}) for le in ("1.0", "2.0", "+Inf")]
    assert counts == [3, 4, 6]
    assert sample("h_count", {"model": "m"}) == 6
    assert sample("h_sum", {"model": "m"}) == 22.5
