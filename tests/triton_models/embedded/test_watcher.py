"""One entry's life over a scripted Triton, with every pause cut short."""

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from triton_models.embedded import load, watcher
from triton_models.embedded.client import CallError, EntryState
from triton_models.embedded.entry import Entry, Surroundings
from triton_models.embedded.errors import LoadError, ServerError
from triton_models.embedded.log import ServerLog
from triton_models.embedded.rundir import RunDirectory
from triton_models.embedded.watcher import EntryWatcher
from wire import events
from wire.meta import ProbeReport
from wire.refusal import RefusalCode, refusal_text

WELL = ProbeReport(heartbeat_age_s=0.1, running=0, waiting=0, format="chatglm3", max_context=1)
NOT_READY = CallError("Request for unknown model: 'm-stream' is not ready")
FULL_QUEUE = CallError("Exceeds maximum queue size")
TIMED_OUT = CallError("Deadline Exceeded", timed_out=True)


class Stub:
    def __init__(self) -> None:
        self.alive = True

    def is_running(self) -> bool:
        return self.alive

    def status(self) -> str:
        return "sleeping"

    def kill(self) -> None:
        self.alive = False


class Triton:
    """Server and client in one: an entry that loads and answers, until told otherwise."""

    def __init__(self) -> None:
        self.state_ = EntryState("", "")
        self.processes: list[Stub] = []
        self.answers: queue.Queue[ProbeReport | CallError] = queue.Queue()
        self.load_error: CallError | None = None
        self.refusals: list[CallError] = []
        self.hangs = False
        self.calls: list[str] = []

    def stubs(self, _: str) -> list[Stub]:
        return [stub for stub in self.processes if stub.alive]

    def kill_stubs(self, name: str) -> None:
        for stub in self.stubs(name):
            stub.kill()

    def load(self, _: str) -> "Triton":
        self.calls.append("load")
        return self

    def wait(self, _: float) -> bool:
        if self.hangs:
            return False
        if self.load_error is not None:
            raise self.load_error
        self.processes = [Stub()]
        self.state_ = EntryState("READY", "")
        return True

    def generate(self, *_: Any) -> None:
        self.calls.append("generate")
        if self.refusals:
            raise self.refusals.pop()

    def unload(self, *_: Any) -> None:
        self.calls.append("unload")
        self.state_ = EntryState("UNAVAILABLE", "unloaded")

    def state(self, *_: Any) -> EntryState:
        return self.state_

    def probe(self, *_: Any) -> ProbeReport:
        try:
            answer = self.answers.get_nowait()
        except queue.Empty:
            return WELL
        if isinstance(answer, CallError):
            raise answer
        return answer


class Watched:
    def __init__(self, folder: Path) -> None:
        self.triton: Any = Triton()
        self.told: queue.Queue[events.Event] = queue.Queue()
        self.over = threading.Event()
        run = RunDirectory(folder)
        self.around = Surroundings(
            server=self.triton,
            client=self.triton,
            run=run,
            log=ServerLog(run.log),
            emit=self.told.put,
            over=self.over,
            loading=threading.Lock(),
        )

    def start(self, *, must_load: bool = True, engine: bool = True, needs: str | None = None) -> EntryWatcher:
        entry = Entry(name="m-stream", model="m", engine=engine, needs=needs)
        self.watcher = EntryWatcher(entry, self.around, must_load=must_load)
        self.watcher.start()
        return self.watcher

    def next(self, kind: type) -> Any:
        while True:
            event = self.told.get(timeout=60)
            if isinstance(event, kind):
                return event

    def wait_up(self) -> None:
        self.wait(lambda: self.watcher.state is watcher.EntryState.UP)

    @staticmethod
    def wait(holds: Any) -> None:
        for _ in range(6000):
            if holds():
                return
            threading.Event().wait(0.01)
        raise AssertionError


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    for name in ("_INTERVAL_S", "_CALL_TIMEOUT_S", "_SERVER_DEATH_S", "_UNLOAD_TIMEOUT_S"):
        monkeypatch.setattr(watcher, name, 0.01)
    for name in ("_INTERVAL_S", "_NEEDED_INTERVAL_S", "_UNASKED_S"):
        monkeypatch.setattr(load, name, 0.01)
    monkeypatch.setattr("triton_models.embedded.backoff._FIRST_S", 0.01)
    made = Watched(tmp_path)
    yield made
    made.over.set()
    made.watcher.join(60)
    assert not made.watcher._thread.is_alive()
    made.around.log.close()


