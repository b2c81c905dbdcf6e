"""The main job: the official SDK and curl talk to a ChatGLM checkpoint on the real Triton."""

import json
import shutil
import subprocess
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.stream_client import StreamClient
from tests.e2e.up_process import UpProcess, wait_until

pytestmark = pytest.mark.e2e

MODELS = ("chatglm3", "chatglm2")
HELLO: list[Any] = [{"role": "user", "content": "你好"}]


@pytest.mark.parametrize("model", MODELS)
def test_a_streamed_answer_equals_the_whole_one(model: str, sdk: openai.OpenAI) -> None:
    asked = {
        "model": model,
        "messages": HELLO,
        "temperature": 0,
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 3,
    }
    sdk.chat.completions.create(**asked)  # the next two find as much of the prompt in the cache
    whole = sdk.chat.completions.create(**asked)
    chunks = list(sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    streamed = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert streamed == whole.choices[0].logprobs.content
    assert all(len(token.top_logprobs) == 3 for token in streamed)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


@pytest.mark.parametrize("model", MODELS)
def test_a_second_turn_sees_the_first(model: str, sdk: openai.OpenAI) -> None:
    first = sdk.chat.completions.create(model=model, messages=HELLO, temperature=0, max_tokens=12)
    conversation = [
        *HELLO,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And in English?"},
    ]
    second = sdk.chat.completions.create(model=model, messages=conversation, temperature=0, max_tokens=12)
    alone = sdk.chat.completions.create(model=model, messages=conversation[-1:], temperature=0, max_tokens=12)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.choices[0].message.content != alone.choices[0].message.content


def test_the_answer_is_what_the_entry_says(sdk: openai.OpenAI, triton: StreamClient) -> None:
    raw = triton.ask("chatglm3", "你好", temperature=0, max_tokens=30)
    answer = sdk.chat.completions.create(model="chatglm3", messages=HELLO, temperature=0, max_tokens=30)
    assert answer.choices[0].message.content == raw.text.strip()
    assert answer.usage.completion_tokens == raw.last.usage.completion_tokens


def test_the_models_are_listed(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["chatglm3", "chatglm2"]
    assert sdk.models.retrieve("chatglm2").id == "chatglm2"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("gpt-4")


def test_errors_are_the_sdks_own(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.chat.completions.create(model="gpt-4", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        sdk.chat.completions.create(model="chatglm3", messages=[{"role": "user", "content": "你好" * 600}])
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as unfit:
        sdk.chat.completions.create(model="chatglm3", messages=HELLO, max_tokens=600)
    assert unfit.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        sdk.chat.completions.create(model="chatglm3", messages=HELLO, temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as two:
        sdk.chat.completions.create(
            model="chatglm2", messages=[*HELLO, {"role": "assistant", "content": "x"}], temperature=0
        )
    assert two.value.param == "messages.1"


def test_a_stop_string_never_shows(sdk: openai.OpenAI) -> None:
    asked = {"model": "chatglm3", "messages": HELLO, "temperature": 0}
    full = sdk.chat.completions.create(**asked, max_tokens=60).choices[0].message.content
    stop = full[10:13]
    chunks = sdk.chat.completions.create(**asked, max_tokens=60, stop=stop, stream=True)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text == full[: full.index(stop)].rstrip()
    assert choices[-1].finish_reason == "stop"


def test_curl_sees_server_sent_events(up: UpProcess) -> None:
    curl = shutil.which("curl")
    assert curl, "curl is part of the quick start"
    body = json.dumps({"model": "chatglm3", "messages": HELLO, "stream": True, "max_tokens": 5})
    done = subprocess.run(
        [
            curl,
            "-sN",
            up.base_url + "/v1/chat/completions",
            "-H",
            "Content-Type: application/json",
            "-d",
            body,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    events = [line for line in done.stdout.split("\n\n") if line and not line.startswith(":")]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"


def test_metrics_count_what_was_asked(up: UpProcess) -> None:
    def counts() -> dict[str, float]:
        labels = {"model": "chatglm2"}
        return {
            "requests": up.gauge("tritongate_requests_total", **labels, status="200"),
            "first": up.gauge("tritongate_time_to_first_token_seconds_count", **labels),
            "between": up.gauge("tritongate_inter_token_latency_seconds_count", **labels),
            "generated": up.gauge("tritongate_generated_tokens_total", **labels),
            "prompt": up.gauge("tritongate_prompt_tokens_total", **labels),
        }

    before = counts()
    body = {"model": "chatglm2", "messages": HELLO, "max_tokens": 10, "ignore_eos": True, "stream": True}
    for _ in range(10):
        assert "[DONE]" in httpx.post(up.base_url + "/v1/chat/completions", json=body, timeout=60).text
    grown = {"requests": 10, "first": 10, "between": 90, "generated": 100, "prompt": 240}
    # A request is counted when all of it is over, which is after its last byte.
    wait_until(lambda: counts() == {name: before[name] + grown[name] for name in before})


def test_tritons_two_ports_are_on_loopback(up: UpProcess) -> None:
    """It has no HTTP server: its gRPC and its metrics."""
    listening = [each.laddr for each in up.server().net_connections() if each.status == "LISTEN"]
    assert len({address.port for address in listening}) == 2
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
