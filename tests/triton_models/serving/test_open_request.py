"""How requests for several answers end before these are complete."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.triton_models.serving.conftest import Served, Slow
from tests.triton_models.serving.fakes import FakePbUtils, FakeResponder, wait_until
from tests.triton_models.serving.test_channel import on, open_channel, running
from tests.triton_models.serving.told import told
from wire.refusal import RefusalCode

LONG = 400


def end_by_cancel(served: Served, answer: FakeResponder) -> None:
    assert served.send(b'{"cancel":"mine"}').wait().metas[0].cancelled


def end_by_hang_up(served: Served, answer: FakeResponder) -> None:
    answer.gone = True


@pytest.mark.parametrize("end", [end_by_cancel, end_by_hang_up])
@pytest.mark.parametrize("channelled", [False, True])
def test_a_client_that_leaves_ends_every_choice(
    serve: Callable[..., Served], pb_utils: FakePbUtils, end: Callable[..., None], channelled: bool
) -> None:
    served = serve(slow=True, max_running=3)  # one of the choices waits
    channel = open_channel(served) if channelled else None
    answer = served.ask(
        n=4, max_tokens=LONG, ignore_eos=True, request_id="mine", **(on(0) if channelled else {})
    )
    wait_until(lambda: bool(channel.deltas(2)) if channel else len(answer.metas) > 4)
    end(served, answer)
    assert answer.wait().refusal[0] is RefusalCode.CANCELLED
    wait_until(lambda: running(served) == 0)
    wait_until(lambda: pb_utils.metric("requests_total", finish_reason="cancelled").value == 4)
    assert served.service._choices == served.service._requests == {}
    if channelled:
        assert served.ask(n=4, max_tokens=2, **on(0)).wait().refusal is None, "its numbers are free again"


def test_the_deadline_of_a_choice_that_waits_is_the_requests(serve: Callable[..., Served]) -> None:
    served = serve(slow=True, max_running=1)
    answer = served.ask(n=2, max_tokens=LONG, ignore_eos=True, deadline_ms=300).wait()
    assert answer.refusal[0] is RefusalCode.DEADLINE_EXCEEDED
    wait_until(lambda: running(served) == 0)


@pytest.mark.parametrize("channelled", [False, True])
def test_an_error_of_one_choice_ends_the_request_and_leaves_nothing_of_the_others(
    serve: Callable[..., Served],
    pb_utils: FakePbUtils,
    monkeypatch: pytest.MonkeyPatch,
    channelled: bool,
) -> None:
    steps = itertools.count()

    def spoil(self: Slow, *arguments: Any) -> torch.Tensor:
        hidden = self._model.forward(*arguments)
        if next(steps) == 5:
            hidden[1] = torch.nan
        return hidden

    monkeypatch.setattr(Slow, "forward", spoil)
    served = serve(slow=True)
    if channelled:
        open_channel(served)
    where = on(0) if channelled else {}
    failed = served.ask(n=3, max_tokens=LONG, ignore_eos=True, **where).wait()
    assert failed.refusal[0] is RefusalCode.INTERNAL
    wait_until(lambda: running(served) == 0)
    wait_until(lambda: pb_utils.metric("requests_total", finish_reason="cancelled").value == 2)
    wait_until(lambda: pb_utils.metric("requests_total", finish_reason="error").value == 1)
    assert served.service._choices == served.service._requests == {}
    assert told(served.ask(n=3, max_tokens=3, stream=False), 3)


def test_a_reader_that_fails_under_one_choice_ends_all(serve: Callable[..., Served]) -> None:
    sends = itertools.count()

    def fail_later() -> None:
        if next(sends) == 6:
            raise OSError("the stream is gone")

    served = serve(slow=True)
    broken = served.ask(responder=FakeResponder(on_send=fail_later), n=4, max_tokens=LONG, ignore_eos=True)
    assert broken.wait().refusal[0] is RefusalCode.INTERNAL
    wait_until(lambda: running(served) == 0)
    assert served.service._choices == served.service._requests == {}


def test_a_lost_channel_ends_every_choice_on_it(serve: Callable[..., Served]) -> None:
    served = serve(slow=True)
    channel = open_channel(served)
    own = served.ask(n=3, max_tokens=LONG, ignore_eos=True, **on(0))
    wait_until(lambda: bool(channel.deltas(2)))
    channel.gone = True
    assert own.wait().refusal[0] is RefusalCode.CHANNEL_LOST
    wait_until(lambda: running(served) == 0)


def test_nothing_of_a_request_that_was_refused_goes_to_the_channel(serve: Callable[..., Served]) -> None:
    """Its numbers may be another's by then."""
    served = serve(slow=True)
    channel = open_channel(served)
    served.ask(n=2, max_tokens=LONG, ignore_eos=True, **on(0))
    wait_until(lambda: bool(channel.deltas(1)))
    (request,) = served.service._requests.values()
    with request.lock:
        request.refuse(RefusalCode.INTERNAL, "for this test")
    answer = request.choices[1].answer
    for _ in range(2):
        sampled, sent = answer.completion_tokens, len(channel.deltas(1))
        wait_until(lambda sampled=sampled: answer.completion_tokens > sampled + 5)
    assert answer.sendable
    assert len(channel.deltas(1)) == sent
