"""What clients expect of any OpenAI server and no other file asks of the real Triton."""

from typing import Any

import httpx
import openai
import pytest

from tests.e2e.up_process import UpProcess

pytestmark = pytest.mark.e2e

TEXT = "你好，请介绍一下你自己"
MESSAGES: list[Any] = [{"role": "user", "content": TEXT}]


def chat(sdk: openai.OpenAI, messages: list[Any] = MESSAGES, **asked: Any) -> Any:
    defaults = {"model": "chatglm3", "temperature": 0, "max_tokens": 12}
    return sdk.chat.completions.create(messages=messages, **{**defaults, **asked})


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
    usage = answers[0].usage
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"300": 101}}, "logit_bias.300"),
        ({"store": True}, "store"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_is_out_of_range_is_named(wrong: dict[str, Any], param: str, sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(sdk, **wrong)
    assert refused.value.param == param


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
    ],
)
def test_there_is_one_shape_of_errors(
    asked: str, content: bytes, media_type: str, status: int, up: UpProcess
) -> None:
    method, path = asked.split()
    headers = {"Content-Type": media_type, "X-Request-Id": "mine-1"}
    answer = httpx.request(method, up.base_url + path, content=content, headers=headers)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["X-Request-Id"] == "mine-1"
