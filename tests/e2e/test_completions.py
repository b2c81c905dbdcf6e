"""`/v1/completions` with the official SDK on the real Triton."""

from typing import Any

import openai
import pytest

from tests.e2e.stream_client import StreamClient
from tests.e2e.up_process import UpProcess

pytestmark = pytest.mark.e2e

MODELS = ("chatglm3", "chatglm2")
IDS = {"return_token_ids": True}


def chat_ids(triton: StreamClient, model: str) -> list[int]:
    """Return the prompt's ids of a conversation that says 你好."""
    ids, _, _ = triton.tokenize(model, messages=[{"role": "user", "content": "你好"}])
    return ids


@pytest.mark.parametrize("model", MODELS)
def test_text_is_continued_behind_the_tokenizers_prefix(
    model: str, sdk: openai.OpenAI, triton: StreamClient
) -> None:
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 24, "extra_body": IDS}
    answer = sdk.completions.create(**asked, prompt="你好")
    (choice,) = answer.choices
    text_ids, _, _ = triton.tokenize(model, text="你好")
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


def test_an_id_that_no_vocabulary_has_is_refused(sdk: openai.OpenAI, up: UpProcess) -> None:
    with pytest.raises(openai.BadRequestError):
        sdk.completions.create(model="chatglm3", prompt=[2**31])
    with pytest.raises(openai.BadRequestError) as too_long:
        sdk.completions.create(model="chatglm3", prompt=[5] * 5000)
    assert too_long.value.code == "context_length_exceeded"
    assert up.is_ready()
