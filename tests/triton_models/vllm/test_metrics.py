import threading

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tests.triton_models.serving.fakes import FakePbUtils, wait_until
from triton_models.vllm import metrics
from triton_models.vllm.metrics import Metrics


def test_counters_and_gauges_are_copied_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "PERIOD_S", 0.01)
    registry = CollectorRegistry()
    running = Gauge("vllm:num_requests_running", "Running.", ["model_name", "engine"], registry=registry)
    ended = Counter("vllm:request_success", "Ended.", ["model_name", "finished_reason"], registry=registry)
    Histogram("vllm:time_to_first_token_seconds", "No.", registry=registry)
    Counter("python_gc", "No.", registry=registry)
    running.labels("/a", "0").set(2)
    running.labels("/a", "1").set(1)
    ended.labels("/a", "abort").inc(5)
    families = FakePbUtils().MetricFamily
    copied = Metrics(families, model="llama", version="1", registry=registry)
    copied.start()
    names = "vllm:num_requests_running", "vllm:request_success_total"
    wait_until(lambda: all(families.made.get(name) for name in names))
    ((gauge,), (counter,)) = (families.made[name] for name in names)
    assert counter.labels == {"finished_reason": "abort", "model": "llama", "version": "1"}
    wait_until(lambda: (gauge.value, counter.value) == (3, 5))
    ended.labels("/a", "abort").inc(2)
    wait_until(lambda: counter.value == 7)
    copied.stop()
    assert (gauge.value, counter.value) == (0, 7)
    assert set(families.made) == set(names)
    assert len(families.threads) == 1
    assert threading.get_ident() not in families.threads
