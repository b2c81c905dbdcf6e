"""A model's life over a scripted Triton, with every pause cut short."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.triton_models.embedded.scripted_triton import WELL, Triton, Watched
from triton_models.embedded import supervisor
from triton_models.embedded.errors import ModelError, ServerError
from triton_models.embedded.server import ServerLog
from triton_models.embedded.supervisor import Backoff, load_failure
from wire import events
from wire.meta import ProbeReport

NO_FILE = ModelError("no such file")
DIED = ModelError("is at UNAVAILABLE state: Internal: Stub process 'm_0_0' is not healthy.;")
DIED_TEXT = "its process died while loading; is there enough memory?"
NOT_READY = ModelError("Request for unknown model: 'm' is not ready")
TIMED_OUT = ModelError("Deadline Exceeded")
STUCK = ProbeReport(heartbeat_age_s=61, running=9, waiting=9, format="chatglm3", max_context=1)
SLOW = ProbeReport(heartbeat_age_s=59, running=9, waiting=9, format="chatglm3", max_context=1)
CRASH = ServerError("killed by signal 9", transient=True)
LOAD_FAILURE = (
    "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: "
    "CheckpointError: /c/a.bin: tensor 'x'\n has no shape\n\n"
    "At:\n  /site/build.py(3): build\n  /m/1/model.py(9): initialize\n;"
)


@pytest.fixture
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Triton:
    for name in ("_INTERVAL_S", "_SERVER_DEATH_S", "_SHORTEST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(supervisor, name, 0.01)
    triton = Triton(tmp_path)
    monkeypatch.setattr(supervisor, "command_line", triton.command_line)
    monkeypatch.setattr(supervisor, "kill", triton.processes.difference_update)
    return triton


@pytest.fixture
async def watched(triton: Triton) -> AsyncIterator[Watched]:
    made = Watched(triton)
    yield made
    await made.close()


async def test_ready_says_where_the_models_are_and_what_key_they_need(watched: Watched) -> None:
    ready = await watched.next(events.Ready)
    assert (ready.grpc, ready.metrics, ready.repository_key) == ("127.0.0.1:1", "127.0.0.1:2", "name=value")
    assert ready.models == ["m"]
    assert watched.triton.calls == ["start", "load"]
    assert watched.up


async def test_a_first_load_that_fails_ends_it(triton: Triton, watched: Watched) -> None:
    triton.load_errors = [NO_FILE]
    failure = await watched.failure()
    assert isinstance(failure, ModelError)
    assert str(failure) == "m: no such file"


async def test_a_first_load_whose_model_does_not_answer_fails(triton: Triton, watched: Watched) -> None:
    triton.answers = [ModelError("the engine failed")]
    assert str(await watched.failure()) == "m: the engine failed"


async def test_a_first_load_whose_process_died_is_tried_again(triton: Triton, watched: Watched) -> None:
    triton.load_errors = [DIED] * 2
    assert (await watched.next(events.ModelDown)).reason == DIED_TEXT
    await watched.next(events.ModelDown)
    await watched.next(events.ModelUp)
    await watched.next(events.Ready)
    assert triton.calls == ["start", *["load", "unload"] * 2, "load"]


async def test_the_third_process_that_dies_is_a_failed_first_load(triton: Triton, watched: Watched) -> None:
    triton.load_errors = [DIED] * 3
    assert str(await watched.failure()) == f"m: {DIED_TEXT}"
    assert triton.calls.count("load") == 3


async def test_after_a_process_that_died_a_first_load_can_still_fail(
    triton: Triton, watched: Watched
) -> None:
    triton.load_errors = [DIED, NO_FILE]
    assert str(await watched.failure()) == "m: no such file"


async def test_a_later_load_that_fails_is_tried_again(triton: Triton, watched: Watched) -> None:
    await watched.next(events.Ready)
    triton.load_errors = [NO_FILE, DIED, DIED, DIED, DIED]
    triton.processes.clear()
    reasons = [(await watched.next(events.ModelDown)).reason for _ in range(6)]
    assert reasons == ["its process died", "no such file", *[DIED_TEXT] * 4]
    await watched.next(events.ModelUp)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([TIMED_OUT] * 3, "a probe failed: Deadline"),
        ([NOT_READY] * 3, "a probe failed: Request for unknown"),
        ([ModelError("Stub process 'm_0_0' is not healthy.")], "is not healthy"),
        ([STUCK], "not moved"),
    ],
)
async def test_a_model_that_does_not_answer_is_loaded_again(
    triton: Triton, watched: Watched, answers: list[Any], reason: str
) -> None:
    await watched.next(events.Ready)
    first = set(triton.processes)
    triton.answers += answers
    assert reason in (await watched.next(events.ModelDown)).reason
    await watched.next(events.ModelUp)
    assert triton.calls[2:] == ["unload", "load"]
    assert not first & triton.processes


async def test_two_misses_and_an_old_but_living_heartbeat_are_forgiven(
    triton: Triton, watched: Watched
) -> None:
    await watched.next(events.Ready)
    triton.answers += [TIMED_OUT, TIMED_OUT, SLOW, TIMED_OUT, TIMED_OUT, WELL]
    await watched.wait(lambda: not triton.answers)
    assert triton.calls == ["start", "load"]


async def test_a_dead_process_is_seen_without_a_request(triton: Triton, watched: Watched) -> None:
    await watched.next(events.Ready)
    triton.processes.clear()
    assert (await watched.next(events.ModelDown)).reason == "its process died"
    await watched.next(events.ModelUp)


async def test_it_is_not_unloaded_while_another_loads(triton: Triton, watched: Watched) -> None:
    """Only one loads at a time, which may take minutes: until then it is to be seen as dead."""
    await watched.next(events.Ready)
    async with watched.supervisor._loading:
        triton.processes.clear()
        await watched.next(events.ModelDown)
        await asyncio.sleep(0.1)
        assert triton.calls == ["start", "load"]
    await watched.next(events.ModelUp)
    assert triton.calls[2:] == ["unload", "load"]


async def test_what_somebody_loaded_in_a_pause_is_not_unloaded(
    triton: Triton, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    await watched.next(events.Ready)
    monkeypatch.setattr(supervisor.Backoff, "failed", lambda _: 0.3)
    triton.processes.clear()
    await watched.next(events.ModelDown)
    await asyncio.sleep(0.1)
    triton.processes.add(-1)
    await watched.next(events.ModelUp)
    assert triton.calls[2:] == ["load"]


async def test_a_process_that_somebody_replaced_is_no_fault(triton: Triton, watched: Watched) -> None:
    await watched.next(events.Ready)
    triton.processes.clear()
    triton.processes.add(-1)
    await watched.wait(lambda: watched.supervisor._models[0].stubs == {-1})
    assert triton.calls == ["start", "load"]


async def test_what_somebody_unloaded_waits_until_it_is_loaded(triton: Triton, watched: Watched) -> None:
    await watched.next(events.Ready)
    triton.unloaded_by_somebody = True
    triton.processes.clear()
    await watched.wait(lambda: triton.asked_whether_unloaded >= 5)
    triton.unloaded_by_somebody = False
    triton.processes.add(-1)
    asked = triton.asked_whether_unloaded
    await watched.wait(lambda: watched.supervisor._models[0].stubs == {-1})
    assert triton.calls == ["start", "load"]
    assert triton.asked_whether_unloaded <= asked + 1
    assert not [event for event in watched.seen if isinstance(event, events.ModelDown)]


async def test_what_is_left_to_others_is_repaired_once_they_loaded_it(triton: Triton) -> None:
    triton.unloaded_by_somebody = True
    watched = Watched(triton, at_start=0)
    await watched.next(events.Ready)
    await watched.wait(lambda: triton.asked_whether_unloaded >= 5)
    assert triton.calls == ["start"]
    triton.unloaded_by_somebody = False
    triton.processes.add(-1)
    await watched.wait(lambda: watched.supervisor._models[0].stubs == {-1})
    triton.processes.clear()
    await watched.next(events.ModelUp)
    assert triton.calls == ["start", "unload", "load"]
    await watched.close()


async def test_what_is_not_known_to_be_unloaded_is_not_loaded_at_once(
    triton: Triton, watched: Watched
) -> None:
    await watched.next(events.Ready)
    triton.unloaded_by_somebody = True
    triton.processes.clear()
    for _ in range(3):
        asked = triton.asked_whether_unloaded
        triton.index_errors = [TIMED_OUT, TIMED_OUT]
        await watched.wait(lambda asked=asked: triton.asked_whether_unloaded >= asked + 4)
    assert triton.calls == ["start", "load"]


async def test_a_dead_process_is_replaced_though_triton_says_nothing(
    triton: Triton, watched: Watched
) -> None:
    await watched.next(events.Ready)
    triton.index_errors = [TIMED_OUT] * 3
    triton.processes.clear()
    assert (await watched.next(events.ModelDown)).reason == "its process died"
    assert not triton.index_errors
    await watched.next(events.ModelUp)


async def test_a_load_whose_process_died_unseen_asks_for_a_new_server(
    triton: Triton, watched: Watched
) -> None:
    await watched.next(events.Ready)
    triton.hangs = True
    triton.processes.clear()
    await watched.next(events.ModelDown)
    assert "waits for it" in (await watched.next(events.ServerDown)).reason
    triton.hangs = False
    await watched.next(events.ServerUp)


async def test_a_fault_of_the_supervisor_asks_for_a_new_server(
    triton: Triton, watched: Watched, capfd: pytest.CaptureFixture[str]
) -> None:
    await watched.next(events.Ready)
    triton.answers.append(RuntimeError("unforeseen"))
    assert "unforeseen" in (await watched.next(events.ServerDown)).reason
    assert "Traceback" in capfd.readouterr().err
    await watched.next(events.ServerUp)


async def test_a_server_that_died_or_hangs_is_started_again(triton: Triton, watched: Watched) -> None:
    await watched.next(events.Ready)
    triton.ends = [ServerError("it ended"), CRASH, CRASH, CRASH]
    reasons = [(await watched.next(events.ServerDown)).reason for _ in range(4)]
    assert reasons == ["it ended", *[str(CRASH)] * 3]
    triton.answers_live = False
    assert (await watched.next(events.ServerDown)).reason == "tritonserver does not answer"
    triton.answers_live = True
    await watched.next(events.ServerUp)
    await watched.wait(lambda: watched.up)


async def test_an_early_crash_is_answered_by_another_start(triton: Triton, watched: Watched) -> None:
    triton.ends = [CRASH, CRASH]
    triton.hangs = True
    for _ in range(2):
        await watched.next(events.ServerDown)
        await watched.next(events.ServerUp)
    triton.hangs = False
    await watched.next(events.Ready)


@pytest.mark.parametrize("ends", [[CRASH] * 3, [ServerError("it ended")]])
async def test_a_server_that_ends_early_by_itself_or_crashes_thrice_ends_it(
    triton: Triton, watched: Watched, ends: list[ServerError]
) -> None:
    triton.ends = list(ends)
    triton.hangs = True
    assert await watched.failure() is ends[-1]


async def test_a_call_that_fails_with_its_server_is_not_the_models_fault(
    triton: Triton, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    await watched.next(events.Ready)
    monkeypatch.setattr(supervisor, "_SERVER_DEATH_S", 60)

    load = triton.load

    async def die(_: str) -> None:
        triton.load = load  # type: ignore[method-assign]  # of this fake alone
        triton.answers_live = False
        triton.ends = [CRASH]
        raise ModelError("Socket closed")

    triton.load = die  # type: ignore[method-assign]  # of this fake alone
    triton.processes.clear()
    assert (await watched.next(events.ServerDown)).reason == str(CRASH)
    assert len([event for event in watched.seen if isinstance(event, events.ModelDown)]) == 1


async def test_a_stop_in_the_moment_of_a_fault_is_a_stop(triton: Triton, watched: Watched) -> None:
    await watched.next(events.Ready)

    probe = triton.probe

    async def fail(*_: Any) -> ProbeReport:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            triton.probe = probe  # type: ignore[method-assign]  # of this fake alone
            raise ModelError("Cannot invoke RPC on closed channel!") from None
        return WELL

    triton.probe = fail  # type: ignore[method-assign]  # of this fake alone
    await asyncio.sleep(0.1)
    await watched.close()
    assert watched._running.cancelled()


def test_pauses_double_up_to_a_limit_and_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    backoff = Backoff()
    assert [backoff.failed() for _ in range(8)] == [0, 0.5, 1, 2, 4, 8, 16, 30]
    now += 59
    assert backoff.failed() == 30
    now += 91
    assert backoff.failed() == 0


def test_a_load_failure_is_one_line_without_traceback(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "triton.log")
    assert load_failure(LOAD_FAILURE, log) == "CheckpointError: /c/a.bin: tensor 'x' has no shape"
    assert load_failure("no such model", log) == "no such model"
    assert load_failure(str(DIED), log) == DIED_TEXT
    log.path.write_text('E1121 09:55:12.868396 4723 main.cc:535] "failed to start GRPC service"\n')
    assert load_failure("poll failed", log) == "poll failed: failed to start GRPC service"
