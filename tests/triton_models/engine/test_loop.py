import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.triton_models.engine.fake_model import GREEDY, FakeModel, continuation, request
from triton_models.engine.engine import Engine, StepStats
from triton_models.engine.loop import EngineLoop
from triton_models.engine.sequence import FinishReason, TokenOutput
from triton_models.engine.settings import EngineSettings
from triton_models.errors import EngineStoppedError, PromptTooLongError, QueueFullError

SETTINGS = EngineSettings(max_running=4, max_waiting=4, max_batched_tokens=16, block_size=4, kv_blocks=40)


class Harness:
    """A loop, and what it handed on."""

    def __init__(self, model: FakeModel, settings: EngineSettings = SETTINGS) -> None:
        self.model = model
        self.outputs: list[TokenOutput] = []
        self.threads: set[str] = set()
        self.decode_tokens = 0
        self.changed = threading.Condition()
        self.loop = EngineLoop(Engine(model, settings), on_outputs=self._note, on_step=self._count)

    def _note(self, outputs: list[TokenOutput]) -> None:
        with self.changed:
            self.threads.add(threading.current_thread().name)
            self.outputs += outputs
            self.changed.notify_all()

    def _count(self, stats: StepStats) -> None:
        self.decode_tokens += stats.decode_tokens

    def final(self, request_id: str) -> TokenOutput:
        def find() -> TokenOutput | None:
            found = (each for each in self.outputs if each.request_id == request_id and each.finish_reason)
            return next(found, None)

        with self.changed:
            assert self.changed.wait_for(lambda: find() is not None, 30), f"{request_id} has no final output"
        output = find()
        assert output is not None
        return output

    def ids(self, request_id: str) -> list[int | None]:
        return [each.token_id for each in self.outputs if each.request_id == request_id]


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness(FakeModel())
    harness.loop.start()
    yield harness
    harness.model.gate.set()
    harness.loop.stop()
    assert not harness.loop.alive


def test_requests_from_many_threads_are_answered_on_the_engines_thread(harness: Harness) -> None:
    def ask(number: int) -> None:
        harness.loop.add(request(str(number), [number, 5]))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(8):
        assert harness.final(str(number)).finish_reason is FinishReason.LENGTH
        assert harness.ids(str(number)) == continuation([number, 5], 8)
    assert harness.threads == {"engine"}
    stats = harness.loop.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    # Statistics of the last step come after its outputs.
    harness.loop.stop()
    assert harness.decode_tokens == 8 * 7


def test_refusals_are_raised_where_the_request_is_added(harness: Harness) -> None:
    harness.model.gate.clear()
    for number in range(8):
        harness.loop.add(request(str(number)))
    with pytest.raises(QueueFullError):
        harness.loop.add(request("more"))
    with pytest.raises(PromptTooLongError):
        harness.loop.add(request("long", [1] * 200))
    assert harness.loop.stats().waiting >= 4


def test_cancel_acts_between_two_steps(harness: Harness) -> None:
    harness.model.gate.clear()
    harness.loop.add(request("a", sampling=replace(GREEDY, max_tokens=100)))
    assert harness.model.entered.wait(30)
    assert harness.loop.cancel("a")
    assert not harness.loop.cancel("unknown")
    harness.model.gate.set()
    assert harness.final("a").finish_reason is FinishReason.CANCELLED
    assert len(harness.ids("a")) == 2  # The token of the step that was under way, and the end.


def test_a_deadline_needs_no_other_request_to_wake_the_loop(harness: Harness) -> None:
    harness.model.gate.clear()
    harness.loop.add(request("a", deadline=time.monotonic() - 1))
    assert harness.final("a").finish_reason is FinishReason.DEADLINE


