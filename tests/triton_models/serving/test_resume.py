"""Answers that go on after tokens that another server has sampled."""

import json
from typing import Any

import pytest

from tests.triton_models.serving.conftest import Served
from tests.triton_models.serving.fakes import FakeResponder
from wire.grammar import Grammar
from wire.meta import Meta
from wire.refusal import RefusalCode
from wire.request import ChannelStream, Generation, encode_request

LIST = {"type": "array", "items": {"enum": ["x", "你好"]}, "minItems": 4, "maxItems": 9}

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01},
    "penalised": {
        "temperature": 0,
        "presence_penalty": 1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
    "by a grammar": {
        "temperature": 2,
        "grammar": Grammar("json_schema", json.dumps(LIST)),
        "ignore_eos": False,
    },
    "without words": {"temperature": 1, "bad_words": ["a", "的"], "allowed_token_ids": list(range(3, 60))},
    "with its prompt": {"temperature": 1, "raw": True, "echo": True, "prompt_logprobs": 1},
    "with special tokens": {"temperature": 2, "show_special": True, "min_tokens": 9, "ignore_eos": False},
}


def ask(served: Served, **asked: Any) -> FakeResponder:
    """Ask over a channel with the tokens' ids, as a gateway does."""
    number = next(served._channels)
    responder = FakeResponder(channel=served.open_channel(f"channel {number}"))
    channel = ChannelStream(id=f"channel {number}", stream=0, ids=True)
    sampling = {"seed": 11, "max_tokens": 40, "ignore_eos": True, "logprobs": 2} | asked
    served.send(encode_request(Generation(channel=channel, **sampling)), "你好", responder)
    responder.wait()
    assert responder.refusal is None, responder.refusal
    return responder


def ids_of(answer: FakeResponder, stream: int = 0) -> list[list[int]]:
    """The ids of each delta."""
    assert answer.channel is not None
    frames = [frame for frame in answer.channel.frames if stream in frame.streams]
    return [frame.ids[frame.streams.index(stream)] for frame in frames]


def logprobs_of(metas: list[Meta | None]) -> list[tuple[int, float]]:
    return [(each.id, each.logprob) for meta in metas if meta for each in meta.logprobs or []]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_rest_is_what_it_would_have_been(served: Served, kind: dict[str, Any]) -> None:
    full = ask(served, **kind)
    assert full.channel is not None
    sent, ids = full.channel.deltas(0), ids_of(full)
    assert [len(each) for each in ids] == [tokens for _, tokens, _ in sent]
    for cut in {1, len(sent) // 2, len(sent) - 1}:
        had = [token_id for each in ids[:cut] for token_id in each]
        rest = ask(served, generated=[had], **kind)
        assert rest.channel is not None
        assert "".join(text for text, *_ in sent[:cut]) + rest.text == full.text
        last, whole = rest.metas[-1], full.metas[-1]
        assert (last.finish_reason, last.stop_reason) == (whole.finish_reason, whole.stop_reason)
        assert last.usage is not None
        assert whole.usage is not None
        assert last.usage.completion_tokens == whole.usage.completion_tokens
        assert last.usage.cached_tokens <= last.usage.prompt_tokens
        before = logprobs_of([meta for *_, meta in sent[:cut]])
        after = logprobs_of([*(meta for *_, meta in rest.channel.deltas(0)), *rest.metas])
        expected = logprobs_of([*(meta for *_, meta in sent), *full.metas])
        assert [token_id for token_id, _ in before + after] == [token_id for token_id, _ in expected]
        assert [each for _, each in before + after] == pytest.approx([each for _, each in expected], abs=1e-4)


def test_a_stop_string_ends_it_wherever_it_was_cut(served: Served) -> None:
    full = ask(served, temperature=1)
    stop = full.text[18:22]
    stopped = ask(served, temperature=1, stop=[stop])
    assert stopped.channel is not None
    sent, ids = stopped.channel.deltas(0), ids_of(stopped)
    assert stopped.text == full.text[: full.text.index(stop)]
    for cut in range(1, len(sent) + 1):
        had = [token_id for each in ids[:cut] for token_id in each]
        rest = ask(served, temperature=1, stop=[stop], generated=[had])
        assert "".join(text for text, *_ in sent[:cut]) + rest.text == stopped.text
        assert rest.metas[-1].stop_reason == stop
        assert rest.metas[-1].usage is not None
        assert stopped.metas[-1].usage is not None
        assert rest.metas[-1].usage.completion_tokens == stopped.metas[-1].usage.completion_tokens


def test_each_choice_goes_on_at_its_own_place_and_those_that_ended_are_left_out(served: Served) -> None:
    full = ask(served, n=3)
    assert full.channel is not None
    places = {0: 5, 2: 11}
    had = [
        [token_id for each in ids_of(full, index)[: places[index]] for token_id in each]
        if index in places
        else None
        for index in range(3)
    ]
    rest = ask(served, n=3, generated=had)
    assert rest.channel is not None
    for index, place in places.items():
        ends = [
            [text for text, meta in each.responses if meta.finish_reason and meta.index == index]
            for each in (full, rest)
        ]
        sent = [text for text, *_ in full.channel.deltas(index)]
        again = [text for text, *_ in rest.channel.deltas(index)]
        assert "".join([*sent[:place], *again, *ends[1]]) == "".join([*sent, *ends[0]])
    assert rest.channel.deltas(1) == []
    usage = rest.metas[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 80


def test_an_answer_that_is_not_streamed_begins_again_with_its_seed(served: Served) -> None:
    asked: dict[str, Any] = {"seed": 3, "max_tokens": 30, "ignore_eos": True, "n": 2}
    whole = served.ask(**asked).wait()
    again = served.ask(**asked, generated=[None, []]).wait()
    (_, second) = [text for text, meta in whole.responses if meta.finish_reason]
    assert [text for text, meta in again.responses if meta.finish_reason] == [second]


@pytest.mark.parametrize(
    "wrong",
    [
        {"generated": [[5] * 40]},
        {"generated": [[10**6]]},
        {"generated": [[5, 2, 5]]},
        {"generated": [[5, 7]], "stop_token_ids": [7]},
        {"generated": [[5]], "grammar": Grammar("regex", "[0-9]+")},
        {"generated": [[]], "seed": None},
        {"generated": [None]},
        {"generated": [[1], [1]]},
    ],
)
def test_tokens_that_cannot_be_gone_on_after_are_refused(served: Served, wrong: dict[str, Any]) -> None:
    asked = {"max_tokens": 40, "seed": 1} | wrong
    sampling = {name: value for name, value in asked.items() if value is not None}
    document = json.loads(
        encode_request(Generation(**{k: v for k, v in sampling.items() if k != "generated"}))
    )
    document["generated"] = asked["generated"]
    answer = served.send(json.dumps(document).encode(), "你好").wait()
    assert answer.refused[0] is RefusalCode.INVALID_REQUEST
    assert "generated" in answer.refused[1]
