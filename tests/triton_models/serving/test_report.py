"""What the engine's metrics count, whatever ends a request."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tests.triton_models.serving.fakes import FakePbUtils, wait_until
from triton_models.engine.engine import EngineStats, StepStats
from triton_models.engine.sequence import FinishReason
from triton_models.serving.report import PREFIX, EngineMetrics


@dataclass
class Source:
    """An engine that counts what the test says."""

    preemptions: int = 0
    failed_steps: int = 0

    @property
    def heartbeat(self) -> float:
        return time.monotonic()

    def stats(self) -> EngineStats:
        return EngineStats(
            running=1,
            waiting=2,
            kv_blocks_used=3,
            kv_blocks=4,
            preemptions=self.preemptions,
            failed_steps=self.failed_steps,
        )


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def metrics(source: Source, pb_utils: FakePbUtils) -> Iterator[EngineMetrics]:
    metrics = EngineMetrics("glm", 1, pb_utils)
    metrics.start(source)
    yield metrics
    metrics.stop()


def test_whatever_ends_a_request_is_counted(metrics: EngineMetrics, pb_utils: FakePbUtils) -> None:
    for reason in FinishReason:
        metrics.finished(reason, 2, 1)
    metrics.stop()
    for reason in FinishReason:
        assert pb_utils.metric("requests_total", finish_reason=reason).value == 1
    assert pb_utils.metric("generated_tokens_total").value == 2 * len(FinishReason)
    assert pb_utils.metric("prefix_hit_tokens_total").value == len(FinishReason)


def test_guesses_are_counted_with_their_step(metrics: EngineMetrics, pb_utils: FakePbUtils) -> None:
    step = StepStats(batch_size=2, prefill_tokens=0, decode_tokens=5, seconds=0.1)
    metrics.step(step)
    metrics.step(replace(step, guessed_tokens=4, right_guesses=3))
    metrics.stop()
    assert pb_utils.metric("draft_tokens_total").value == 4
    assert pb_utils.metric("accepted_draft_tokens_total").value == 3


def counted(pb_utils: FakePbUtils, name: str) -> float:
    """Return a counter's value; 0 until the writing thread has made it."""
    return sum(metric.value for metric in pb_utils.MetricFamily.made.get(PREFIX + name, ()))


def test_what_the_engine_counts_is_written_as_it_grows(
    metrics: EngineMetrics, source: Source, pb_utils: FakePbUtils
) -> None:
    source.preemptions, source.failed_steps = 2, 1
    wait_until(lambda: counted(pb_utils, "failed_steps_total") == 1)
    source.preemptions = 5
    wait_until(lambda: counted(pb_utils, "preemptions_total") == 5)
    metrics.stop()
    assert pb_utils.metric("failed_steps_total").value == 1
    assert pb_utils.metric("requests_waiting").value == 0
