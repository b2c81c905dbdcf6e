"""Delta channels, through the whole service, and the thread that sends their frames."""

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from tests.triton_models.serving.conftest import HEARTBEAT_S, Served, Slow
from tests.triton_models.serving.fakes import FakePbUtils, FakeResponder, wait_until
from triton_models.errors import ChannelLostError, InvalidRequestError, QueueFullError
from triton_models.serving import channel as module
from triton_models.serving.channel import Delivery, DeltaChannel
from triton_models.serving.outbox import Sender
from wire.channel import Frame
from wire.refusal import RefusalCode
from wire.request import ChannelStream

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LONG = 400


def open_channel(served: Served, channel_id: str = "c") -> FakeResponder:
    return served.open_channel(channel_id)


def on(stream: int, channel_id: str = "c") -> dict[str, Any]:
    return {"channel": ChannelStream(id=channel_id, stream=stream)}


def whole_text(channel: FakeResponder, stream: int, own: FakeResponder) -> str:
    return "".join(text for text, _, _ in channel.deltas(stream)) + own.text


def fail() -> None:
    raise OSError("the stream is gone")


def test_an_open_channel_says_so_at_once(served: Served) -> None:
    assert open_channel(served).frames == [Frame(frame=0)]


def test_deltas_go_to_the_channel_and_the_rest_to_the_requests_own_stream(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "STEP_S", 0.03)  # or steps are joined, as behind a slow send
    served = serve(slow=True)
    channel = open_channel(served)
    own = served.ask(max_tokens=40, **GREEDY, **on(7)).wait()
    plain = served.ask(max_tokens=40, **GREEDY).wait()
    assert whole_text(channel, 7, own) == plain.text
    first, last = own.metas
    assert first.accepted is not None
    assert own.responses[0][0] == ""
    assert (last.finish_reason, last.usage) == ("length", plain.metas[-1].usage)
    deltas = channel.deltas(7)
    assert last.delivered.deltas == len(deltas) > 10
    assert sum(tokens for _, tokens, _ in deltas) + last.tokens == 40
    assert [frame.frame for frame in channel.frames] == list(range(len(channel.frames)))
    assert last.delivered.frame >= max(frame.frame for frame in channel.frames if 7 in frame.streams)


def test_what_else_there_is_of_a_delta_comes_with_it(served: Served) -> None:
    asked = {"max_tokens": 20, "logprobs": 2, "return_token_ids": True, **GREEDY}
    channel = open_channel(served)
    own = served.ask(**asked, **on(0)).wait()
    plain = served.ask(**asked).wait()
    metas = [meta for _, _, meta in channel.deltas(0)] + [own.metas[-1]]
    assert [each for meta in metas for each in meta.token_ids] == plain.token_ids
    logprobs = [each for meta in plain.metas for each in meta.logprobs or ()]
    assert [each for meta in metas for each in meta.logprobs] == logprobs


def test_many_answers_share_the_frames_of_the_steps(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "STEP_S", 0.05)  # the first does not end before the last has come
    served = serve(slow=True)
    channel = open_channel(served)
    owns = [served.ask(max_tokens=30, seed=n, ignore_eos=True, **on(n)) for n in range(16)]
    for own in owns:
        own.wait()
    plains = [served.ask(max_tokens=30, seed=n, ignore_eos=True) for n in range(16)]
    for number, (own, plain) in enumerate(zip(owns, plains, strict=True)):
        assert whole_text(channel, number, own) == plain.wait().text
        assert own.metas[-1].delivered.deltas == len(channel.deltas(number))
    assert max(len(frame.streams) for frame in channel.frames) == 16
    assert all(len(set(frame.streams)) == len(frame.streams) for frame in channel.frames)


def test_steps_that_pile_up_behind_a_slow_send_are_joined(served: Served) -> None:
    reading, released = threading.Event(), threading.Event()
    channel = open_channel(served)

    def read_slowly() -> None:
        reading.set()
        released.wait(20)

    channel.on_send = read_slowly
    own = served.ask(max_tokens=60, **GREEDY, **on(0))
    assert reading.wait(20)
    # What is read may be a heartbeat, and the request not have begun.
    wait_until(lambda: bool(own.metas) and served.busy() == 0)
    assert not own.ended.is_set()
    released.set()
    own.wait()
    assert own.metas[-1].delivered.deltas == len(channel.deltas(0)) <= 2
    assert whole_text(channel, 0, own) == served.ask(max_tokens=60, **GREEDY).wait().text


def test_a_stop_string_ends_an_answer_on_a_channel_where_it_ends_a_plain_one(served: Served) -> None:
    full = served.ask(max_tokens=60, **GREEDY).wait().text
    stop = full[20:23]
    channel = open_channel(served)
    own = served.ask(max_tokens=60, stop=[stop], **GREEDY, **on(0)).wait()
    plain = served.ask(max_tokens=60, stop=[stop], **GREEDY).wait()
    assert whole_text(channel, 0, own) == plain.text == full[: full.index(stop)]
    assert own.metas[-1].usage == plain.metas[-1].usage
    assert own.metas[-1].stop_reason == stop
    wait_until(lambda: served.busy() == 0)


