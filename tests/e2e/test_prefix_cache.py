"""A conversation's next turn finds the turns before it in the engine's cache, and answers as without it."""

import openai
import pytest

from tests.e2e.up_process import GOLDEN, UpProcess, wait_until

pytestmark = pytest.mark.e2e

FIRST = [
    {"role": "system", "content": "You answer briefly, politely and in the language of the question."},
    {"role": "user", "content": "你好，请介绍一下你自己"},
]


def ask(url: str, messages: list[dict[str, str]]) -> openai.types.chat.ChatCompletion:
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as sdk:
        return sdk.chat.completions.create(model="chatglm3", messages=messages, temperature=0, max_tokens=20)


def test_the_second_turn_finds_the_first_and_says_what_a_fresh_server_says(up: UpProcess) -> None:
    first = ask(up.base_url, FIRST)
    conversation = [
        *FIRST,
        {"role": "assistant", "content": first.choices[0].message.content or ""},
        {"role": "user", "content": "And in English?"},
    ]
    second = ask(up.base_url, conversation)
    details = second.usage.prompt_tokens_details
    # All of the first turn's prompt but what does not fill a block of 16.
    assert details.cached_tokens >= first.usage.prompt_tokens // 16 * 16 > 0
    again = ask(up.base_url, conversation)
    assert again.usage.prompt_tokens_details.cached_tokens >= details.cached_tokens
    hits = "tritongate_engine_prefix_hit_tokens_total"
    wait_until(lambda: up.gauge(hits, model="chatglm3") >= details.cached_tokens)
    fresh = UpProcess("--model", str(GOLDEN / "chatglm3"), "--dtype", "float32")
    try:
        alone = ask(fresh.wait_ready().base_url, conversation)
    finally:
        fresh.close()
    assert alone.usage.prompt_tokens_details.cached_tokens == 0
    assert {each.choices[0].message.content for each in (second, again, alone)} == {
        second.choices[0].message.content
    }
