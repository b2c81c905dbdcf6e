"""What vLLM adds to OpenAI's parameters, with the official SDK on the real Triton, whole and streamed."""

from typing import Any

import openai
import pytest

from tests.e2e.up_process import UpProcess

pytestmark = pytest.mark.e2e

MESSAGES: list[Any] = [{"role": "user", "content": "你好，请介绍一下你自己"}]


def chat(sdk: openai.OpenAI, **asked: Any) -> Any:
    extra = {name: asked.pop(name) for name in list(asked) if name in EXTENSIONS}
    defaults = {"model": "chatglm3", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    return sdk.chat.completions.create(**{**defaults, **asked}, extra_body=extra)


EXTENSIONS = {
    "ignore_eos",
    "include_stop_str_in_output",
    "priority",
    "return_token_ids",
    "skip_special_tokens",
    "stop_token_ids",
}


def parts_of(chunks: list[Any], index: int) -> list[Any]:
    return [choice for chunk in chunks for choice in chunk.choices if choice.index == index]


def content(parts: list[Any]) -> str:
    return "".join(part.delta.content or "" for part in parts)


@pytest.mark.parametrize("n", [1, 3])
def test_token_ids_of_a_chat(n: int, sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"n": n, "temperature": 1, "seed": 5, "return_token_ids": True}
    whole = chat(sdk, **asked)
    chunks = list(chat(sdk, **asked, stream=True, stream_options={"include_usage": True}))
    assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens
    assert [chunk.model_extra.get("prompt_token_ids") for chunk in chunks] == [
        whole.prompt_token_ids,
        *[None] * (len(chunks) - 1),
    ]
    for choice in whole.choices:
        parts = parts_of(chunks, choice.index)
        assert [
            each for part in parts for each in part.model_extra.get("token_ids") or ()
        ] == choice.token_ids
        assert content(parts) == choice.message.content
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
    assert sum(len(choice.token_ids) for choice in whole.choices) == whole.usage.completion_tokens
    plain = chat(sdk, n=n)
    assert "prompt_token_ids" not in plain.model_extra
    assert not any("token_ids" in choice.model_extra for choice in plain.choices)


@pytest.mark.parametrize("n", [1, 3])
def test_running_usage_never_falls_and_ends_with_the_total(n: int, sdk: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(sdk, n=n, temperature=1, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[:n] == [0] * n  # of the roles
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[-1].usage.prompt_tokens}
    assert all(
        chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
        for chunk in chunks
    )
    assert chunks[-1].choices == []
    assert chunks[-2].usage.completion_tokens == counts[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_where_asked_for(stream: bool, sdk: openai.OpenAI) -> None:
    def text(**asked: Any) -> str:
        answer = chat(sdk, **asked, ignore_eos=True, stream=stream)
        return content(parts_of(list(answer), 0)) if stream else answer.choices[0].message.content

    whole = text()
    stop = whole[4:7].strip()
    end = whole.index(stop)
    assert text(stop=stop) == whole[:end].rstrip()
    assert text(stop=stop, include_stop_str_in_output=True) == whole[:end] + stop
    assert text(stop=stop, include_stop_str_in_output=False) == whole[:end].rstrip()


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_are_shown_where_asked_for(stream: bool, sdk: openai.OpenAI) -> None:
    # `<|assistant|>`, which opens a segment where it is not text.
    told = chat(sdk, max_tokens=1, return_token_ids=True)
    opens = told.prompt_token_ids[-1]
    texts = []
    for skip in (True, False):
        answer = chat(
            sdk, max_tokens=2, logit_bias={str(opens): 100}, skip_special_tokens=skip, stream=stream
        )
        texts.append(content(parts_of(list(answer), 0)) if stream else answer.choices[0].message.content)
    assert texts == ["", "<|assistant|>" * 2]


def test_a_stop_id_stops(sdk: openai.OpenAI) -> None:
    free = chat(sdk, return_token_ids=True, ignore_eos=True).choices[0].token_ids
    stopped = chat(sdk, return_token_ids=True, ignore_eos=True, stop_token_ids=[free[3]]).choices[0]
    assert stopped.token_ids == free[: free.index(free[3]) + 1]
    assert stopped.finish_reason == "stop"


def test_what_stopped_it_is_told(sdk: openai.OpenAI) -> None:
    free = chat(sdk, return_token_ids=True, ignore_eos=True).choices[0]
    assert (free.finish_reason, free.stop_reason) == ("length", None)
    word, token_id = free.message.content[5:7], free.token_ids[3]
    for asked, told in (({"stop": ["nowhere", word]}, word), ({"stop_token_ids": [token_id]}, token_id)):
        whole = chat(sdk, ignore_eos=True, **asked).choices[0]
        assert (whole.finish_reason, whole.stop_reason) == ("stop", told)
        *parts, last = parts_of(list(chat(sdk, ignore_eos=True, stream=True, **asked)), 0)
        assert (last.finish_reason, last.stop_reason) == ("stop", told)
        assert not any("stop_reason" in part.model_extra for part in parts)
    completion: Any = {"model": "chatglm3", "prompt": "a", "temperature": 0}
    word = sdk.completions.create(**completion).choices[0].text[2:4]
    for stream in (False, True):
        answer: Any = sdk.completions.create(**completion, stop=word, stream=stream)
        choice = (list(answer)[-1] if stream else answer).choices[0]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", word)


def test_bookkeeping_changes_nothing(sdk: openai.OpenAI) -> None:
    plain = chat(sdk)
    kept = chat(sdk, store=False, user="u", metadata={"a": "b"}, service_tier="auto", priority=-100)
    assert kept.choices == plain.choices
    completion = sdk.completions.create(
        model="chatglm3",
        prompt="a",
        max_tokens=3,
        temperature=0,
        user="u",
        extra_body={"store": False, "metadata": {"a": "b"}, "priority": 100},
    )
    assert completion.usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"priority": 101}, "priority"),
        ({"priority": 0.5}, "priority"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"return_token_ids": "yes"}, "return_token_ids"),
        ({"metadata": {str(each): "" for each in range(17)}}, "metadata"),
    ],
)
def test_what_cannot_be_is_refused_by_name_on_both_routes(
    asked: dict[str, Any], param: str, sdk: openai.OpenAI, up: UpProcess
) -> None:
    with pytest.raises(openai.BadRequestError) as of_chat:
        sdk.chat.completions.create(model="chatglm3", messages=MESSAGES, extra_body=asked)
    with pytest.raises(openai.BadRequestError) as of_completion:
        sdk.completions.create(model="chatglm3", prompt="a", extra_body=asked)
    assert of_chat.value.param == of_completion.value.param == param
    assert up.is_ready()


def test_tools_and_special_tokens_exclude_each_other(sdk: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with pytest.raises(openai.BadRequestError) as refused:
        chat(sdk, tools=tools, skip_special_tokens=False)
    assert refused.value.param == "skip_special_tokens"
