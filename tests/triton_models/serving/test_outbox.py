"""The way to Triton, and the thread that sends on the requests' own calls."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.triton_models.serving.fakes import PB_UTILS, FakeResponder, wait_until
from triton_models.serving.outbox import POLL_PERIOD_S, Call, Responder, Sender
from wire.channel import Frame, decode_frame
from wire.meta import Meta, decode_meta
from wire.refusal import RefusalCode, parse_refusal


class ResponseSender:
    """Triton's, and the outcome of sending."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.sent: list[tuple[Any, int]] = []

    def send(self, response: Any, *, flags: int) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append((response, flags))


@pytest.mark.parametrize("final", [False, True])
def test_a_response_holds_text_and_meta_as_one_row(final: bool) -> None:
    sender = ResponseSender()
    Responder(sender, PB_UTILS).send("\N{SNOWMAN}", Meta(tokens=2), final=final)
    ((response, flags),) = sender.sent
    text, meta = (values for _, values in response.output_tensors)
    assert [name for name, _ in response.output_tensors] == ["response", "meta"]
    assert text.shape == meta.shape == (1, 1)
    assert text.dtype == meta.dtype == np.object_
    assert text[0, 0].decode() == "\N{SNOWMAN}"
    assert decode_meta(meta[0, 0]) == Meta(tokens=2)
    assert flags == int(final)


def test_a_frame_is_the_meta_of_a_response_without_text() -> None:
    sender = ResponseSender()
    Responder(sender, PB_UTILS).send_frame(Frame(frame=2, streams=[1], tokens=[1], texts=["a"]))
    ((response, flags),) = sender.sent
    text, meta = (values for _, values in response.output_tensors)
    assert text[0, 0] == b""
    assert decode_frame(meta[0, 0]).texts == ["a"]
    assert flags == 0


@pytest.mark.parametrize("code", RefusalCode)
def test_every_refusal_is_a_final_error_with_a_status(code: RefusalCode) -> None:
    sender = ResponseSender()
    Responder(sender, PB_UTILS).refuse(code, "why")
    ((response, flags),) = sender.sent
    assert parse_refusal(response.error.message) == (code, "why")
    assert flags == 1


