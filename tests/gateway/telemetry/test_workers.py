import asyncio
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.limits.counters import SharedCounters, mark_ended
from gateway.process.workers import new_places
from gateway.telemetry import metrics as worker_metrics
from gateway.telemetry.metrics import Metrics, Place, WorkerMetrics


class Process:
    """One of three, as it sees the others."""

    def __init__(self, place: Place) -> None:
        self.metrics = Metrics()
        shared = SharedCounters(gauges=0, counters=0, place=place)
        self.worker_metrics = WorkerMetrics(place, self.metrics, shared.lives)
        self._closed = False

    async def close(self) -> None:
        if not self._closed:
            await self.worker_metrics.close()
        self._closed = True

    async def samples(self, name: str) -> dict[str, float]:
        """Return the values of the samples of that name, by worker."""
        text = (await self.worker_metrics.render()).decode()
        return {
            sample.labels["worker"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }


@pytest.fixture
def places() -> Iterator[list[Place]]:
    with new_places(3) as places:
        yield places


@pytest.fixture
async def processes(places: list[Place], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Process]]:
    monkeypatch.setattr(
        worker_metrics, "_ANSWER_WITHIN_S", 60
    )  # none of them hangs, however slow this machine is
    async with AsyncExitStack() as stack:
        processes = [Process(place) for place in places]
        for each in processes:
            await each.worker_metrics.start()
            stack.push_async_callback(each.close)
        yield processes


async def test_whoever_is_asked_tells_the_metrics_of_all(processes: list[Process]) -> None:
    for number, process in enumerate(processes):
        process.metrics.generated_tokens.labels("m").value += 10**number
        process.metrics.time_to_first_token.labels("m").observe(number)
    for process in processes:
        assert await process.samples("tritongate_generated_tokens_total") == {"0": 1, "1": 10, "2": 100}
        assert await process.samples("tritongate_time_to_first_token_seconds_sum") == {"0": 0, "1": 1, "2": 2}
        assert await process.samples("tritongate_worker_up") == {"0": 1, "1": 1, "2": 1}


async def test_one_that_is_gone_is_told_to_be_down_and_its_replacement_begins_anew(
    processes: list[Process], places: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_metrics, "_ANSWER_WITHIN_S", 0.5)
    processes[1].metrics.generated_tokens.labels("m").value += 7
    await processes[1].close()
    assert await processes[0].samples("tritongate_worker_up") == {"0": 1, "1": 0, "2": 1}
    assert "1" not in await processes[0].samples("tritongate_generated_tokens_total")
    replacement = Process(places[1])
    await replacement.worker_metrics.start()
    replacement.metrics.generated_tokens.labels("m").value += 1
    assert await processes[0].samples("tritongate_generated_tokens_total") == {"1": 1}
    await replacement.worker_metrics.close()


async def test_one_that_has_ended_is_not_waited_for(processes: list[Process], places: list[Place]) -> None:
    await processes[1].close()
    mark_ended(places[1])  # as the parent does; else a scrape would wait for a minute here
    async with asyncio.timeout(30):
        assert await processes[0].samples("tritongate_worker_up") == {"0": 1, "1": 0, "2": 1}


async def test_a_metric_of_several_processes_is_described_once(processes: list[Process]) -> None:
    for process in processes:
        process.metrics.inter_token_latency.labels("m").observe(0.01)
    text = (await processes[2].worker_metrics.render()).decode()
    names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(names) == len(set(names))
    alone = re.findall(r"^# TYPE (\S+)", processes[2].metrics.render().decode(), re.MULTILINE)
    assert set(names) == {"tritongate_worker_up", *alone}


async def test_one_that_never_answers_is_told_to_be_down_however_often_it_is_asked(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_metrics, "_ANSWER_WITHIN_S", 0.2)
    await processes[1].close()
    ups = [await processes[0].samples("tritongate_worker_up") for _ in range(20)]
    assert {up["1"] for up in ups} == {0}
    assert any(up["2"] for up in ups)


async def test_one_that_asks_and_does_not_read_is_given_up(
    places: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_metrics, "_ANSWER_WITHIN_S", 0.2)
    answered = worker_metrics.WorkerMetrics._answer  # when it is over cannot be seen from outside
    over = asyncio.Event()

    async def answer(*arguments: Any) -> None:
        await answered(*arguments)
        over.set()

    monkeypatch.setattr(worker_metrics.WorkerMetrics, "_answer", answer)
    asked = Process(places[1])
    asked.metrics.generated_tokens.labels("m" * 2**20).value += 1
    await asked.worker_metrics.start()
    mine, other = socket.socketpair()
    with mine:
        with other, socket.fromfd(places[1].asks[1], socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            socket.send_fds(line, [b"?"], [other.fileno()])
        async with asyncio.timeout(20):
            await over.wait()
    await asked.worker_metrics.close()
