"""One entry's life over a scripted Triton, with every pause cut short."""

import time
from typing import Any

import pytest

from tests.triton_models.embedded.scripted_triton import WELL, Stub, Watched
from triton_models.embedded import watcher
from triton_models.embedded.client import CallError, EntryState
from triton_models.embedded.errors import LoadError, ServerError
from wire import events
from wire.meta import ProbeReport

NOT_READY = CallError("Request for unknown model: 'm-stream' is not ready")
FULL_QUEUE = CallError("Exceeds maximum queue size")
TIMED_OUT = CallError("Deadline Exceeded", timed_out=True)


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
    monkeypatch.setattr(watcher, "CALL_TIMEOUT_S", 3600)
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