def test_a_refusal_that_cannot_be_sent_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The sender refuses what it could not send: an error out of that must not end it."""
    Responder(ResponseSender(RuntimeError("no shared memory")), PB_UTILS).refuse(RefusalCode.INTERNAL, "why")
    assert "could not be sent" in caplog.text


class Asked(FakeResponder):
    """Counts how often it is asked whether its client left."""

    polls = 0

    def cancelled(self) -> bool:
        self.polls += 1
        return super().cancelled()


class Watched(Call):
    """A call that notes what becomes of it."""

    def __init__(self, key: str = "a", responder: FakeResponder | None = None) -> None:
        self.fake: Any = responder or Asked()
        super().__init__(key, self.fake)
        self.left_at: float | None = None

    def gone(self) -> None:
        self.left_at = time.monotonic()


@pytest.fixture
def start() -> Iterator[Callable[..., Sender]]:
    senders: list[Sender] = []

    def new(*, heartbeat_s: float = 2.0, **options: Any) -> Sender:
        senders.append(Sender(heartbeat_s=heartbeat_s, **options))
        senders[-1].worker.start()
        return senders[-1]

    yield new
    for sender in senders:
        sender.stop()


def test_every_client_is_asked_about_once_in_a_period(start: Callable[..., Sender]) -> None:
    sender, calls = start(), [Watched(str(number)) for number in range(512)]
    for call in calls:
        sender.watch(call)
    started = time.monotonic()
    time.sleep(5 * POLL_PERIOD_S)
    polls = [call.fake.polls for call in calls]
    periods = (time.monotonic() - started) / POLL_PERIOD_S
    assert 0 < max(polls) - 2 <= min(polls), "all alike"
    assert max(polls) <= periods + 2, "and no more often than that"
    assert POLL_PERIOD_S < 0.25


def test_a_client_that_left_is_noticed_within_a_quarter_of_a_second(start: Callable[..., Sender]) -> None:
    sender, calls = start(), [Watched(str(number)) for number in range(100)]
    for call in calls:
        sender.watch(call)
    time.sleep(0.3)
    left_at = time.monotonic()
    calls[77].fake.gone = True
    wait_until(lambda: calls[77].left_at is not None)
    noticed_at = calls[77].left_at
    assert noticed_at is not None
    assert noticed_at - left_at < 0.5, "0.25 s, and as much again for a busy machine"
    polls = calls[77].fake.polls
    time.sleep(2 * POLL_PERIOD_S)
    assert calls[77].fake.polls == polls, "it is not asked about any more"
    assert not any(call.left_at for call in calls if call is not calls[77])


def test_nothing_to_send_waits_for_a_round_of_polls(start: Callable[..., Sender]) -> None:
    polls = 0

    class Slow(Asked):
        def cancelled(self) -> bool:
            nonlocal polls
            polls += 1
            time.sleep(0.002)
            return super().cancelled()

    sender = start()
    for number in range(1000):  # a round takes 2 s
        sender.watch(Watched(str(number), Slow()))
    wait_until(lambda: polls > 0)
    sent_after: list[int] = []

    def send(call: Watched, before: int) -> None:
        sent_after.append(polls - before)
        call.send("", Meta(), final=True)

    for number in range(10):
        call = Watched(f"sent {number}")
        sender.post(call, partial(send, call, polls))
        call.fake.wait()
    assert min(sent_after) < 100, "they were not sent behind a round of polls"
    assert sum(sent_after) < 5_000


def test_nobody_is_asked_about_after_the_end(start: Callable[..., Sender]) -> None:
    """It would crash the server."""
    sender, ended, open_ = start(), Watched(), Watched()
    sender.watch(ended)
    sender.watch(open_)
    sender.refuse(ended, RefusalCode.INTERNAL, "for this test")
    wait_until(lambda: open_.fake.polls > 3)  # the responder of the other one would fail


class Beating(Watched):
    has_heartbeats = True


def test_heartbeats_come_in_time_however_many_calls_are_asked_about(start: Callable[..., Sender]) -> None:
    """They once came when a call was asked about: at 2,048 open calls, 3 to 6 s apart instead of 2."""

    class Slow(Asked):
        def cancelled(self) -> bool:
            time.sleep(0.002)
            return super().cancelled()

    sender, call = start(heartbeat_s=0.25), Beating("beats", Slow())
    sender.watch(call)
    others = [Watched(str(number), Slow()) for number in range(1000)]  # a round takes 2 s
    for other in others:
        sender.watch(other)
    wait_until(lambda: others[-1].fake.polls > 0)  # rounds were short until all were there
    polls, heartbeats = call.fake.polls, call.fake.heartbeats
    wait_until(lambda: call.fake.heartbeats >= heartbeats + 6)
    assert call.fake.polls - polls <= 2


def test_a_call_hears_nothing_while_other_things_are_sent_or_once_it_has_ended(
    start: Callable[..., Sender],
) -> None:
    sender, told, ended = start(heartbeat_s=0.3), Beating(), Beating()
    sender.watch(told)
    sender.watch(ended)
    sender.post(ended, lambda: ended.send("", Meta(), final=True))
    until = time.monotonic() + 1
    while time.monotonic() < until:
        told.last_sent = time.monotonic()
        time.sleep(0.01)
    assert told.fake.heartbeats == ended.fake.heartbeats == 0
    wait_until(lambda: told.fake.heartbeats >= 2)


def test_an_action_that_fails_ends_its_call_and_no_other(start: Callable[..., Sender]) -> None:
    sender, broken, fine = start(), Watched(), Watched()

    def fail() -> None:
        raise OSError("a secret")

    sender.post(broken, fail)
    sender.post(fine, lambda: fine.send("", Meta(), final=True))
    assert broken.fake.wait().refusal == (RefusalCode.INTERNAL, "the answer could not be sent")
    assert fine.fake.wait().refusal is None


def test_a_client_that_cannot_be_asked_about_has_left(start: Callable[..., Sender]) -> None:
    class Broken(FakeResponder):
        def cancelled(self) -> bool:
            raise OSError

    sender, call = start(), Watched(responder=Broken())
    sender.watch(call)
    wait_until(lambda: call.left_at is not None)


def test_a_send_that_hangs_makes_the_pulse_old_and_its_end_young(start: Callable[..., Sender]) -> None:
    sender, stuck = start(), threading.Event()
    call = Watched(responder=FakeResponder(on_send=lambda: stuck.wait(20)))
    assert sender.worker.age(time.monotonic()) < 0.1, "an idle thread is fresh"
    sender.post(call, lambda: call.send("", Meta(), final=True))
    wait_until(lambda: sender.worker.age(time.monotonic()) > 0.3)
    stuck.set()
    wait_until(lambda: sender.worker.age(time.monotonic()) < 0.1)


def test_a_sender_that_has_ended_looks_old(
    start: Callable[..., Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    class End(BaseException):
        pass

    def end() -> None:
        raise End

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    sender = start()
    sender.post(Watched(), end)
    wait_until(lambda: sender.worker.age(time.monotonic()) > 0.3)


def test_what_is_still_open_at_the_end_is_refused() -> None:
    sender, call = Sender(heartbeat_s=2.0), Watched()
    sender.worker.start()
    sender.watch(call)
    sender.stop()
    assert call.fake.refusal == (RefusalCode.SHUTTING_DOWN, "the model is being unloaded")
