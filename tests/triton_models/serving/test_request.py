"""Requests for several answers, through the whole service: how they are answered, and how they end."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.triton_models.serving.conftest import Served, Slow
from tests.triton_models.serving.fakes import FakePbUtils, FakeResponder, wait_until
from tests.triton_models.serving.test_channel import on, open_channel
from tests.triton_models.serving.told import logprobs, told
from triton_models.engine.sequence import TokenLogprobs, TokenOutput
from triton_models.serving.chat_text import ChatText
from triton_models.serving.request import Choice
from wire.meta import Meta, Usage, encode_meta
from wire.refusal import RefusalCode
from wire.request import Generation

LONG = 400
PROMPT = "请介绍一下你自己，然后讲一个关于山里的小狐狸的故事，越长越好。Please be brief."


def test_each_choice_is_what_a_request_with_its_seed_alone_is_told(served: Served) -> None:
    asked: dict[str, Any] = {"max_tokens": 30, "return_token_ids": True}
    answer = served.ask(n=3, seed=7, **asked)
    choices = told(answer, 3)
    alone = [served.ask(seed=7 + index, **asked).wait() for index in range(3)]
    assert [choice.token_ids for choice in choices] == [each.token_ids for each in alone]
    assert [choice.text for choice in choices] == [each.text for each in alone]
    counts: list[int] = [each.metas[-1].usage.completion_tokens for each in alone]
    usage = Usage(prompt_tokens=9, completion_tokens=sum(counts))
    assert answer.metas[-1].usage == usage
    assert sum(meta.accepted is not None for meta in answer.metas) == 1


def test_behind_the_largest_seed_comes_the_smallest(served: Served) -> None:
    asked: dict[str, Any] = {"max_tokens": 20, "return_token_ids": True, "ignore_eos": True}
    _, second = told(served.ask(n=2, seed=2**63 - 1, **asked), 2)
    (alone,) = told(served.ask(seed=-(2**63), **asked), 1)
    assert second.token_ids == alone.token_ids


def test_without_a_seed_each_draws_its_own_and_at_temperature_0_all_are_equal(served: Served) -> None:
    asked: dict[str, Any] = {"n": 4, "max_tokens": 30, "return_token_ids": True, "ignore_eos": True}
    drawn = told(served.ask(temperature=2, **asked), 4)
    assert len({tuple(choice.token_ids) for choice in drawn}) == 4
    greedy = told(served.ask(temperature=0, **asked), 4)
    assert len({tuple(choice.token_ids) for choice in greedy}) == 1


numbers = itertools.count(0, 8)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(
    n=st.integers(1, 4),
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    alternatives=st.sampled_from([None, 0, 3]),
    stop=st.sampled_from([[], ["的"], ["a", "，"]]),
    max_tokens=st.integers(1, 40),
    raw=st.booleans(),
)
def test_whole_and_streamed_are_the_same(
    served: Served, n: int, alternatives: int | None, **asked: Any
) -> None:
    """Text, ids, log-probabilities, ends and usage; the cache aside, which an earlier one has filled."""
    first = next(numbers)
    channel_id = f"channel {first}"
    channel = open_channel(served, channel_id)
    asked |= {"n": n, "logprobs": alternatives, "return_token_ids": True}
    whole = served.ask(**asked).wait()
    own = served.ask(**asked, **on(first, channel_id)).wait()
    one, other = told(whole, n), told(own, n, channel, first)
    assert other == one
    assert logprobs(other) == pytest.approx(logprobs(one), abs=1e-4)
    counts = [each for each in whole.metas[1:] if each.finish_reason is None]
    assert counts == [Meta(index=each.index, tokens=each.tokens) for each in counts], "each comes whole"
    usages = [each.metas[-1].usage for each in (whole, own)]
    assert len({(usage.prompt_tokens, usage.completion_tokens) for usage in usages}) == 1


@pytest.mark.parametrize("channelled", [False, True])
def test_a_stop_string_ends_one_choice_and_the_others_go_on(served: Served, channelled: bool) -> None:
    asked: dict[str, Any] = {"n": 3, "seed": 5, "max_tokens": 40, "ignore_eos": True}
    full = [choice.text for choice in told(served.ask(**asked), 3)]
    stop = next(full[0][at : at + 2] for at in range(8, 40) if full[0][at : at + 2] not in full[1] + full[2])
    channel = open_channel(served) if channelled else None
    answer = served.ask(**asked, stop=[stop], **(on(0) if channelled else {}))
    first, *others = told(answer, 3, channel)
    assert first.text == full[0][: full[0].index(stop)]
    assert first.end == ("stop", stop)
    assert [choice.text for choice in others] == full[1:]
    assert [choice.end for choice in others] == [("length", None)] * 2
    wait_until(lambda: served.busy() == 0)


def test_the_prompt_is_computed_once(served: Served, pb_utils: FakePbUtils) -> None:
    fresh = served.ask(PROMPT, n=4, max_tokens=3, ignore_eos=True).wait().metas[-1].usage
    # All full blocks of 16 but one that would leave nothing to compute.
    shared = (fresh.prompt_tokens - 1) // 16 * 16
    assert shared > 0
    assert fresh.cached_tokens == 0, "to the client, what its own first choice computed is no cache"
    wait_until(lambda: pb_utils.metric("requests_total", finish_reason="length").value == 4)
    wait_until(lambda: pb_utils.metric("prefix_hit_tokens_total").value == 3 * shared)
    assert pb_utils.metric("prompt_tokens_total").value == 4 * fresh.prompt_tokens
    again = served.ask(PROMPT, n=2, max_tokens=3).wait().metas[-1].usage
    assert again.cached_tokens == shared


def test_choices_take_a_place_each_and_are_admitted_together_or_not_at_all(
    serve: Callable[..., Served],
) -> None:
    served = serve(slow=True, max_running=2, max_waiting=2)
    first = served.ask(n=2, max_tokens=LONG, ignore_eos=True)
    wait_until(lambda: served.busy() == 2)
    assert served.ask(n=3, max_tokens=LONG).wait().refused[0] is RefusalCode.QUEUE_FULL
    second = served.ask(n=2, max_tokens=LONG, ignore_eos=True)
    wait_until(lambda: bool(second.metas))
    assert served.busy() == 4
    code, message = served.ask(n=5).wait().refused
    assert code is RefusalCode.INVALID_REQUEST, "it could never be admitted"
    assert "5 requests at once" in message
    first.gone = second.gone = True
    wait_until(lambda: served.busy() == 0)


def test_no_two_generations_share_a_number_on_a_channel(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "STEP_S", 0.1)  # the first is still open when the others come
    served = serve(slow=True)
    channel = open_channel(served)
    first = served.ask(n=3, max_tokens=30, seed=1, ignore_eos=True, **on(3))
    wait_until(lambda: bool(first.metas))
    for number, n in ((5, 1), (2, 2), (0, 9)):
        refused = served.ask(n=n, max_tokens=2, **on(number)).wait().refused
        assert refused[0] is RefusalCode.INVALID_REQUEST
        assert "another open request's" in refused[1]
    beside = served.ask(n=3, max_tokens=30, seed=1, ignore_eos=True, **on(6))
    assert told(first, 3, channel, 3) == told(beside, 3, channel, 6)


def test_more_choices_than_run_at_once_come_one_after_the_other(serve: Callable[..., Served]) -> None:
    served = serve(max_running=2)
    asked: dict[str, Any] = {"n": 7, "seed": 3, "max_tokens": 12, "return_token_ids": True}
    few = told(served.ask(**asked), 7)
    assert few == told(serve().ask(**asked), 7)


def test_a_choice_ends_once_however_far_the_engine_is_ahead(served: Served) -> None:
    asked: dict[str, Any] = {"n": 3, "seed": 5, "max_tokens": 40, "ignore_eos": True}
    fast = told(served.ask(**asked, stop=["的"]), 3)
    released = threading.Event()
    reader = FakeResponder(on_send=lambda: bool(released.wait(20)))
    slow = served.ask(responder=reader, **asked, stop=["的"])
    wait_until(lambda: bool(served.service._choices) and served.service.stats().running == 0)
    wait_until(lambda: served.service.stats().waiting == 0)
    released.set()
    assert told(slow, 3) == fast


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
    wait_until(lambda: bool(channel.deltas(2)) if channel else bool(answer.metas))
    end(served, answer)
    assert answer.wait().refused[0] is RefusalCode.CANCELLED
    wait_until(lambda: served.busy() == 0)
    wait_until(lambda: pb_utils.metric("requests_total", finish_reason="cancelled").value == 4)
    assert (served.service._choices, served.service._requests) == ({}, {})
    if channelled:
        assert served.ask(n=4, max_tokens=2, **on(0)).wait().refusal is None, "its numbers are free again"


def test_the_deadline_of_a_choice_that_waits_is_the_requests(serve: Callable[..., Served]) -> None:
    served = serve(slow=True, max_running=1)
    answer = served.ask(n=2, max_tokens=LONG, ignore_eos=True, deadline_ms=300).wait()
    assert answer.refused[0] is RefusalCode.DEADLINE_EXCEEDED
    wait_until(lambda: served.busy() == 0)


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
    assert failed.refused[0] is RefusalCode.INTERNAL
    wait_until(lambda: served.busy() == 0)
    wait_until(lambda: pb_utils.metric("requests_total", finish_reason="cancelled").value == 2)
    wait_until(lambda: pb_utils.metric("requests_total", finish_reason="error").value == 1)
    assert (served.service._choices, served.service._requests) == ({}, {})
    assert told(served.ask(n=3, max_tokens=3), 3)


def test_a_reader_that_fails_under_one_choice_ends_all(serve: Callable[..., Served]) -> None:
    sends = itertools.count()

    def fail_later() -> None:
        if next(sends) == 2:
            raise OSError("the stream is gone")

    served = serve(slow=True)
    broken = served.ask(responder=FakeResponder(on_send=fail_later), n=4, max_tokens=LONG, ignore_eos=True)
    assert broken.wait().refused[0] is RefusalCode.INTERNAL
    wait_until(lambda: served.busy() == 0)
    assert (served.service._choices, served.service._requests) == ({}, {})


def test_a_lost_channel_ends_every_choice_on_it(serve: Callable[..., Served]) -> None:
    served = serve(slow=True)
    channel = open_channel(served)
    own = served.ask(n=3, max_tokens=LONG, ignore_eos=True, **on(0))
    wait_until(lambda: bool(channel.deltas(2)))
    channel.gone = True
    assert own.wait().refused[0] is RefusalCode.CHANNEL_LOST
    wait_until(lambda: served.busy() == 0)


def test_nothing_of_a_request_that_was_refused_goes_to_the_channel(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers may be another's by then."""
    served = serve(slow=True)
    channel = open_channel(served)
    served.ask(n=2, max_tokens=LONG, ignore_eos=True, **on(0))
    wait_until(lambda: bool(channel.deltas(1)))
    (request,) = served.service._requests.values()
    choice = request.choices[1]
    monkeypatch.setattr(served.service, "choice_closed", lambda _: None)  # so that the engine goes on
    served.service._sender.refuse(request, RefusalCode.INTERNAL, "for this test")
    for _ in range(2):
        sampled, sent = choice.completion_tokens, len(channel.deltas(1))
        wait_until(lambda sampled=sampled: choice.completion_tokens > sampled + 5)
    assert choice.sendable
    assert len(channel.deltas(1)) == sent