def test_quiet_streams_beat_a_channel_and_a_request_that_waits(serve: Callable[..., Served]) -> None:
    served = serve(slow=True, max_running=1)
    channel = open_channel(served)
    wait_until(lambda: len(channel.frames) > 2)
    assert channel.frames[1:3] == [Frame(frame=1), Frame(frame=2)]
    busy = served.ask(max_tokens=150, **GREEDY, **on(0))  # far longer than a heartbeat's interval
    waits = served.ask(max_tokens=2, **GREEDY, **on(1))
    busy.wait()
    heard = waits.wait().heartbeats
    assert heard, "nothing was heard of a request that waited"
    # Were they none, both had heard as much. A busy machine may hold up some steps for so long.
    assert busy.heartbeats * 2 < heard, "deltas on the channel are signs of life"


def test_a_lost_channel_ends_its_requests_and_no_others(
    serve: Callable[..., Served], pb_utils: FakePbUtils
) -> None:
    served = serve(slow=True)
    lost, kept = open_channel(served, "lost"), open_channel(served, "kept")
    ends = [served.ask(max_tokens=LONG, **GREEDY, **on(n, "lost")) for n in range(4)]
    stays = served.ask(max_tokens=40, **GREEDY, **on(0, "kept"))
    wait_until(lambda: len(lost.frames) > 3)
    lost.gone = True
    for own in ends:
        assert own.wait().refused[0] is RefusalCode.CHANNEL_LOST
    assert stays.wait().refusal is None
    assert stays.metas[-1].delivered.deltas == len(kept.deltas(0))
    wait_until(lambda: served.busy() == 0)
    assert lost.ended.is_set()
    wait_until(lambda: pb_utils.metric("requests_total", finish_reason="cancelled").value == 4)
    assert served.ask(**on(0, "lost")).wait().refused[0] is RefusalCode.CHANNEL_LOST
    assert open_channel(served, "lost").frames == [Frame(frame=0)], "its id is free again"


def test_a_frame_that_cannot_be_sent_loses_the_channel(served: Served) -> None:
    channel = open_channel(served)

    channel.on_send = fail
    assert served.ask(max_tokens=LONG, **GREEDY, **on(0)).wait().refused[0] is RefusalCode.CHANNEL_LOST
    assert channel.wait().refused[0] is RefusalCode.INTERNAL
    assert served.ask(max_tokens=3, **GREEDY).wait().refusal is None
    wait_until(lambda: served.busy() == 0)


def test_ends_that_are_slow_to_send_do_not_delay_the_frames_of_others(serve: Callable[..., Served]) -> None:
    """Hundreds of answers may end in one step."""
    served = serve(slow=True)
    channel = open_channel(served)
    goes_on = served.ask(max_tokens=LONG, **GREEDY, **on(0))
    ends = served.ask(max_tokens=3, **GREEDY)
    frames: list[int] = []

    def wait_for_frames() -> None:
        if len(ends.responses) > 0:  # not `accepted`, but the end
            frames.append(len(channel.deltas(0)))
            wait_until(lambda: len(channel.deltas(0)) > frames[0] + 5)

    ends.on_send = wait_for_frames
    assert ends.wait().refusal is None
    assert frames
    goes_on.gone = True


def test_a_hang_up_of_the_request_itself_ends_it(serve: Callable[..., Served], pb_utils: FakePbUtils) -> None:
    served = serve(slow=True)
    channel = open_channel(served)
    own = served.ask(max_tokens=LONG, **GREEDY, **on(0))
    other = served.ask(max_tokens=60, **GREEDY, **on(1))
    wait_until(lambda: bool(channel.deltas(0)))
    own.gone = True
    assert own.wait().refused[0] is RefusalCode.CANCELLED
    assert other.wait().refusal is None
    assert served.ask(max_tokens=2, **GREEDY, **on(0)).wait().refusal is None, "its number is free again"
    wait_until(lambda: pb_utils.metric("requests_total", finish_reason="cancelled").value == 1)


@pytest.mark.parametrize("sampling", [{"temperature": 0, "max_tokens": 600}, {"prompt_token_ids": [5000]}])
def test_a_refused_request_leaves_its_number_free(served: Served, sampling: dict[str, Any]) -> None:
    open_channel(served)
    prompt = "" if "prompt_token_ids" in sampling else "你好"
    assert served.ask(prompt, **sampling, **on(0)).wait().refusal is not None
    assert served.ask(max_tokens=2, **GREEDY, **on(0)).wait().refusal is None


