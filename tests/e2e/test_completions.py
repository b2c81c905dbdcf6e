"""`/v1/completions` with the official SDK on the real Triton."""

from typing import Any

import openai
import pytest

from tests.e2e.stream_client import StreamClient
from tests.e2e.up_process import UpProcess, wait_until

pytestmark = pytest.mark.e2e

PROMPTS = ["The question", "你好", "山里的小狐狸"]
MODELS = ("chatglm3", "chatglm2")
IDS = {"return_token_ids": True}


def chat_ids(triton: StreamClient, model: str) -> list[int]:
    """Return the prompt's ids of a conversation that says 你好."""
    ids = triton.tokenize(model, messages=[{"role": "user", "content": "你好"}]).ids
    assert ids
    return ids


@pytest.mark.parametrize("model", MODELS)
def test_text_is_continued_behind_the_tokenizers_prefix(
    model: str, sdk: openai.OpenAI, triton: StreamClient
) -> None:
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 24, "extra_body": IDS}
    answer = sdk.completions.create(**asked, prompt="你好")
    (choice,) = answer.choices
    text_ids = triton.tokenize(model, "你好").ids
    assert text_ids
    prefix = chat_ids(triton, model)[:2]
    assert choice.prompt_token_ids == prefix + text_ids
    assert answer.usage.prompt_tokens == 2 + len(text_ids)
    again = sdk.completions.create(**asked, prompt=choice.prompt_token_ids)
    assert (again.choices[0].token_ids, again.choices[0].text) == (choice.token_ids, choice.text)


@pytest.mark.parametrize("model", MODELS)
def test_a_streamed_completion_equals_the_whole_one(model: str, sdk: openai.OpenAI) -> None:
    asked = {"model": model, "prompt": "The question", "temperature": 0, "max_tokens": 40}
    whole = sdk.completions.create(**asked, extra_body=IDS)
    chunks = list(
        sdk.completions.create(**asked, extra_body=IDS, stream=True, stream_options={"include_usage": True})
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [token for choice in choices for token in choice.token_ids] == whole.choices[0].token_ids
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == len(whole.choices[0].token_ids)


def test_the_ids_of_a_chat_give_the_chats_answer(sdk: openai.OpenAI, triton: StreamClient) -> None:
    chat = sdk.chat.completions.create(
        model="chatglm3", messages=[{"role": "user", "content": "你好"}], temperature=0, max_tokens=30
    )
    answer = sdk.completions.create(
        model="chatglm3", prompt=chat_ids(triton, "chatglm3"), temperature=0, max_tokens=30
    )
    # The text as it stands: the chat route strips the white space that the format puts around an answer.
    assert answer.choices[0].text.strip() == chat.choices[0].message.content
    assert answer.usage == chat.usage


@pytest.mark.parametrize("stream", [False, True])
def test_ignore_eos_gives_exactly_the_tokens_asked_for(
    stream: bool, sdk: openai.OpenAI, triton: StreamClient
) -> None:
    asked: dict[str, Any] = {
        "model": "chatglm3",
        "prompt": chat_ids(triton, "chatglm3"),
        "max_tokens": 200,
        "temperature": 1,
        "extra_body": {"ignore_eos": True, **IDS},
    }
    if stream:
        options = {"include_usage": True}
        *chunks, last = sdk.completions.create(**asked, stream=True, stream_options=options)
        assert sum(len(chunk.choices[0].token_ids) for chunk in chunks) == 200
        assert chunks[-1].choices[0].finish_reason == "length"
    else:
        last = sdk.completions.create(**asked)
        assert len(last.choices[0].token_ids) == 200
        assert last.choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": [[5], [2**31]]}, "prompt.1"),
        ({"prompt": [5] * 5000}, "prompt"),
        ({"prompt": "a", "logit_bias": {str(2**31): 1}}, "logit_bias"),
        ({"prompt": "a", "extra_body": {"stop_token_ids": [2**31]}}, "stop_token_ids"),
        ({"prompt": "a", "extra_body": {"allowed_token_ids": [2**31]}}, "allowed_token_ids"),
    ],
)
def test_what_the_model_refuses_names_its_field(
    asked: dict[str, Any], param: str, model: str, stream: bool, sdk: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.completions.create(model=model, stream=stream, **asked)
    assert refused.value.param == param
    too_long = len(asked["prompt"]) > 1000
    assert refused.value.code == ("context_length_exceeded" if too_long else None)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_batch_is_what_its_prompts_give_alone(n: int, as_ids: bool, sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "chatglm3",
        "n": n,
        "temperature": 0,
        "max_tokens": 20,
        "extra_body": IDS,
    }
    alone = [sdk.completions.create(**asked, prompt=prompt) for prompt in PROMPTS]
    prompts: Any = [each.choices[0].prompt_token_ids for each in alone] if as_ids else PROMPTS
    together = sdk.completions.create(**asked, prompt=prompts)
    expected = [choice for each in alone for choice in each.choices]
    assert [choice.index for choice in together.choices] == list(range(n * len(PROMPTS)))
    for name in ("text", "finish_reason", "token_ids", "prompt_token_ids"):
        assert [getattr(choice, name) for choice in together.choices] == [
            getattr(choice, name) for choice in expected
        ]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(together.usage, name) == sum(getattr(each.usage, name) for each in alone)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(sdk.completions.create(**asked, prompt=prompts, stream=True, stream_options=options))
    for whole in together.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == whole.index]
        assert "".join(part.text for part in parts) == whole.text
        assert [each for part in parts for each in part.token_ids] == whole.token_ids
        assert [part.finish_reason for part in parts if part.finish_reason] == [whole.finish_reason]
        assert parts[0].prompt_token_ids == whole.prompt_token_ids
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == together.usage.completion_tokens