class Joined(str):
    """A text that cannot be appended to another one: doing so for each token copies the whole answer."""

    __slots__ = ()

    def __radd__(self, other: str) -> str:
        raise AssertionError("copied")


def test_a_whole_answer_is_put_together_once(text: ChatText, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Generation(max_tokens=50)
    choice = Choice("r", 0, asked, text.tokenizer, text.answer(asked), echo="echo ")
    push = choice._stream.push
    monkeypatch.setattr(choice._stream, "push", lambda token: replace(push(token), text=Joined("ab")))
    for number in range(50):
        choice.take(TokenOutput(request_id="r", prompt_tokens=3, token_id=300 + number))
    assert choice.next_delta()[:2] == ("echo " + 50 * "ab", 50)
    assert not choice.sendable


def test_what_cannot_be_sampled_has_the_floor_for_its_log_probability(text: ChatText) -> None:
    """JSON has no infinity."""
    asked = Generation(request_id="r", logprobs=1)
    choice = Choice("r", 0, asked, text.tokenizer, text.answer(asked))
    impossible = float("-inf")
    logprobs = TokenLogprobs(id=300, logprob=impossible, top=((300, impossible), (301, -1.5)))
    choice.take(TokenOutput(request_id="r", prompt_tokens=3, token_id=300, logprobs=logprobs))
    _, meta = choice.last_response()
    (token,) = meta.logprobs or []
    assert token.logprob == -9999
    assert [top.logprob for top in token.top] == [-9999, -1.5]
    assert b"null" not in encode_meta(meta)
