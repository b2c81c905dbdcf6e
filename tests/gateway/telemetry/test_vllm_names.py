import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.process.workers import new_places
from gateway.telemetry.metrics import Metrics, UpstreamState, WorkerMetrics
from tests.gateway.fake_upstream import FakeUpstream, say_choices
from tests.gateway.serving import in_process

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(exposition: bytes) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(exposition.decode())
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }


def of(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get(("vllm:" + name, frozenset(labels.items())))


def busy(number: int, *states: UpstreamState, vllm_names: bool = True) -> Metrics:
    """Metrics of the process with that number, which has done something."""
    metrics = Metrics(vllm_names=vllm_names)
    metrics.upstreams.look = lambda: states
    metrics.waiting.labels("m").set(2)
    metrics.in_flight.labels("m").set(10)
    for route, seconds in (
        ("/v1/chat/completions", 1),
        ("/v1/responses", 2),
        ("/v1/messages", 0.5),
        ("/v1/messages/count_tokens", 4),
        ("/tokenize", 4),
    ):
        metrics.request_duration.labels(route, "m").observe(seconds)
    metrics.request_duration.labels("/v1/responses", "unknown").observe(8)
    for reason in ("stop", "tool_calls", "length"):
        metrics.choices.labels("m", reason).inc(number + 1)
    metrics.tokens_of("m").inter_token.observe(0.01, 5)
    metrics.prompt_tokens.labels("m").inc(7)
    return metrics


A = UpstreamState(model="m", upstream="a:1", healthy=True, waiting=3, kv_usage=0.5)
B = UpstreamState(model="m", upstream="b:1", healthy=True, waiting=1, kv_usage=0.25)
MUTE = UpstreamState(model="m", upstream="c:1", healthy=True)


def test_only_on_request() -> None:
    assert b"vllm:" not in busy(0, A, vllm_names=False).render()


def test_what_a_lone_process_reports() -> None:
    samples = read(busy(0, A, B, MUTE).render())
    m = {"model_name": "m"}
    assert of(samples, "num_requests_waiting", **m) == 2 + 3 + 1
    assert of(samples, "num_requests_running", **m) == 10 - 3 - 1
    assert of(samples, "kv_cache_usage_perc", **m) == 0.375
    assert of(samples, "e2e_request_latency_seconds_count", **m) == 3
    assert of(samples, "e2e_request_latency_seconds_sum", **m) == 3.5
    assert of(samples, "e2e_request_latency_seconds_bucket", le="1.0", **m) == 2
    assert of(samples, "e2e_request_latency_seconds_bucket", le="+Inf", **m) == 3
    assert of(samples, "request_success_total", finished_reason="stop", **m) == 2
    assert of(samples, "request_success_total", finished_reason="length", **m) == 1
    assert of(samples, "prompt_tokens_total", **m) == 7
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert of(samples, name + "_count", **m) == 5
    assert not any(("model_name", "unknown") in labels for _, labels in samples)


def test_engines_that_do_not_tell() -> None:
    samples = read(busy(0, MUTE).render())
    assert of(samples, "num_requests_waiting", model_name="m") == 2
    assert of(samples, "num_requests_running", model_name="m") == 10
    assert of(samples, "kv_cache_usage_perc", model_name="m") is None


def test_more_wait_than_are_this_gateways() -> None:
    samples = read(
        busy(0, UpstreamState(model="m", upstream="a:1", healthy=True, waiting=99, kv_usage=1.0)).render()
    )
    assert of(samples, "num_requests_running", model_name="m") == 0


def test_a_model_is_there_before_its_first_request() -> None:
    metrics = Metrics(vllm_names=True)
    metrics.upstreams.look = lambda: [UpstreamState(model="m", upstream="a:1", healthy=True)]
    samples = read(metrics.render())
    assert of(samples, "num_requests_waiting", model_name="m") == 0
    assert of(samples, "num_requests_running", model_name="m") == 0


async def test_several_processes_count_each_engine_once() -> None:
    with new_places(2) as places:
        workers = [WorkerMetrics(place, busy(place.number, A, B), lambda _: True) for place in places]
        async with asyncio.timeout(30):
            for worker in workers:
                await worker.start()
            samples = read(await workers[0].render())
            for worker in workers:
                await worker.close()
    m = {"model_name": "m"}
    assert of(samples, "num_requests_waiting", **m) == 2 * 2 + 3 + 1
    assert of(samples, "num_requests_running", **m) == 2 * 10 - 3 - 1
    assert of(samples, "kv_cache_usage_perc", **m) == 0.375
    # What only grows is each process's own: a sum would fall when one of them is replaced.
    for number in range(2):
        series = {"finished_reason": "stop", "worker": str(number), **m}
        assert of(samples, "request_success_total", **series) == 2 * (number + 1)


@pytest.mark.parametrize("vllm_metrics", [False, True])
async def test_a_gateway_tells_them_if_it_is_set_to(*, vllm_metrics: bool) -> None:
    async with in_process(FakeUpstream(say_choices), vllm_metrics=vllm_metrics) as served:
        await served.chat(n=2)
        samples = read((await served.http.get("/metrics")).content)
    told = {name: of(samples, name, model_name="glm") for name in ("generation_tokens_total", *SEEN)}
    assert told == ({"generation_tokens_total": 4, **SEEN} if vllm_metrics else dict.fromkeys(told))
    ended = [of(samples, "request_success_total", model_name="glm", finished_reason=x) for x in REASONS]
    assert ended == ([1, 1] if vllm_metrics else [None, None])


SEEN = {"e2e_request_latency_seconds_count": 1, "time_to_first_token_seconds_count": 1}
REASONS = ("stop", "length")