def test_one_prompt_too_long_fails_the_batch(sdk: openai.OpenAI, up: UpProcess) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            sdk.completions.create(
                model="chatglm3", prompt=["a", "word " * 3000], max_tokens=400, stream=stream
            )
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt.1")
    wait_until(lambda: up.gauge("tritongate_engine_requests_running", model="chatglm3") == 0)
    wait_until(lambda: up.gauge("tritongate_requests_in_flight") == 0)


def test_a_client_that_leaves_a_batch_frees_all_of_it(sdk: openai.OpenAI, up: UpProcess) -> None:
    stream = sdk.completions.create(
        model="chatglm3",
        prompt=["a"] * 8,
        n=2,
        max_tokens=450,
        temperature=2,
        extra_body={"ignore_eos": True},
        stream=True,
    )
    seen = set()
    for chunk in stream:
        seen |= {choice.index for choice in chunk.choices}
        if len(seen) == 16:
            break
    stream.close()
    wait_until(lambda: up.gauge("tritongate_engine_requests_running", model="chatglm3") == 0)
    wait_until(lambda: up.gauge("tritongate_requests_in_flight") == 0)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_puts_the_prompt_in_front(model: str, as_ids: bool, sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 12, "extra_body": IDS}
    plain = sdk.completions.create(**asked, prompt=PROMPTS)
    prompts: Any = [choice.prompt_token_ids for choice in plain.choices] if as_ids else PROMPTS
    echoed = sdk.completions.create(**asked, prompt=prompts, echo=True)
    assert [choice.text for choice in echoed.choices] == [
        prompt + choice.text for prompt, choice in zip(PROMPTS, plain.choices, strict=True)
    ]
    assert [choice.token_ids for choice in echoed.choices] == [choice.token_ids for choice in plain.choices]
    chunks = list(sdk.completions.create(**asked, prompt=prompts, echo=True, stream=True))
    for whole in echoed.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == whole.index]
        assert "".join(part.text for part in parts) == whole.text


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_in_the_older_form(count: int, sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "chatglm3",
        "prompt": ["The question", "你好"],
        "logprobs": count,
        "temperature": 0,
        "max_tokens": 15,
        "extra_body": {"ignore_eos": True},
    }
    whole = sdk.completions.create(**asked)
    chunks = list(sdk.completions.create(**asked, stream=True))
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        logprobs = choice.logprobs
        for name in ("tokens", "text_offset"):
            assert [each for part in parts if part.logprobs for each in getattr(part.logprobs, name)] == (
                getattr(logprobs, name)
            )
        lengths = {len(each) for each in (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset)}
        assert lengths == {len(logprobs.top_logprobs)}
        assert lengths != {0}
        for token, logprob, likely in zip(
            logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
        ):
            assert likely[token] == logprob
            assert max(count, 1) <= len(likely) <= count + 1
            assert all(-9999 <= each <= 0 for each in likely.values())
        for token, place in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            if "\\x" not in token and not token.startswith("<"):
                assert choice.text.startswith(token, place)


def test_what_is_not_offered_is_refused_by_name(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "chatglm3", "prompt": "The", "max_tokens": 2, "temperature": 0}
    for field, value in (("suffix", "a"), ("best_of", 3), ("logprobs", 6), ("max_tokens", 0)):
        with pytest.raises(openai.BadRequestError) as refused:
            sdk.completions.create(**{**asked, field: value})
        assert refused.value.param == field
