"""Log-probabilities of prompts (`echo` with `logprobs`) with the official SDK on the real Triton."""

from typing import Any

import openai
import pytest

from tests.e2e.mix_server import Mix
from tests.e2e.up_process import wait_until

pytestmark = pytest.mark.e2e

PROMPTS = ["The question is this one", "你好，山里的小狐狸 👋", " two  spaces"]
MODELS = ("chatglm3", "chatglm2")
IDS = {"return_token_ids": True}
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def lists(logprobs: Any) -> list[list[Any]]:
    return [getattr(logprobs, name) for name in LISTS]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 12])
def test_streamed_scores_are_the_whole_ones_and_fit_the_text(
    model: str, as_ids: bool, max_tokens: int, sdk: openai.OpenAI
) -> None:
    asked: dict[str, Any] = {"model": model, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": 2}
    asked |= {"temperature": 0, "extra_body": {**IDS, "ignore_eos": True}}
    texts = sdk.completions.create(**asked, prompt=PROMPTS)
    prompts: Any = [choice.prompt_token_ids for choice in texts.choices[::2]] if as_ids else PROMPTS
    whole = sdk.completions.create(**asked, prompt=prompts)
    options = {"include_usage": True}
    *chunks, last = sdk.completions.create(**asked, prompt=prompts, stream=True, stream_options=options)
    assert last.usage == whole.usage
    assert whole.usage.completion_tokens == 2 * len(PROMPTS) * max_tokens
    for choice, as_text in zip(whole.choices, texts.choices, strict=True):
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text == as_text.text
        told = [lists(part.logprobs) for part in parts if part.logprobs]
        tokens, values, _, places = ([each for part in told for each in part[kind]] for kind in range(4))
        assert (tokens, places) == (choice.logprobs.tokens, choice.logprobs.text_offset)
        assert values[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)
        assert choice.finish_reason == parts[-1].finish_reason == "length"
        check_lists(choice, len(choice.prompt_token_ids), max_tokens)
        assert choice.text.startswith(PROMPTS[choice.index // 2])
        assert len(choice.token_ids) == max_tokens


def check_lists(choice: Any, prompt: int, answer: int) -> None:
    """Check what is told of so many tokens.

    Places are of the prompt alone: random weights answer with bytes that are no character.
    """
    logprobs = choice.logprobs
    assert {len(each) for each in lists(logprobs)} == {prompt + answer}
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    for logprob, likely in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True):
        assert -9999 <= logprob <= max(likely.values()) <= 0
        assert logprob in likely.values()
    for token, place in zip(logprobs.tokens[:prompt], logprobs.text_offset[:prompt], strict=True):
        special = token.startswith("<") or token in {"[gMASK]", "sop"}
        assert special or "\\x" in token or choice.text.startswith(token, place)


def test_an_answer_has_as_part_of_a_prompt_the_scores_that_it_was_sampled_with(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "chatglm3", "logprobs": 3, "extra_body": {**IDS, "ignore_eos": True}}
    answer = sdk.completions.create(**asked, prompt="The question", max_tokens=20, seed=5).choices[0]
    ids = answer.prompt_token_ids + answer.token_ids
    scored = sdk.completions.create(**asked, prompt=ids, echo=True, max_tokens=0)
    found = scored.choices[0].logprobs.token_logprobs[len(answer.prompt_token_ids) :]
    assert len(found) > 0
    assert found[-len(answer.logprobs.token_logprobs) :] == pytest.approx(
        answer.logprobs.token_logprobs, abs=1e-4
    )


def sdk_of(mix: Mix) -> openai.OpenAI:
    return openai.OpenAI(base_url=mix.gateway.base_url + "/v1", api_key="unused", max_retries=0)


def test_a_prompt_of_several_steps_is_scored_alike_whatever_is_cached_or_runs_beside_it(mix: Mix) -> None:
    """As an evaluation harness asks: ids, one token more, and the likeliest beside each."""
    ids = [300 + place * 7 % 500 for place in range(450)]
    asked: dict[str, Any] = {"model": "steps", "prompt": ids, "max_tokens": 1, "temperature": 0}
    with sdk_of(mix) as sdk:
        sdk.completions.create(**asked)  # Its blocks are in the cache now.
        one = sdk.completions.create(**asked, echo=True, logprobs=1)
        assert one.usage.prompt_tokens_details.cached_tokens == 0, "nothing of it was taken from the cache"
        check_lists(one.choices[0], 450, 1)
        both = sdk.completions.create(**{**asked, "prompt": [ids, ids[:300]]}, echo=True, logprobs=1)
        for choice in both.choices:
            length = len(choice.logprobs.tokens) - 1
            expected = one.choices[0].logprobs.token_logprobs[1:length]
            assert choice.logprobs.token_logprobs[1:length] == pytest.approx(expected, abs=1e-3)
        chunks = list(sdk.completions.create(**asked, echo=True, logprobs=1, stream=True))
        told = [len(chunk.choices[0].logprobs.tokens) for chunk in chunks if chunk.choices[0].logprobs]
        assert sum(told) == 451
        assert len(told) > 2, "it comes while it is computed"
        cached = sdk.completions.create(**asked)
        assert cached.usage.prompt_tokens_details.cached_tokens > 400, "the cache is read again for others"


def test_a_client_that_leaves_while_its_prompt_is_scored_frees_the_engine(mix: Mix) -> None:
    ids = [[300 + (place * 7 + first) % 500 for place in range(450)] for first in range(16)]
    asked: dict[str, Any] = {"model": "steps", "prompt": ids, "echo": True, "logprobs": 5}
    with sdk_of(mix) as sdk:
        stream = sdk.completions.create(**asked, max_tokens=50, stream=True)
        next(iter(stream))
        stream.close()
    wait_until(lambda: mix.idle("steps"))


def test_no_tokens_without_an_echo_are_refused(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.completions.create(model="chatglm3", prompt="a", max_tokens=0, logprobs=1)
    assert refused.value.param == "max_tokens"
