"""Several answers to one request (`n`), with the official SDK on the real Triton."""

from typing import Any

import openai
import pytest

from tests.e2e.stream_client import StreamClient
from tests.e2e.up_process import UpProcess, wait_until

pytestmark = pytest.mark.e2e

MODELS = ("chatglm3", "chatglm2")
MESSAGES = [{"role": "user", "content": "你好，请介绍一下你自己"}]
NOBODY_ELSES = (
    "Twelve grey herons stand in the reeds of a lake that nobody else in these tests has heard of, and wait."
)


def chat(sdk: openai.OpenAI, **asked: Any) -> Any:
    return sdk.chat.completions.create(**{"model": "chatglm3", "messages": MESSAGES, **asked})


def streamed_chat(sdk: openai.OpenAI, **asked: Any) -> Any:
    """Return what the SDK's own accumulator makes of the stream."""
    with sdk.chat.completions.stream(
        **{"model": "chatglm3", "messages": MESSAGES, **asked}, stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        return stream.current_completion_snapshot


def told(completion: Any) -> list[Any]:
    return [
        (
            choice.index,
            choice.message.content,
            choice.finish_reason,
            choice.logprobs and [(token.token, token.bytes) for token in choice.logprobs.content],
        )
        for choice in completion.choices
    ]


def logprobs_of(completion: Any) -> list[float]:
    """Return the log-probabilities of all tokens and their likely ones."""
    return [
        each.logprob
        for choice in completion.choices
        if choice.logprobs
        for token in choice.logprobs.content
        for each in (token, *token.top_logprobs)
    ]


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_a_streamed_answer_equals_the_whole_one(logprobs: int | None, sdk: openai.OpenAI) -> None:
    """Of more choices than `test_stream_is_whole` asks for, and by a negative seed and the largest."""
    n = 4
    for seed, more in ((n, {}), (-n, {"stop": ["的", "a"]}), (2**63 - 2, {"temperature": 1.7})):
        asked: dict[str, Any] = {"model": MODELS[seed % 2], "n": n, "seed": seed, "max_tokens": 30, **more}
        if logprobs is not None:
            asked |= {"logprobs": True, "top_logprobs": logprobs}
        whole, streamed = chat(sdk, **asked), streamed_chat(sdk, **asked)
        assert [choice.index for choice in whole.choices] == list(range(n))
        assert told(whole) == told(streamed)
        # Their last bits move with what of the prompt is in the cache.
        assert logprobs_of(whole) == pytest.approx(logprobs_of(streamed), abs=1e-4)
        assert bool(logprobs_of(whole)) == (logprobs is not None)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert getattr(whole.usage, name) == getattr(streamed.usage, name)


@pytest.mark.parametrize("model", MODELS)
def test_choices_of_a_completion_are_those_of_the_seeds_that_follow(model: str, sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "prompt": "The question is",
        "max_tokens": 25,
        "extra_body": {"return_token_ids": True},
    }
    together = sdk.completions.create(**asked, n=4, seed=11)
    alone = [sdk.completions.create(**asked, seed=11 + index) for index in range(4)]
    assert [choice.token_ids for choice in together.choices] == [each.choices[0].token_ids for each in alone]
    assert [choice.text for choice in together.choices] == [each.choices[0].text for each in alone]
    assert together.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert together.usage.completion_tokens == sum(each.usage.completion_tokens for each in alone)
    chunks = list(
        sdk.completions.create(**asked, n=4, seed=11, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == together.usage.completion_tokens
    for whole in together.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == whole.index]
        assert "".join(part.text for part in parts) == whole.text
        assert [each for part in parts for each in part.token_ids] == whole.token_ids
        assert [part.finish_reason for part in parts if part.finish_reason] == [whole.finish_reason]
        assert parts[-1].finish_reason == whole.finish_reason


def test_the_prompt_is_computed_once(up: UpProcess, sdk: openai.OpenAI) -> None:
    hits, prompts = (f"tritongate_engine_{name}_tokens_total" for name in ("prefix_hit", "prompt"))
    labels = {"model": "chatglm3"}
    up.wait_counted("chatglm3")
    before = up.gauge(hits, **labels), up.gauge(prompts, **labels)
    answer = chat(sdk, messages=[{"role": "user", "content": NOBODY_ELSES}], n=4, max_tokens=4)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0, "nobody had said this before"
    tokens = answer.usage.prompt_tokens
    wait_until(lambda: up.gauge(prompts, **labels) == before[1] + 4 * tokens)
    shared = (tokens - 1) // 16 * 16
    assert shared > 0
    wait_until(lambda: up.gauge(hits, **labels) == before[0] + 3 * shared)


def test_a_client_that_leaves_a_stream_ends_every_choice(up: UpProcess, sdk: openai.OpenAI) -> None:
    running = "tritongate_engine_requests_running"
    stream = chat(sdk, n=8, max_tokens=450, temperature=2, extra_body={"ignore_eos": True}, stream=True)
    seen = set()
    for chunk in stream:
        seen |= {choice.index for choice in chunk.choices}
        if len(seen) == 8:
            break
    stream.close()
    wait_until(lambda: up.gauge(running, model="chatglm3") == 0)
    wait_until(lambda: up.gauge("tritongate_requests_in_flight") == 0)


def test_choices_without_a_gateway(triton: StreamClient) -> None:
    """As anybody could ask from the wire contract."""
    answer = triton.ask("chatglm3", "你好", n=2, temperature=0, max_tokens=20, ignore_eos=True)
    accepted, *others = answer.metas
    assert accepted.accepted is not None
    texts = ["".join(text for text, meta in answer.responses if meta.index == index) for index in (0, 1)]
    assert texts[0] == texts[1]
    assert texts[0]
    ends = [meta for meta in others if meta.finish_reason is not None]
    assert sorted(meta.index for meta in ends) == [0, 1]
    assert [meta.usage is None for meta in ends] == [True, False]
    assert answer.last.usage.completion_tokens == 40


@pytest.mark.parametrize(("asked", "param"), [({"n": 0}, "n"), ({"n": 33}, "n"), ({"n": 129}, "n")])
def test_what_cannot_be_is_refused_by_name(asked: dict[str, Any], param: str, sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as chat_refused:
        chat(sdk, **asked)
    with pytest.raises(openai.BadRequestError) as completion_refused:
        sdk.completions.create(model="chatglm3", prompt="a", **asked)
    with pytest.raises(openai.BadRequestError) as best_of:
        sdk.completions.create(model="chatglm3", prompt="a", best_of=2)
    assert chat_refused.value.param == completion_refused.value.param == param
    assert best_of.value.param == "best_of"
