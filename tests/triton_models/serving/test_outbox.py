"""The way to Triton, and the thread that sends on the requests' own calls."""

import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.triton_models.serving.fakes import FakeResponder, wait_until
from triton_models.serving.outbox import POLL_PERIOD_S, Call, Sender, TritonResponder
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


class TritonError:
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = range(4)

    def __init__(self, message: str, code: int) -> None:
        self.message = message
        self.code = code


PB_UTILS = types.SimpleNamespace(
    TritonError=TritonError,
    Tensor=lambda name, values: (name, values),
    InferenceResponse=types.SimpleNamespace,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
)


@pytest.mark.parametrize("final", [False, True])
def test_a_response_holds_text_and_meta_as_one_row(final: bool) -> None:
    sender = ResponseSender()
    TritonResponder(sender, PB_UTILS).send("\N{SNOWMAN}", Meta(tokens=2), final=final)
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
    TritonResponder(sender, PB_UTILS).send_frame(Frame(frame=2, streams=[1], tokens=[1], texts=["a"]))
    ((response, flags),) = sender.sent
    text, meta = (values for _, values in response.output_tensors)
    assert text[0, 0] == b""
    assert decode_frame(meta[0, 0]).texts == ["a"]
    assert flags == 0


@pytest.mark.parametrize("code", RefusalCode)
def test_every_refusal_is_a_final_error_with_a_status(code: RefusalCode) -> None:
    sender = ResponseSender()
    TritonResponder(sender, PB_UTILS).refuse(code, "why")
    ((response, flags),) = sender.sent
    assert parse_refusal(response.error.message) == (code, "why")
    assert flags == 1


def test_a_refusal_that_cannot_be_sent_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The sender refuses what it could not send: an error out of that must not end it."""
    TritonResponder(ResponseSender(RuntimeError("no shared memory")), PB_UTILS).refuse(
        RefusalCode.INTERNAL, "why"
    )
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
        self.fake = responder or Asked()
        super().__init__(key, self.fake)
        self.left_at: float | None = None
        self.kept_alive: list[float] = []

    def gone(self) -> None:
        self.left_at = time.monotonic()

    def keep_alive(self, now: float, silence_s: float) -> None:
        self.kept_alive.append(silence_s)


@pytest.fixture
def start() -> Iterator[Callable[..., Sender]]:
    senders: list[Sender] = []

    def new(*, heartbeat_s: float = 2.0, **options: Any) -> Sender:
        senders.append(Sender(heartbeat_s=heartbeat_s, **options))
        senders[-1].start()
        return senders[-1]

    yield new
    for sender in senders:
        sender.stop()


def test_every_client_is_asked_about_once_in_a_period(start: Callable[..., Sender]) -> None:
    sender, calls = start(), [Watched(str(number)) for number in range(512)]
    for call in calls:
        sender.watch(call)
    time.sleep(5 * POLL_PERIOD_S)
    polls = [call.fake.polls for call in calls]
    assert 3 <= min(polls) <= max(polls) <= 6
    assert POLL_PERIOD_S < 0.25
    assert all(1.75 - 0.01 <= silence_s < 2 for call in calls for silence_s in call.kept_alive)


def test_a_client_that_left_is_noticed_within_a_quarter_of_a_second(start: Callable[..., Sender]) -> None:
    sender, calls = start(), [Watched(str(number)) for number in range(100)]
    for call in calls:
        sender.watch(call)
    time.sleep(0.3)
    left_at = time.monotonic()
    calls[77].fake.gone = True
    wait_until(lambda: calls[77].left_at is not None)
    assert calls[77].left_at - left_at < 0.5, "0.25 s, and as much again for a busy machine"
    polls = calls[77].fake.polls
    time.sleep(2 * POLL_PERIOD_S)
    assert calls[77].fake.polls == polls, "it is not asked about any more"
    assert not any(call.left_at for call in calls if call is not calls[77])


def test_nothing_to_send_waits_for_a_round_of_polls(start: Callable[..., Sender]) -> None:
    class Slow(Asked):
        def cancelled(self) -> bool:
            time.sleep(0.002)
            return super().cancelled()

    sender = start()
    for number in range(400):  # a round takes 0.8 s
        sender.watch(Watched(str(number), Slow()))
    time.sleep(0.1)
    calls = [Watched(f"sent {number}") for number in range(10)]
    sent_at = time.monotonic()
    for call in calls:
        sender.post(call, lambda call=call: call.send("", Meta(), final=True))
    for call in calls:
        call.fake.wait()
    assert time.monotonic() - sent_at < 0.4


def test_nobody_is_asked_about_after_the_end_or_when_the_server_is_gone(start: Callable[..., Sender]) -> None:
    """Both would be worse than useless: the first crashes the server, the second hangs."""
    orphaned = threading.Event()
    sender, ended, open_ = start(orphaned=orphaned.is_set), Watched(), Watched()
    sender.watch(ended)
    sender.watch(open_)
    sender.refuse(ended, RefusalCode.INTERNAL, "for this test")
    wait_until(lambda: open_.fake.polls > 1)  # the responder of the other one would fail
    orphaned.set()
    time.sleep(0.05)
    polls = open_.fake.polls
    time.sleep(2 * POLL_PERIOD_S)
    assert open_.fake.polls == polls


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
    assert sender.pulse.age(time.monotonic()) < 0.1, "an idle thread is fresh"
    sender.post(call, lambda: call.send("", Meta(), final=True))
    wait_until(lambda: sender.pulse.age(time.monotonic()) > 0.3)
    stuck.set()
    wait_until(lambda: sender.pulse.age(time.monotonic()) < 0.1)


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
    wait_until(lambda: sender.pulse.age(time.monotonic()) > 0.3)


def test_what_is_still_open_at_the_end_is_refused() -> None:
    sender, call = Sender(heartbeat_s=2.0), Watched()
    sender.start()
    sender.watch(call)
    sender.stop()
    assert call.fake.refusal == (RefusalCode.SHUTTING_DOWN, "the model is being unloaded")