def test_an_entry_is_loaded_and_must_answer(watched: Watched) -> None:
    watched.start()
    watched.wait_up()
    assert watched.triton.calls == ["load", "generate"]


def test_an_entry_that_needs_another_waits_for_it(watched: Watched) -> None:
    watched.start(engine=False, needs="other")
    threading.Event().wait(0.1)
    assert watched.triton.calls == []
    watched.triton.state_ = EntryState("READY", "")
    watched.wait_up()
    assert watched.triton.calls == ["load"]


def test_a_first_load_that_fails_ends_the_watcher(watched: Watched) -> None:
    watched.triton.load_error = CallError("no such file")
    ended = watched.start()
    ended.join(60)
    assert isinstance(ended.failure, LoadError)
    assert str(ended.failure) == "m-stream: no such file"


def test_a_later_load_that_fails_is_tried_again(watched: Watched) -> None:
    watched.triton.load_error = CallError("no such file")
    watched.start(must_load=False)
    assert watched.next(events.ModelDown).reason == "m-stream: no such file"
    watched.triton.load_error = None
    watched.next(events.ModelUp)


def test_an_engine_that_clients_filled_before_its_first_check_is_up(watched: Watched) -> None:
    watched.triton.refusals = [CallError(refusal_text(RefusalCode.QUEUE_FULL, "640 requests are open"))]
    watched.start()
    watched.wait_up()
    assert watched.triton.calls == ["load", "generate"]


def test_an_engine_that_refuses_its_first_check_for_anything_else_is_down(watched: Watched) -> None:
    watched.triton.refusals = [CallError(refusal_text(RefusalCode.INTERNAL, "the engine failed"))]
    watched.start(must_load=False)
    assert "the engine failed" in watched.next(events.ModelDown).reason
    watched.next(events.ModelUp)


def test_a_load_whose_process_died_asks_for_a_new_server(watched: Watched) -> None:
    watched.triton.hangs = True
    ended = watched.start(must_load=False)
    ended.join(60)
    assert isinstance(ended.failure, ServerError)


class GivenUp:
    """A load whose process Triton took for dead: it waits for its end, which nobody brings about."""

    def __init__(self, watched: Watched, *, asked: bool = False) -> None:
        self.stub = Stub()
        watched.triton.processes = [self.stub]
        self._log = watched.around.log
        self._said = [b"is initialized", b"has its first request"][: 1 + asked]
        self.waits = 0

    def wait(self, _: float) -> bool:
        self.waits += 1
        time.sleep(0.01)
        while self._said:
            self._log._take(b"INFO triton_models.serving.stub: m-stream " + self._said.pop(0) + b"\n")
        if self.stub.alive:
            return False
        raise CallError("Stub process 'm_0_0' is not healthy.", by_server=True)


def test_a_process_that_triton_gave_up_is_killed_and_loaded_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [given_up := GivenUp(watched), watched.triton]
    monkeypatch.setattr(watched.triton, "load", lambda _: calls.pop(0))
    watched.start()
    down = watched.next(events.ModelDown)
    assert down.reason == "m-stream: Triton gave its process up while that was starting"
    watched.next(events.ModelUp)
    assert not given_up.stub.alive


def test_after_a_process_that_was_given_up_a_first_load_can_still_fail(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [GivenUp(watched), watched.triton]
    monkeypatch.setattr(watched.triton, "load", lambda _: calls.pop(0))
    watched.triton.load_error = CallError("no such file")
    ended = watched.start()
    ended.join(60)
    assert str(ended.failure) == "m-stream: no such file"


def test_a_warm_up_may_last(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    warming = GivenUp(watched, asked=True)
    monkeypatch.setattr(watched.triton, "load", lambda _: warming)
    watched.start()
    watched.wait(lambda: warming.waits > 20)
    assert warming.stub.alive


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([TIMED_OUT] * 3, "no answer to a probe"),
        ([NOT_READY] * 3, "a probe was refused: Request for unknown"),
        ([FULL_QUEUE] * 3, "a probe was refused: Exceeds maximum"),
        ([CallError("Stub process 'm_0_0' is not healthy.")], "is not healthy"),
        (
            [ProbeReport(heartbeat_age_s=61, running=9, waiting=9, format="chatglm3", max_context=1)],
            "not moved",
        ),
    ],
)
def test_an_entry_that_does_not_answer_is_loaded_again(
    watched: Watched, answers: list[Any], reason: str
) -> None:
    watched.start()
    watched.wait_up()
    first = watched.triton.processes
    for answer in answers:
        watched.triton.answers.put(answer)
    assert reason in watched.next(events.ModelDown).reason
    watched.next(events.ModelUp)
    assert watched.triton.calls[2:] == ["unload", "load", "generate"]
    assert not first[0].alive


