"""What clients expect of any OpenAI server and no other file asks of the real Triton."""

import json
import time
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.up_process import UpProcess

pytestmark = pytest.mark.e2e

TEXT = "你好，请介绍一下你自己"
MESSAGES: list[Any] = [{"role": "user", "content": TEXT}]


TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def chat(sdk: openai.OpenAI, messages: list[Any] = MESSAGES, **asked: Any) -> Any:
    defaults = {"model": "chatglm3", "messages": messages, "temperature": 0, "max_tokens": 12}
    return sdk.chat.completions.create(**{**defaults, **asked})


def test_a_developer_is_the_system(sdk: openai.OpenAI) -> None:
    said = [
        chat(sdk, [{"role": role, "content": "Be brief."}, *MESSAGES]) for role in ("system", "developer")
    ]
    assert said[0].choices[0].message.content == said[1].choices[0].message.content
    assert said[0].usage.prompt_tokens == said[1].usage.prompt_tokens > chat(sdk).usage.prompt_tokens


def test_parts_of_text_are_one_text(sdk: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": TEXT[:4]}, {"type": "text", "text": TEXT[4:]}]
    whole, joined = chat(sdk), chat(sdk, [{"role": "user", "content": parts}])
    assert joined.choices[0].message.content == whole.choices[0].message.content
    assert joined.usage.prompt_tokens == whole.usage.prompt_tokens


def test_an_answer_says_what_it_is(sdk: openai.OpenAI) -> None:
    answers = [chat(sdk), chat(sdk, store=False, user="me", metadata={"a": "b"})]
    assert len({answer.id for answer in answers}) == 2
    assert all(answer.id.startswith("chatcmpl-") for answer in answers)
    assert all((answer.model, bool(answer.system_fingerprint)) == ("chatglm3", True) for answer in answers)
    assert all(abs(answer.created - time.time()) < 60 for answer in answers)
    assert sdk.completions.create(model="chatglm3", prompt="a", max_tokens=1).id.startswith("cmpl-")
    usage = answers[0].usage
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"300": 101}}, "logit_bias.300"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"model": "chatglm2", "tools": TOOLS}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_is_out_of_range_is_named(wrong: dict[str, Any], param: str, sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(sdk, **wrong)
    assert refused.value.param == param


def test_of_two_bounds_the_newer_counts(sdk: openai.OpenAI) -> None:
    asked = {"max_tokens": 3, "max_completion_tokens": 5, "extra_body": {"ignore_eos": True}}
    assert chat(sdk, **asked).usage.completion_tokens == 5


def test_what_would_end_an_answer_is_not_sampled_before_min_tokens(sdk: openai.OpenAI) -> None:
    ids = chat(sdk, extra_body={"return_token_ids": True, "ignore_eos": True}).choices[0].token_ids
    asked = {"stop_token_ids": ids[:1], "return_token_ids": True}
    assert chat(sdk, extra_body=asked).usage.completion_tokens == 1
    longer = chat(sdk, extra_body={**asked, "min_tokens": 9})
    assert longer.usage.completion_tokens >= 9
    assert ids[0] not in longer.choices[0].token_ids[:8]


def test_other_seeds_say_other_things(sdk: openai.OpenAI) -> None:
    said = {chat(sdk, temperature=1.5, seed=seed).choices[0].message.content for seed in range(4)}
    assert len(said) == 4


@pytest.mark.parametrize("answer", ["好", "a", "👋", "你好👋"])
def test_short_answers_stream_whole(answer: str, sdk: openai.OpenAI) -> None:
    for model in ("chatglm3", "chatglm2"):
        extra = {"structured_outputs": {"choice": [answer]}}
        chunks = list(chat(sdk, model=model, extra_body=extra, stream=True))
        said = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(said) == answer
        assert not any("\ufffd" in each for each in said)
        roles = [choice.delta.role for chunk in chunks for choice in chunk.choices if choice.delta.role]
        reasons = [
            choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason
        ]
        assert (roles, reasons) == (["assistant"], ["stop"])


def test_usage_is_null_in_all_chunks_but_the_last(up: UpProcess) -> None:
    body = {"model": "chatglm3", "messages": MESSAGES, "max_tokens": 3, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    answer = httpx.post(up.base_url + "/v1/chat/completions", json=body, timeout=60)
    *chunks, last, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    assert all(json.loads(chunk)["usage"] is None for chunk in chunks)
    assert (json.loads(last)["choices"], json.loads(last)["usage"]["completion_tokens"]) == ([], 3)


def test_an_image_is_refused(sdk: openai.OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(openai.BadRequestError) as refused:
        chat(sdk, [{"role": "user", "content": [image]}])
    assert (refused.value.param or "").startswith("messages.0.content")


def test_chinese_comes_whole(demo: openai.OpenAI) -> None:
    chunks = list(chat(demo, model="chatglm3-demo", max_tokens=48, stream=True))
    joined = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert joined == chat(demo, model="chatglm3-demo", max_tokens=48).choices[0].message.content
    assert not joined.isascii()
    assert "\ufffd" not in joined


@pytest.mark.parametrize(
    ("asked", "content", "media_type", "status"),
    [
        ("POST /v1/chat/completions", b"{", "application/json", 400),
        ("POST /v1/chat/completions", b"[]", "application/json", 400),
        ("POST /v1/chat/completions", b"{}", "text/plain", 415),
        ("GET /v1/chat/completions", b"", "application/json", 405),
        ("GET /v1/nothing", b"", "application/json", 404),
        ("GET /v1/models/nothing", b"", "application/json", 404),
        ("GET /v1/models/an/id/of/several", b"", "application/json", 404),
    ],
)
def test_there_is_one_shape_of_errors(
    asked: str, content: bytes, media_type: str, status: int, up: UpProcess
) -> None:
    method, path = asked.split()
    headers = {"Content-Type": media_type, "X-Request-Id": "mine-1"}
    answer = httpx.request(method, up.base_url + path, content=content, headers=headers, timeout=60)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["X-Request-Id"] == "mine-1"
