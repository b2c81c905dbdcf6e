import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.triton_models.serving.conftest import Served
from tests.triton_models.serving.fakes import FakePbUtils, FakeResponder, wait_until
from triton_models.serving import channel
from triton_models.serving.intake import Arrival, Inputs, Intake
from triton_models.serving.request import OpenRequest
from wire.meta import Meta
from wire.refusal import RefusalCode
from wire.request import ChannelStream

LONG = 400


def fail() -> None:
    raise OSError("the stream is gone")


def test_accepted_comes_first_and_the_final_response_last(served: Served) -> None:
    answer = served.ask(max_tokens=8, temperature=0, request_id="mine", ignore_eos=True).wait()
    first, *between, last = answer.metas
    assert first.accepted.request_id == "mine"
    assert first.accepted.prompt_tokens == 9
    assert all(meta.accepted is None and meta.finish_reason is None for meta in between)
    assert last.finish_reason == "length"
    assert last.usage.prompt_tokens == 9
    assert last.usage.completion_tokens == 8
    assert last.queue_s is not None
    assert last.queue_s >= 0
    assert sum(meta.tokens for meta in answer.metas) == 8


def test_a_request_that_is_not_streamed_gets_its_answer_with_its_end(served: Served) -> None:
    asked: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    streamed = served.ask(**asked, streamed=True).wait()
    whole = served.ask(**asked).wait()
    counts = whole.metas[1:-1]
    assert counts == [Meta(tokens=each.tokens) for each in counts]
    assert whole.text == streamed.text
    assert whole.token_ids == streamed.token_ids
    assert whole.metas[-1].usage == streamed.metas[-1].usage


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_waits_for_the_end_is_told_how_many_tokens_there_are(
    served: Served, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first token on, now and then: whoever leaves is to know what was sampled for it."""
    asked: dict[str, Any] = {"max_tokens": LONG, "temperature": 0, "ignore_eos": True, "n": n}
    rare = served.ask(**asked).wait()
    monkeypatch.setattr(channel, "_COUNT_PERIOD_S", 0.0)
    often = served.ask(**asked).wait()
    for answer in (rare, often):
        assert (
            sum(meta.tokens for meta in answer.metas) == n * LONG == answer.metas[-1].usage.completion_tokens
        )
    for index in range(n):
        of_choice = [meta.tokens for meta in often.metas[1:] if meta.index == index]
        assert len(of_choice) > 2, "not with its end alone"
        assert min(of_choice[:-1]) > 0


def test_a_stop_string_ends_the_answer_at_the_token_that_completed_it(served: Served) -> None:
    """However late it is noticed: the engine is held up behind a slow reader here, and runs far ahead."""
    full = served.ask(max_tokens=60, temperature=0, ignore_eos=True).wait().text
    stop = full[20:23]
    fast = served.ask(max_tokens=60, temperature=0, ignore_eos=True, stop=[stop]).wait()
    reading, released = threading.Event(), threading.Event()

    def read_slowly() -> None:
        reading.set()
        released.wait()

    slow_reader = FakeResponder(on_send=read_slowly)
    slow = served.ask(responder=slow_reader, max_tokens=60, temperature=0, ignore_eos=True, stop=[stop])
    reading.wait()  # for `accepted`: the engine has the request
    wait_until(lambda: (stats := served.service.stats()).running == stats.waiting == 0)
    released.set()
    slow.wait()
    for answer in (fast, slow):
        assert answer.text == full[: full.index(stop)]
        assert answer.metas[-1].finish_reason == "stop"
        assert answer.metas[-1].stop_reason == stop
    assert slow.metas[-1].usage == fast.metas[-1].usage
    assert fast.metas[-1].usage.completion_tokens < 60


def test_the_token_that_stops_is_counted_but_no_text(served: Served) -> None:
    full = served.ask(max_tokens=6, temperature=0, ignore_eos=True, return_token_ids=True).wait()
    stop_id = full.token_ids[3]
    answer = served.ask(
        max_tokens=6,
        temperature=0,
        stop_token_ids=[stop_id],
        ignore_eos=True,
        return_token_ids=True,
        logprobs=2,
    ).wait()
    assert answer.token_ids == full.token_ids[:4]
    assert answer.metas[-1].stop_reason == stop_id
    assert answer.metas[-1].usage.completion_tokens == 4
    assert sum(len(meta.logprobs or []) for meta in answer.metas) == 3
    assert full.text.startswith(answer.text)


@pytest.mark.parametrize(
    ("sampling", "history", "code", "words"),
    [
        (b"{", b"", RefusalCode.INVALID_REQUEST, "sampling"),
        (b'{"temperature":2.5}', b"", RefusalCode.INVALID_REQUEST, "temperature"),
        (b'{"frobnicate":1}', b"", RefusalCode.INVALID_REQUEST, "frobnicate"),
        (b'{"v":2}', b"", RefusalCode.INVALID_REQUEST, "v"),
        (b'{"prompt_token_ids":[5000]}', b"", RefusalCode.INVALID_REQUEST, "prompt"),
        (
            b'{"prompt_token_ids":[5]}',
            b'[{"role":"user","content":"x"}]',
            RefusalCode.INVALID_REQUEST,
            "prompt_token_ids",
        ),
        (b"{}", b"[[1]]", RefusalCode.INVALID_REQUEST, "object"),
        (b"{}", b'[{"role":"nobody","content":""}]', RefusalCode.INVALID_REQUEST, "role"),
        (b'{"max_tokens":600}', b"", RefusalCode.CONTEXT_LENGTH_EXCEEDED, "600"),
        (b'{"min_tokens":5,"max_tokens":4}', b"", RefusalCode.INVALID_REQUEST, "min_tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    served: Served, sampling: bytes, history: bytes, code: RefusalCode, words: str
) -> None:
    answer = served.send(sampling, history=history).wait()
    assert answer.responses == []
    assert answer.refusal is not None
    assert answer.refused[0] == code
    assert words in answer.refused[1]


def test_a_prompt_over_the_context_is_refused(served: Served) -> None:
    for prompt in ("你好" * 600, "x" * 1_000_000):
        answer = served.ask(prompt).wait()
        assert answer.refusal is not None
        assert answer.refused[0] is RefusalCode.CONTEXT_LENGTH_EXCEEDED
        assert answer.refused[1].startswith("This model's maximum context length is 512 tokens")


def test_bytes_that_are_no_text_are_refused(served: Served) -> None:
    for inputs in (Inputs(b"\xff", b"", b""), Inputs(b"", b"", b'{"request_id":"\xff"}'), None):
        responder = FakeResponder()
        served.service.submit([Arrival(responder, inputs)])
        assert responder.wait().refused[0] is RefusalCode.INVALID_REQUEST


def test_a_full_engine_refuses_and_still_answers_probes_and_cancels(serve: Callable[..., Served]) -> None:
    served = serve(slow=True, max_running=2, max_waiting=2)
    admitted = [served.ask(max_tokens=LONG, ignore_eos=True, request_id=f"r{n}") for n in range(4)]
    wait_until(lambda: all(answer.metas for answer in admitted) and served.probe().running == 2)
    refused = served.ask(max_tokens=LONG).wait()
    assert refused.refused[0] is RefusalCode.QUEUE_FULL
    report = served.probe()
    assert (report.running, report.waiting, report.begun) == (2, 2, 5)
    assert (report.format, report.max_context) == ("chatglm3", 512)
    for number, each in enumerate(admitted):
        cancel = served.send(json.dumps({"cancel": f"r{number}"}).encode()).wait()
        assert cancel.metas[0].cancelled is True
        assert each.wait().refused[0] is RefusalCode.CANCELLED
    unknown = served.send(b'{"cancel":"nobody"}').wait()
    assert unknown.metas[0].cancelled is False
    wait_until(lambda: served.probe().waiting == served.probe().running == 0)


def test_a_client_that_left_frees_its_place(serve: Callable[..., Served], pb_utils: FakePbUtils) -> None:
    served = serve(slow=True, max_running=1)
    running, waiting = (served.ask(max_tokens=LONG, ignore_eos=True) for _ in range(2))
    wait_until(lambda: served.probe().waiting == 1)
    waiting.gone = running.gone = True
    for each in (waiting, running):
        assert each.wait().refused[0] is RefusalCode.CANCELLED
    wait_until(lambda: served.probe().running == 0)
    wait_until(lambda: pb_utils.metric("requests_total", finish_reason="cancelled").value == 2)
    wait_until(lambda: pb_utils.metric("kv_blocks_used").value == 0)


def test_a_request_that_waits_hears_heartbeats(serve: Callable[..., Served]) -> None:
    served = serve(slow=True, max_running=1)
    running = served.ask(max_tokens=LONG, ignore_eos=True)
    waiting = served.ask(max_tokens=2, ignore_eos=True)
    wait_until(lambda: bool(waiting.metas))
    assert waiting.metas[0].accepted is not None
    heard = waiting.heartbeats
    wait_until(lambda: waiting.heartbeats >= heard + 2)
    running.gone = True
    waiting.wait()
    assert waiting.metas[-1].usage.completion_tokens == 2


def test_a_burst_is_on_the_waiting_list_before_it_is_told_so(serve: Callable[..., Served]) -> None:
    """Each request once waited for the response to the one before it."""
    served, go = serve(slow=True, max_running=1), threading.Event()
    answers = [
        served.ask(responder=FakeResponder(on_send=lambda: go.wait(20)), max_tokens=LONG, ignore_eos=True)
        for _ in range(64)
    ]
    wait_until(lambda: served.service.stats().running + served.service.stats().waiting == 64)
    assert not any(answer.metas for answer in answers)
    go.set()
    for answer in answers:
        answer.gone = True


def test_the_deadline_acts_on_a_request_that_waits(serve: Callable[..., Served]) -> None:
    served = serve(slow=True, max_running=1)
    running = served.ask(max_tokens=LONG, ignore_eos=True)
    late = served.ask(max_tokens=2, deadline_ms=50).wait()
    assert late.refused[0] is RefusalCode.DEADLINE_EXCEEDED
    running.gone = True
    running.wait()


def test_one_failing_reader_hurts_nobody_else(served: Served) -> None:
    broken = served.ask(responder=FakeResponder(on_send=fail), max_tokens=LONG, ignore_eos=True).wait()
    fine = served.ask(max_tokens=5, ignore_eos=True).wait()
    assert broken.refused[0] is RefusalCode.INTERNAL
    assert "gone" not in broken.refused[1]
    assert fine.metas[-1].finish_reason == "length"
    wait_until(lambda: served.probe().running == 0)


def test_a_request_whose_acceptance_cannot_be_sent_leaves_the_engine(
    serve: Callable[..., Served], pb_utils: FakePbUtils
) -> None:
    served = serve(slow=True)
    broken = served.ask(responder=FakeResponder(on_send=fail), max_tokens=LONG, ignore_eos=True).wait()
    assert broken.refused[0] is RefusalCode.INTERNAL
    wait_until(lambda: served.probe().running == served.probe().waiting == 0)
    served.service.close()
    assert len(pb_utils.metric("batch_size").observations) < LONG
    assert pb_utils.metric("prompt_tokens_total").value == 0


def test_a_final_response_that_cannot_be_sent_is_a_refusal(served: Served) -> None:
    accepted = threading.Event()

    def fail_after_acceptance() -> None:
        if accepted.is_set():
            fail()
        accepted.set()

    broken = FakeResponder(on_send=fail_after_acceptance)
    served.ask(responder=broken, max_tokens=3).wait()
    assert broken.refused[0] is RefusalCode.INTERNAL


def test_an_engine_that_gave_up_refuses_probes(served: Served) -> None:
    served.probe()
    served.service._loop.stop()
    refused = served.send(b'{"probe":true}').wait()
    assert refused.refused[0] is RefusalCode.UNAVAILABLE
    assert "stopped" in refused.refused[1]
    assert served.ask().wait().refused[0] is RefusalCode.SHUTTING_DOWN


def test_closing_answers_everything(serve: Callable[..., Served], pb_utils: FakePbUtils) -> None:
    served = serve(slow=True, max_running=1)
    answers = [served.ask(max_tokens=LONG, ignore_eos=True) for _ in range(3)]
    wait_until(lambda: all(answer.metas for answer in answers))
    served.service.close()
    for answer in answers:
        assert answer.wait().refused[0] is RefusalCode.SHUTTING_DOWN
    assert pb_utils.metric("requests_total", finish_reason="shutdown").value == 3


def test_metrics_say_what_happened_and_only_one_thread_touches_them(
    serve: Callable[..., Served], pb_utils: FakePbUtils
) -> None:
    served = serve()
    for _ in range(3):
        served.ask(max_tokens=5, temperature=0, ignore_eos=True).wait()
    wait_until(lambda: pb_utils.metric("requests_total", finish_reason="length").value == 3)
    wait_until(lambda: pb_utils.metric("heartbeat_timestamp_seconds").value > 0)
    wait_until(lambda: pb_utils.metric("kv_blocks").value > 0)
    served.service.close()
    assert pb_utils.metric("prompt_tokens_total", model="glm", version="1").value == 27
    assert pb_utils.metric("generated_tokens_total").value == 15
    assert len(pb_utils.metric("time_to_first_token_seconds").observations) == 3
    assert len(pb_utils.metric("queue_seconds").observations) == 3
    assert len(pb_utils.metric("step_seconds").observations) == 15
    assert sum(pb_utils.metric("batch_size").observations) == 15
    assert pb_utils.metric("kv_blocks").value == 0
    assert len(pb_utils.MetricFamily.threads) == 1


def test_a_bound_on_all_tokens_cuts_the_answer_and_is_never_over_the_context(served: Served) -> None:
    """The prompt has 9 tokens and the context is 512."""
    for total, new in ((12, 3), (512, 503), (100_000, 503)):
        answer = served.ask(max_total_tokens=total, ignore_eos=True).wait()
        assert answer.metas[-1].usage.completion_tokens == new
    least = served.ask(max_total_tokens=512, max_tokens=600, min_tokens=600, ignore_eos=True).wait()
    assert least.metas[-1].usage.completion_tokens == 503
    assert served.ask(max_total_tokens=512, max_tokens=4, min_tokens=5).wait().refusal
    both = served.ask(max_total_tokens=100_000, max_tokens=4, ignore_eos=True).wait()
    assert both.metas[-1].usage.completion_tokens == 4


def test_a_bound_on_all_tokens_that_leaves_no_room_is_refused(served: Served) -> None:
    for prompt, total, words in (
        ("你好", 9, "together may have 9"),
        ("你好" * 600, 10_000, "context length is 512"),
    ):
        refused = served.ask(prompt, max_total_tokens=total).wait().refused
        assert refused[0] is RefusalCode.CONTEXT_LENGTH_EXCEEDED
        assert words in refused[1]


def test_a_response_that_is_not_taken_is_no_sign_of_life(served: Served, pb_utils: FakePbUtils) -> None:
    """Then nothing leaves, however the engine runs: the metric shows it that containers watch."""
    stuck = threading.Event()
    answer = served.ask(responder=FakeResponder(on_send=lambda: stuck.wait(20)), max_tokens=2)
    wait_until(lambda: time.monotonic() - served.service.heartbeat > 1)
    heartbeat = pb_utils.metric("heartbeat_timestamp_seconds")
    wait_until(lambda: time.time() - heartbeat.value > 1)
    stuck.set()
    answer.wait()
    wait_until(lambda: served.probe().heartbeat_age_s < 0.6)
    wait_until(lambda: time.time() - heartbeat.value < 1)


def test_a_request_that_fails_before_it_is_prepared_is_answered_once_and_forgotten(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception between registering a request and starting its work once left it open for ever."""

    def fail_to_begin(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(Intake, "begin", fail_to_begin)
    answer = served.ask(max_tokens=2).wait()
    assert answer.refused[0] is RefusalCode.INTERNAL
    assert "futures" not in answer.refused[1]
    monkeypatch.undo()
    assert served.ask(max_tokens=2).wait().refusal is None
    wait_until(lambda: not served.service._requests)
    time.sleep(0.3)  # as long as it takes to ask about an open request: that would fail in the responder
    assert answer.responses == []


def test_a_request_whose_heartbeat_cannot_be_sent_while_it_is_prepared_leaves_the_engine(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, released = serve(slow=True), threading.Event()
    render = served.service._prompt_ids

    def slow(*arguments: Any) -> Any:
        released.wait()
        return render(*arguments)

    monkeypatch.setattr(served.service, "_prompt_ids", slow)
    broken = FakeResponder()
    monkeypatch.setattr(broken, "send", lambda *_, **__: fail())
    served.ask(responder=broken, streamed=True, max_tokens=LONG, ignore_eos=True).wait()
    released.set()
    served.ask(max_tokens=1).wait()
    wait_until(lambda: not served.service._choices)
    assert served.busy() == 0
    same = ChannelStream(id="channel 0", stream=0)
    assert served.ask(channel=same, max_tokens=1).wait().refusal is None


@pytest.mark.parametrize("owner_fails", [False, True])
def test_an_end_that_fails_leaves_no_request_open(
    served: Served, monkeypatch: pytest.MonkeyPatch, owner_fails: bool
) -> None:
    def fail_to_end(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    place = (served.service, "choice_closed") if owner_fails else (OpenRequest, "_usage")
    with monkeypatch.context() as patched:
        patched.setattr(*place, fail_to_end)
        answer = served.ask(max_tokens=2).wait()
        assert (answer.refusal is None) == owner_fails
        wait_until(lambda: not served.service._requests)
    assert served.ask(max_tokens=2).wait().refusal is None


def test_what_is_answered_at_once_does_not_wait_for_a_prompt_that_is_prepared(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparing, released = threading.Event(), threading.Event()
    render = served.service._prompt_ids

    def slow(*arguments: Any) -> Any:
        preparing.set()
        released.wait()
        return render(*arguments)

    monkeypatch.setattr(served.service, "_prompt_ids", slow)
    waiting = served.ask(max_tokens=1, request_id="slow")
    preparing.wait()
    assert served.probe().format == "chatglm3"
    assert served.open_channel("another").frames
    assert served.send(b'{"cancel":"slow"}').wait().metas[0].cancelled
    released.set()
    assert waiting.wait().refusal is not None


def test_a_prompt_over_the_context_is_refused_before_anything_is_made_of_it_for_each_choice(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(served.service, "_choice", lambda key, *_: made.append(key))
    ids = [5] * 100_000
    answer = served.ask("", prompt_token_ids=ids, raw=True, echo=True, n=128, max_tokens=1).wait()
    assert answer.refusal is not None
    assert answer.refused[0] is RefusalCode.CONTEXT_LENGTH_EXCEEDED
    assert not made
