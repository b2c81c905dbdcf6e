import json
import time
from collections.abc import Callable, Sequence

import pytest

from bench import usual_work
from bench.usual_work import Job, by_engine, by_server, draw, in_batches, warm_up_batch
from tests.triton_models.engine.fake_model import FakeModel
from triton_models.engine.engine import Engine
from triton_models.engine.settings import EngineSettings


def test_requests_are_drawn_the_same_each_time() -> None:
    jobs = draw(200, vocabulary=1000, longest=256, seed="a")
    assert jobs == draw(200, vocabulary=1000, longest=256, seed="a")
    assert jobs != draw(200, vocabulary=1000, longest=256, seed="b")
    assert {len(each.prompt) for each in jobs} == set(range(20, 41))
    assert all(1 <= each.answer <= 256 for each in jobs)
    assert max(each.answer for each in jobs) > 240
    assert all(300 <= token < 700 for each in jobs for token in each.prompt)


def test_the_warm_up_comes_to_every_length() -> None:
    batch = warm_up_batch(3, longest=256)
    assert len(batch) == 3
    drawn = draw(500, vocabulary=1000, longest=256, seed="a")
    first = min(len(each.prompt) for each in drawn)
    last = max(len(each.prompt) for each in drawn) + max(each.answer for each in drawn)
    padded = max(len(each.prompt) for each in batch)
    assert min(len(each.prompt) for each in batch) < padded <= first
    assert all(len(each.prompt) + each.answer >= last for each in batch)


class Clock:
    """Time that passes only where somebody works."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.batches: list[list[int]] = []
        patch.setattr(time, "perf_counter", lambda: self.now)

    def answer(self, batch: Sequence[Job]) -> None:
        """A second for each token of the longest answer."""
        self.batches.append([each.answer for each in batch])
        self.now += max(each.answer for each in batch)


def jobs(*answers: int) -> list[Job]:
    return [Job((1,), answer) for answer in answers]


def test_a_batch_ends_with_its_longest_answer_and_the_next_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    run = in_batches(clock.answer, jobs(1, 9, 2, 3, 4), clients=2, size=2, limit_s=1000)
    assert clock.batches == [[1, 9], [2, 3], [4]]
    assert run.waited == [9, 9, 3, 3, 4]
    assert (run.seconds, run.tokens, run.tokens_per_second) == (16, 19, 19 / 16)


def test_without_batching_clients_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    run = in_batches(clock.answer, jobs(1, 9, 2), clients=2, size=1, limit_s=1000)
    assert clock.batches == [[1], [9], [2]]
    assert run.waited == [1, 10, 11]


def test_no_batch_begins_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    run = in_batches(clock.answer, jobs(*[5] * 50), clients=4, size=4, limit_s=6)
    assert clock.batches == [[5] * 4] * 2
    assert (run.seconds, run.tokens, len(run.waited)) == (10, 40, 8)


def test_the_engine_answers_all_with_so_many_clients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel()
    engine = Engine(model, EngineSettings(max_running=8, max_batched_tokens=64, kv_blocks=64))
    most = 0
    add = engine.add

    def watched(request: object) -> None:
        nonlocal most
        add(request)
        most = max(most, engine.open_requests)

    monkeypatch.setattr(engine, "add", watched)
    wanted = [Job((1, 2, 3), 1 + number) for number in range(20)]
    run = by_engine(engine, wanted, clients=3)
    assert most == 3
    assert len(run.waited) == 20
    assert run.tokens == sum(range(1, 21))


async def test_a_server_that_answers_short_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts are tokens that came, not those jobs for."""
    bodies: list[dict[str, object]] = []

    class Short:
        def __init__(self, url: str) -> None:
            pass

        async def post(
            self, path: str, body: bytes, on_event: Callable[[float, bytes], None], *, timeout_s: float
        ) -> bytes:
            bodies.append(json.loads(body))
            on_event(1.0, b'{"choices": [{"text": "a"}]}')
            usage = {"prompt_tokens": 1, "completion_tokens": 3}
            on_event(2.0, json.dumps({"choices": [], "usage": usage}).encode())
            return b""

        def close(self) -> None:
            pass

    monkeypatch.setattr(usual_work, "Client", Short)
    run = await by_server("http://x", "m", jobs(3, 3), clients=2)
    assert (run.tokens, len(run.waited)) == (6, 2)
    assert [body["max_tokens"] for body in bodies] == [3, 3]
    with pytest.raises(RuntimeError, match="3 tokens instead of 4"):
        await by_server("http://x", "m", jobs(4), clients=1)
