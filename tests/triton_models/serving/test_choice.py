"""Several answers to one request, through the whole service: plain, at once, and over a delta channel."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.triton_models.serving.conftest import Served, Slow
from tests.triton_models.serving.fakes import FakePbUtils, FakeResponder, wait_until
from tests.triton_models.serving.test_channel import on, open_channel, running
from tests.triton_models.serving.told import logprobs, told
from wire.meta import Meta, Usage
from wire.refusal import RefusalCode

LONG = 400
PROMPT = "请介绍一下你自己，然后讲一个关于山里的小狐狸的故事，越长越好。Please be brief."


def test_each_choice_is_what_a_request_with_its_seed_alone_is_told(served: Served) -> None:
    asked: dict[str, Any] = {"max_tokens": 30, "return_token_ids": True}
    answer = served.ask(n=3, seed=7, **asked)
    choices = told(answer, 3)
    alone = [served.ask(seed=7 + index, **asked).wait() for index in range(3)]
    assert [choice.token_ids for choice in choices] == [each.token_ids for each in alone]
    assert [choice.text for choice in choices] == [each.text for each in alone]
    usage = Usage(
        prompt_tokens=9, completion_tokens=sum(each.metas[-1].usage.completion_tokens for each in alone)
    )
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
def test_whole_streamed_and_over_a_channel_are_the_same(
    served: Served, n: int, alternatives: int | None, **asked: Any
) -> None:
    """Text, ids, log-probabilities, ends and usage; the cache aside, which an earlier one has filled."""
    first = next(numbers)
    channel_id = f"channel {first}"
    channel = open_channel(served, channel_id)
    asked |= {"n": n, "logprobs": alternatives, "return_token_ids": True}
    whole = served.ask(**asked, stream=False).wait()
    streamed = served.ask(**asked).wait()
    own = served.ask(**asked, **on(first, channel_id)).wait()
    one, *others = told(whole, n), told(streamed, n), told(own, n, channel, first)
    for other in others:
        assert other == one
        assert logprobs(other) == pytest.approx(logprobs(one), abs=1e-4)
    assert sum(meta != Meta() for meta in whole.metas) == 1 + n, "each choice comes whole"
    usages = [each.metas[-1].usage for each in (whole, streamed, own)]
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
    wait_until(lambda: running(served) == 0)


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
    wait_until(lambda: running(served) == 2)
    assert served.ask(n=3, max_tokens=LONG).wait().refusal[0] is RefusalCode.QUEUE_FULL
    second = served.ask(n=2, max_tokens=LONG, ignore_eos=True)
    wait_until(lambda: bool(second.metas))
    assert running(served) == 4
    code, message = served.ask(n=5).wait().refusal
    assert code is RefusalCode.INVALID_REQUEST, "it could never be admitted"
    assert "5 requests at once" in message
    first.gone = second.gone = True
    wait_until(lambda: running(served) == 0)


def test_no_two_generations_share_a_number_on_a_channel(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "STEP_S", 0.1)  # the first is still open when the others come
    served = serve(slow=True)
    channel = open_channel(served)
    first = served.ask(n=3, max_tokens=30, seed=1, ignore_eos=True, **on(3))
    wait_until(lambda: bool(first.metas))
    for number, n in ((5, 1), (2, 2), (0, 9)):
        refused = served.ask(n=n, max_tokens=2, **on(number)).wait().refusal
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
    wait_until(lambda: bool(served.service._choices) and running(served) == 0)
    released.set()
    assert told(slow, 3) == fast