def test_two_open_requests_of_one_number_are_refused(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "STEP_S", 0.05)  # the first is still open when the second comes
    served = serve(slow=True)
    open_channel(served)
    first = served.ask(max_tokens=50, **GREEDY, **on(3))
    wait_until(lambda: bool(first.metas))
    refused = served.ask(max_tokens=2, **GREEDY, **on(3)).wait().refused
    assert refused[0] is RefusalCode.INVALID_REQUEST
    assert "stream 3" in refused[1]
    assert first.wait().refusal is None


def test_unloading_answers_a_channel_and_what_is_on_it(serve: Callable[..., Served]) -> None:
    served = serve(slow=True)
    channel = open_channel(served)
    own = served.ask(max_tokens=LONG, **GREEDY, **on(0))
    wait_until(lambda: bool(channel.deltas(0)))
    served.service.close()
    assert own.refused[0] is RefusalCode.SHUTTING_DOWN
    assert channel.wait().refused[0] is RefusalCode.SHUTTING_DOWN


def test_a_frame_that_is_not_taken_shows_in_the_probe(served: Served) -> None:
    stuck = threading.Event()
    channel = open_channel(served)
    channel.on_send = lambda: bool(stuck.wait(20))
    wait_until(lambda: served.probe().heartbeat_age_s > 2 * HEARTBEAT_S)
    stuck.set()


def test_a_delta_that_cannot_be_made_ends_its_request_and_no_other(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(slow=True)  # or an answer may be over before any of it is delivered
    channel = open_channel(served)

    def fail_once(*_: object) -> bytes:
        monkeypatch.undo()
        raise ZeroDivisionError

    monkeypatch.setattr(module, "encode_meta", fail_once)
    failed = served.ask(max_tokens=30, return_token_ids=True, **GREEDY, **on(0)).wait()
    assert failed.refused[0] is RefusalCode.INTERNAL
    beside = served.ask(max_tokens=30, return_token_ids=True, **GREEDY, **on(1)).wait()
    assert beside.metas[-1].delivered.deltas == len(channel.deltas(1)) > 0


def test_whatever_fails_in_the_delivery_it_goes_on(serve: Callable[..., Served]) -> None:
    """Its thread once had no outermost guard: one exception silenced everybody, and nothing showed it."""

    class Broken:
        """Fails where nothing is known of its request yet."""

        @property
        def request_id(self) -> str:
            raise ZeroDivisionError

    served = serve(slow=True)
    channel = open_channel(served)
    served.service._delivery.worker.put([cast("Any", Broken())])
    own = served.ask(max_tokens=20, **GREEDY, **on(0)).wait()
    assert own.metas[-1].delivered.deltas == len(channel.deltas(0)) > 0


def test_a_delivery_that_has_ended_is_no_sign_of_life(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by what no guard catches: whoever watches the model has it loaded anew."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    class End(BaseException):
        pass

    def end(*_: object) -> None:
        raise End

    monkeypatch.setattr(served.service._delivery.worker, "_turn", end)
    wait_until(lambda: served.probe().heartbeat_age_s > 2)
    monkeypatch.undo()


def test_channels_are_bounded_and_one_of_an_id_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def new(channel_id: str) -> DeltaChannel:
        return DeltaChannel(channel_id, FakeResponder(), lambda _: None)

    monkeypatch.setattr(module, "OPEN_LIMIT", 2)
    sender = Sender(heartbeat_s=2)
    delivery = Delivery(
        lambda _: None, sender, on_first_token=lambda *_: None, on_lost=lambda _: None, heartbeat_s=2
    )
    delivery.worker.start()
    first = new("a")
    delivery.open(first)
    with pytest.raises(InvalidRequestError):
        delivery.open(new("a"))
    assert delivery.find("a") is first
    delivery.open(new("b"))
    with pytest.raises(QueueFullError):
        delivery.open(new("c"))
    delivery.close(first)
    wait_until(lambda: first.lost)
    with pytest.raises(ChannelLostError):
        delivery.find("a")
    delivery.open(new("c"))
    delivery.stop()


def test_a_channel_whose_first_frame_fails_is_not_open(served: Served) -> None:
    broken = FakeResponder(on_send=fail)
    served.send(b'{"open_channel":"c"}', responder=broken).wait()
    assert broken.refused[0] is RefusalCode.INTERNAL
    with pytest.raises(ChannelLostError):
        served.service._delivery.find("c")


def test_a_second_channel_of_an_id_is_refused_and_the_first_goes_on(served: Served) -> None:
    channel = open_channel(served)
    assert served.send(b'{"open_channel":"c"}').wait().refused[0] is RefusalCode.INVALID_REQUEST
    assert served.ask(max_tokens=2, **GREEDY, **on(0)).wait().refusal is None
    assert not channel.ended.is_set()


def test_nothing_is_attached_to_a_channel_that_was_lost() -> None:
    channel = DeltaChannel("a", FakeResponder(), lambda _: None)
    channel.lost = True
    with pytest.raises(ChannelLostError):
        channel.attach(range(1), "key")
    assert channel._streams == {}
