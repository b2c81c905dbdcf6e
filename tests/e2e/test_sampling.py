"""What a request may ask of the sampler, with the official SDK on the real Triton."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.e2e

MODELS = ("chatglm3", "chatglm2")
PHRASE = [300, 301, 302]
PROMPT = [1101, 1103, *PHRASE * 8]
LENGTH = 40

MESSAGES = [{"role": "user", "content": "你好 你好 你好"}]


def ids(sdk: openai.OpenAI, model: str, **asked: Any) -> list[int]:
    """Return the ids of an answer of `LENGTH` tokens, at temperature 0 if nothing else is said."""
    extra = {"return_token_ids": True, "ignore_eos": True, **asked.pop("extra_body", {})}
    asked = {"temperature": 0, **asked}
    answer = sdk.completions.create(model=model, prompt=PROMPT, max_tokens=LENGTH, extra_body=extra, **asked)
    told: list[int] = answer.choices[0].token_ids
    assert len(told) == answer.usage.completion_tokens == LENGTH
    return told


@pytest.mark.parametrize("model", MODELS)
def test_penalties_change_what_is_said(model: str, sdk: openai.OpenAI) -> None:
    plain = ids(sdk, model)
    assert len(set(plain)) < LENGTH
    assert len(set(ids(sdk, model, frequency_penalty=2))) == LENGTH
    assert len(set(ids(sdk, model, presence_penalty=2))) == LENGTH
    assert len(set(ids(sdk, model, frequency_penalty=-2))) < 6
    assert len(set(ids(sdk, model, presence_penalty=-2))) < LENGTH / 2
    # What is in the prompt counts as well, but only here.
    unheard = ids(sdk, model, extra_body={"repetition_penalty": 100})
    assert len(set(unheard)) == LENGTH
    assert not set(unheard) & set(PROMPT)
    assert set(ids(sdk, model, extra_body={"repetition_penalty": 0.3})) & set(PHRASE)


@pytest.mark.parametrize("model", MODELS)
def test_a_min_p_of_1_is_greedy(model: str, sdk: openai.OpenAI) -> None:
    greedy = ids(sdk, model)
    assert ids(sdk, model, temperature=2, seed=5, extra_body={"min_p": 1}) == greedy
    assert ids(sdk, model, temperature=2, seed=5, extra_body={"min_p": 0}) != greedy
    assert ids(sdk, model, temperature=2, seed=5, extra_body={"top_k": 1}) == greedy
    assert ids(sdk, model, temperature=2, seed=5, top_p=1e-9) == greedy
    assert ids(sdk, model, temperature=2, seed=5, top_p=0) == greedy


def test_seeds_repeat_among_others_that_ask_for_anything(sdk: openai.OpenAI) -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 1, "seed": 1},
        {"temperature": 1.2, "seed": 2, "top_p": 0.7, "extra_body": {"repetition_penalty": 1.3}},
        {"temperature": 0.8, "seed": 3, "frequency_penalty": 1.5, "extra_body": {"min_p": 0.05}},
        {"temperature": 2, "seed": 4, "presence_penalty": -1, "extra_body": {"top_k": 9}},
        {"temperature": 1, "seed": 5, "logit_bias": {"300": 5}, "frequency_penalty": 0.2},
        {"temperature": 0, "extra_body": {"repetition_penalty": 1.1}},
    ]
    alone = [ids(sdk, "chatglm3", **each) for each in asked]
    assert len({tuple(each) for each in alone}) == len(asked)
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda number: ids(sdk, "chatglm3", **asked[number % 6]), range(48)))
    assert together == alone * 8


@pytest.mark.parametrize("model", MODELS)
def test_log_probabilities_of_the_20_most_likely_are_the_models_own(model: str, sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 8, "logprobs": True}
    penalised = {"temperature": 0.5, "seed": 3, "presence_penalty": 2, "logit_bias": {"300": 3}}
    plain, other = (
        sdk.chat.completions.create(**asked, **more, top_logprobs=20).choices[0].logprobs.content
        for more in ({"temperature": 0}, penalised)
    )
    for token in (*plain, *other):
        tops = [top.logprob for top in token.top_logprobs]
        assert len(tops) == 20
        assert tops == sorted(tops, reverse=True)
        assert token.logprob <= tops[0]
    assert all(token.logprob == token.top_logprobs[0].logprob for token in plain)
    # The first position's are the same, whatever was asked of the sampler.
    assert [(top.bytes, top.logprob) for top in plain[0].top_logprobs] == [
        (top.bytes, top.logprob) for top in other[0].top_logprobs
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2.1),
        ("top_p", -0.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("top_logprobs", 21),
        ("top_k", -2),
        ("min_p", 1.5),
        ("min_p", "0.5"),
        ("repetition_penalty", 0),
        ("min_tokens", -1),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(name: str, value: Any, sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(
            model="chatglm3", messages=MESSAGES, logprobs=True, extra_body={name: value}
        )
    assert refused.value.param == name
    assert name in refused.value.message