def test_two_misses_and_an_old_but_living_heartbeat_are_forgiven(watched: Watched) -> None:
    watched.start()
    watched.wait_up()
    slow = ProbeReport(heartbeat_age_s=59, running=9, waiting=9, format="chatglm3", max_context=1)
    for answer in (TIMED_OUT, TIMED_OUT, slow, TIMED_OUT, TIMED_OUT, WELL):
        watched.triton.answers.put(answer)
    watched.wait(watched.triton.answers.empty)
    assert watched.triton.calls == ["load", "generate"]


def test_a_full_queue_is_judged_no_sooner_than_silence(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "_CALL_TIMEOUT_S", 3600)
    watched.start()
    watched.wait_up()
    for _ in range(3):
        watched.triton.answers.put(FULL_QUEUE)
    watched.wait(lambda: watched.triton.answers.qsize() == 2)
    time.sleep(0.3)
    assert watched.triton.answers.qsize() == 2


@pytest.mark.parametrize("engine", [True, False])
def test_a_dead_process_is_seen_without_a_request(watched: Watched, engine: bool) -> None:
    watched.start(engine=engine)
    watched.wait_up()
    watched.triton.processes[0].kill()
    assert watched.next(events.ModelDown).reason == "m-stream: its process died"
    watched.next(events.ModelUp)


def test_what_a_dead_entry_had_asked_is_ended_too(watched: Watched) -> None:
    watched.triton.state_ = EntryState("READY", "")
    watched.start(engine=False, needs="other")
    watched.wait_up()
    asked: list[str] = []
    find = watched.triton.stubs
    watched.triton.stubs = lambda name: asked.append(name) or find(name)
    watched.triton.processes[0].kill()
    watched.next(events.ModelDown)
    assert "other" in asked


def test_a_stub_that_triton_replaced_is_no_fault(watched: Watched) -> None:
    watched.start(engine=False)
    watched.wait_up()
    old, watched.triton.processes = watched.triton.processes, [Stub()]
    old[0].kill()
    watched.wait(lambda: watched.watcher._stubs == watched.triton.processes)
    assert watched.triton.calls == ["load"]


def test_what_somebody_unloaded_waits_until_it_is_loaded(watched: Watched) -> None:
    watched.start()
    watched.wait_up()
    watched.triton.unload()
    watched.triton.processes[0].kill()
    watched.wait(lambda: watched.watcher.state is watcher.EntryState.UNLOADED)
    assert watched.triton.calls == ["load", "generate", "unload"]
    watched.triton.wait(0)
    watched.wait_up()


def test_a_watcher_that_breaks_asks_for_a_new_server(watched: Watched) -> None:
    watched.triton.answers.put("no report at all")
    ended = watched.start()
    ended.join(60)
    assert isinstance(ended.failure, ServerError)


def test_a_call_that_fails_with_its_server_is_not_the_entrys_fault(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "_SERVER_DEATH_S", 60)
    watched.triton.load_error = CallError("Socket closed")
    ended = watched.start(must_load=False)
    watched.wait(lambda: "load" in watched.triton.calls)
    watched.over.set()
    ended.join(60)
    assert ended.state is watcher.EntryState.LOADING
    assert ended.failure is None


def test_a_client_closed_at_the_end_of_the_servers_life_is_no_fault(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a grpc channel does, which raises something else once it is closed."""

    def probe(*_: Any) -> ProbeReport:
        watched.over.set()
        raise ValueError("Cannot invoke RPC on closed channel!")

    monkeypatch.setattr(watched.triton, "probe", probe)
    ended = watched.start()
    ended.join(60)
    assert ended.failure is None
    assert "Traceback" not in caplog.text
