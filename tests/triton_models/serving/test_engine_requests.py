"""Beam searches of a service: what becomes of their answers. (Limits on tokens: `test_token_limits`.)"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.triton_models.serving.conftest import Served
from tests.triton_models.serving.fakes import FakeResponder, wait_until
from wire.meta import Meta
from wire.refusal import RefusalCode

SEARCH: dict[str, Any] = {"beam_width": 4, "n": 3, "max_tokens": 12, "return_token_ids": True}


def lasts(answer: FakeResponder) -> list[tuple[str, Meta]]:
    """The last response of each choice, in the choices' order."""
    ends = [(text, meta) for text, meta in answer.responses if meta.finish_reason is not None]
    return sorted(ends, key=lambda end: end[1].index)


def ids_of(answer: FakeResponder) -> list[list[int] | None]:
    assert answer.refusal is None, answer.refusal
    return [meta.token_ids for _, meta in lasts(answer)]


def test_the_best_come_as_choices(served: Served) -> None:
    answer = served.ask(**SEARCH, logprobs=1).wait()
    found = ids_of(answer)
    assert len(found) == len({str(ids) for ids in found}) == 3
    scores = [sum(each.logprob for each in meta.logprobs or ()) for _, meta in lasts(answer)]
    assert all(len(ids or ()) == 12 for ids in found)
    assert scores == sorted(scores, reverse=True)
    greedy = served.ask(temperature=0, max_tokens=12, logprobs=1).wait()
    assert scores[0] > sum(each.logprob for each in greedy.metas[-1].logprobs or ())
    usage = answer.metas[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (9, 36)
    wider = served.ask(**SEARCH | {"n": 4}).wait()
    assert ids_of(wider)[:3] == found


def test_a_streamed_search_comes_complete_at_its_end(served: Served) -> None:
    whole = served.ask(**SEARCH, echo=True, raw=True).wait()
    streamed = served.ask(**SEARCH, echo=True, raw=True, streamed=True).wait()
    assert [(text, meta.token_ids) for text, meta in lasts(streamed)] == [
        (text, meta.token_ids) for text, meta in lasts(whole)
    ]
    assert streamed.channel is not None
    assert not any(streamed.channel.deltas(stream) for stream in range(3))
    assert [meta.delivered.deltas for _, meta in lasts(streamed) if meta.delivered] == [0] * 3


def test_stop_ids_end_beams_and_stop_strings_cut_answers(served: Served) -> None:
    free = served.ask(**SEARCH).wait()
    ids = ids_of(free)[0] or []
    stopped = served.ask(**SEARCH, stop_token_ids=ids[3:6], length_penalty=0.0).wait()
    found = [(meta.token_ids or [])[-1] for _, meta in lasts(stopped) if meta.finish_reason == "stop"]
    assert set(found) <= set(ids[3:6])
    assert found == [meta.stop_reason for _, meta in lasts(stopped) if meta.finish_reason == "stop"] != []
    text = lasts(free)[0][0]
    stop = text[3:5]
    cut = served.ask(**SEARCH, stop=[stop]).wait()
    first, last = lasts(cut)[0]
    assert first == text[: text.index(stop)]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_shortest_search(served: Served, max_tokens: int) -> None:
    answer = served.ask(**SEARCH | {"max_tokens": max_tokens}).wait()
    assert [len(ids or ()) for ids in ids_of(answer)] == [max_tokens] * 3


def test_it_begins_anew_where_it_is_resumed(served: Served) -> None:
    """Only the choices come that the client has not yet."""
    expected = ids_of(served.ask(**SEARCH).wait())
    again = served.ask(**SEARCH, seed=1, generated=[None, [], []]).wait()
    assert ids_of(again) == expected[1:]
    assert [meta.index for _, meta in lasts(again)] == [1, 2]


def test_the_penalty_on_length_and_the_end_reach_the_search(served: Served) -> None:
    # Half of the vocabulary stops, so that answers of many lengths compete.
    many = SEARCH | {"stop_token_ids": list(range(0, 250, 2)), "beam_width": 8, "n": 1, "max_tokens": 30}
    lengths = {
        (penalty, early): len(
            ids_of(served.ask(**many, length_penalty=penalty, early_stopping=early).wait())[0] or ()
        )
        for penalty in (-5.0, 5.0)
        for early in (True, "never")
    }
    assert lengths[-5.0, "never"] < lengths[5.0, "never"]
    assert lengths[5.0, True] <= lengths[5.0, "never"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_hang_up_stops_it(serve: Callable[..., Served], streamed: bool) -> None:
    served = serve(slow=True)
    answer = served.ask(**SEARCH | {"max_tokens": 400}, ignore_eos=True, streamed=streamed)
    wait_until(lambda: served.service.stats().running == 4)
    answer.gone = True
    assert answer.wait().refused[0] is RefusalCode.CANCELLED
    wait_until(lambda: served.busy() == 0)
    assert served.service.stats().kv_blocks_used == 0


def test_a_deadline_ends_it(serve: Callable[..., Served]) -> None:
    answer = serve(slow=True).ask(**SEARCH | {"max_tokens": 400}, ignore_eos=True, deadline_ms=200)
    assert answer.wait().refused[0] is RefusalCode.DEADLINE_EXCEEDED


def test_the_engines_counts_are_those_of_what_was_answered(served: Served) -> None:
    for _ in range(2):
        answer = served.ask(**SEARCH, prompt="你好" * 40).wait()
    usage = answer.metas[-1].usage
    assert usage is not None
    assert usage.prompt_tokens - 16 <= usage.cached_tokens < usage.prompt_tokens
    assert answer.metas[-1].queue_s is not None
