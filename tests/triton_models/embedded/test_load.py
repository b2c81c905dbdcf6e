"""How one entry is loaded, over a scripted Triton."""

import threading
import time
from typing import Any

import pytest

from tests.triton_models.embedded.scripted_triton import Stub, Watched
from triton_models.embedded.client import CallError, EntryState
from triton_models.embedded.errors import ServerError
from wire import events
from wire.refusal import RefusalCode, refusal_text

INITIALIZED, ASKED = b"is initialized", b"has its first request"


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
    """A load whose processes Triton waits for, because it took one of them for dead.

    Each of them has said `said`.
    """

    def __init__(self, watched: Watched, *said: tuple[bytes, ...]) -> None:
        self.stubs = [Stub() for _ in said]
        self.waits = 0
        self.answers = True
        self._watched = watched
        self._said = said

    def wait(self, _: float) -> bool:
        if not self.waits:
            self._start()
        self.waits += 1
        time.sleep(0.01)
        if any(stub.alive for stub in self.stubs) or not self.answers:
            return False
        raise CallError("Stub process 'm_0_0' is not healthy.", by_server=True)

    def _start(self) -> None:
        self._watched.triton.processes = self.stubs
        for stub, words in zip(self.stubs, self._said, strict=True):
            for word in words:
                line = b"INFO triton_models.serving.stub: m-stream: process %d %s\n" % (stub.pid, word)
                self._watched.around.log._take(line)


@pytest.fixture
def loads(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that the next loads are; after them, all go well."""
    calls: list[Any] = []
    monkeypatch.setattr(watched.triton, "load", lambda _: calls.pop(0) if calls else watched.triton)
    return calls


@pytest.mark.parametrize("count", [1, 2])
def test_processes_that_triton_gave_up_are_killed_and_loaded_again(
    watched: Watched, loads: list[Any], count: int
) -> None:
    loads += [given_up := GivenUp(watched, *[(INITIALIZED,)] * count)]
    watched.start()
    down = watched.next(events.ModelDown)
    assert down.reason == "m-stream: Triton gave its process up while that was starting"
    watched.next(events.ModelUp)
    assert not any(stub.alive for stub in given_up.stubs)


@pytest.mark.parametrize(
    "said",
    [
        [(INITIALIZED, ASKED)],  # its warm-up takes long
        [(INITIALIZED,), ()],  # another instance is still loading
        [()],
    ],
)
def test_a_load_may_last(watched: Watched, loads: list[Any], said: list[tuple[bytes, ...]]) -> None:
    loads += [lasting := GivenUp(watched, *said)]
    watched.start()
    watched.wait(lambda: lasting.waits > 30)
    assert all(stub.alive for stub in lasting.stubs)


def test_a_load_without_an_answer_even_then_asks_for_a_new_server(watched: Watched, loads: list[Any]) -> None:
    loads += [given_up := GivenUp(watched, (INITIALIZED,))]
    given_up.answers = False
    ended = watched.start()
    ended.join(60)
    assert not given_up.stubs[0].alive
    assert isinstance(ended.failure, ServerError)


def test_the_third_process_that_is_given_up_is_a_failed_first_load(
    watched: Watched, loads: list[Any]
) -> None:
    loads += [GivenUp(watched, (INITIALIZED,)) for _ in range(3)]
    ended = watched.start()
    ended.join(60)
    assert str(ended.failure) == "m-stream: Triton gave its process up while that was starting"
    assert loads == []


def test_after_a_process_that_was_given_up_a_first_load_can_still_fail(
    watched: Watched, loads: list[Any]
) -> None:
    loads += [GivenUp(watched, (INITIALIZED,))]
    watched.triton.load_error = CallError("no such file")
    ended = watched.start()
    ended.join(60)
    assert str(ended.failure) == "m-stream: no such file"