def test_the_heartbeat_goes_on_when_idle_without_spinning(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.loop.add(request("a"))
    harness.final("a")
    turns: list[float] = []
    monkeypatch.setattr(Engine, "step", lambda _: turns.append(time.monotonic()))
    seen: set[float] = set()
    end = time.monotonic() + 30
    while len(seen) < 3 and time.monotonic() < end:
        seen.add(harness.loop.heartbeat)
        time.sleep(0.05)
    assert len(seen) == 3
    assert len(turns) < 10


def test_the_heartbeat_stands_still_while_a_step_hangs(harness: Harness) -> None:
    harness.model.gate.clear()
    harness.loop.add(request("a"))
    assert harness.model.entered.wait(30)
    before = harness.loop.heartbeat
    time.sleep(0.7)
    assert harness.loop.heartbeat == before


def test_stop_answers_everyone_and_joins(harness: Harness) -> None:
    harness.model.gate.clear()
    for number in range(6):
        harness.loop.add(request(str(number)))
    assert harness.model.entered.wait(30)
    threading.Timer(0.1, harness.model.gate.set).start()
    harness.loop.stop()
    assert not harness.loop.alive
    for number in range(6):
        assert harness.final(str(number)).finish_reason is FinishReason.SHUTDOWN
    with pytest.raises(EngineStoppedError):
        harness.loop.add(request("late"))


def test_a_failed_step_fails_the_running_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(FakeModel(faults=1))
    for number in range(6):
        harness.loop.add(request(str(number), [number]))
    harness.loop.start()
    for number in range(4):
        failed = harness.final(str(number))
        assert failed.finish_reason is FinishReason.FAULT
        assert failed.error == "the engine failed in this step"
    for number in (4, 5):
        harness.final(str(number))
        assert harness.ids(str(number)) == continuation([number], 8)
    assert harness.loop.alive
    assert harness.loop.stats().failed_steps == 1
    harness.loop.stop()
    # The traceback is for the log, not for clients.
    assert "/secret/path" in caplog.text


def test_repeated_failures_stop_the_engine_and_answer_everyone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    settings = replace(SETTINGS, max_running=1, max_waiting=7)
    harness = Harness(FakeModel(faults=100), settings)
    for number in range(6):
        harness.loop.add(request(str(number)))
    harness.loop.start()
    for number in range(6):
        assert harness.final(str(number)).finish_reason is FinishReason.FAULT
    assert harness.final("5").error == "the engine has stopped after a fault"
    harness.loop.stop()
    assert harness.loop.stats().failed_steps == 3
    with pytest.raises(EngineStoppedError):
        harness.loop.add(request("late"))


def test_failures_apart_from_each_other_do_not_add_up() -> None:
    model = FakeModel()
    harness = Harness(model)
    harness.loop.start()
    for number in range(5):
        model.faults = 1
        harness.loop.add(request(f"bad{number}"))
        assert harness.final(f"bad{number}").finish_reason is FinishReason.FAULT
        harness.loop.add(request(f"good{number}"))
        assert harness.final(f"good{number}").finish_reason is FinishReason.LENGTH
    harness.loop.stop()


def test_a_failing_recovery_still_answers_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(FakeModel(faults=1))

    def broken(_: object) -> None:
        raise RuntimeError("no recovery")

    monkeypatch.setattr("triton_models.engine.runner.Runner.reset", broken)
    for number in range(6):
        harness.loop.add(request(str(number)))
    harness.loop.start()
    for number in range(6):
        assert harness.final(str(number)).finish_reason is FinishReason.FAULT
    harness.loop.stop()
    assert not harness.loop.alive


def test_a_callback_that_raises_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    calls = []

    def callback(outputs: list[TokenOutput]) -> None:
        calls.append(outputs)
        if outputs[-1].finish_reason:
            done.set()
        raise ValueError("not the engine's fault")

    loop = EngineLoop(Engine(FakeModel(), SETTINGS), on_outputs=callback, on_step=lambda _: None)
    loop.start()
    loop.add(request("a"))
    assert done.wait(30)
    loop.stop()
    assert len(calls) == 8
    assert "not the engine's fault" in caplog.text
