"""Several choices, on either route; over the official SDK and a real socket, on the fake upstream."""

from typing import Any

import pytest

from tests.gateway.fake_upstream import FakeUpstream, say_choices
from tests.gateway.serving import MESSAGES, in_process, on_socket


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("logprobs", [None, True])
async def test_choices_are_told_apart_and_the_sdk_puts_them_together(n: int, logprobs: bool | None) -> None:
    asked: dict[str, Any] = {"model": "glm", "messages": MESSAGES, "n": n}
    if logprobs:
        asked |= {"logprobs": True}
    async with on_socket(FakeUpstream(say_choices)) as served:
        whole = await served.sdk.chat.completions.create(**asked)
        async with served.sdk.chat.completions.stream(
            **asked, stream_options={"include_usage": True}
        ) as stream:
            async for _ in stream:
                pass
            streamed = stream.current_completion_snapshot
        assert [request.n for request in served.upstream.requests] == [n, n]
    assert [choice.index for choice in whole.choices] == list(range(n))
    assert [choice.message.content for choice in whole.choices] == [f"Hello {index}" for index in range(n)]
    assert [choice.finish_reason for choice in whole.choices] == ["stop", *["length"] * (n - 1)]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 2 * n)
    assert streamed.usage == whole.usage
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        assert (one.index, one.message.content, one.finish_reason) == (
            other.index,
            other.message.content,
            other.finish_reason,
        )
        assert bool(one.logprobs) == bool(logprobs)
        if one.logprobs:
            assert one.logprobs.content == other.logprobs.content
            assert [token.logprob for token in one.logprobs.content] == [-1.0 - one.index] * 2


async def test_more_choices_than_the_setting_allows_are_refused_before_they_cost_anything() -> None:
    async with in_process(FakeUpstream(say_choices), max_choices=3) as served:
        assert (await served.chat(n=3)).status_code == 200
        assert await served.refusal(n=4) == (400, "n", None)
        assert await served.refusal(n=4, stream=True) == (400, "n", None)
        assert len(served.upstream.requests) == 1


async def test_times_between_tokens_are_counted_choice_by_choice() -> None:
    async with in_process(FakeUpstream(say_choices)) as served:
        await served.chat(n=4)
        assert served.metric("time_to_first_token_seconds_count", model="glm") == 1
        assert served.metric("inter_token_latency_seconds_count", model="glm") == 4
        assert served.metric("generated_tokens_total", model="glm") == 8


@pytest.mark.parametrize("ids", [False, True])
async def test_choices_are_told_apart(ids: bool) -> None:
    asked = {"model": "glm", "prompt": "a", "n": 3, "extra_body": {"return_token_ids": ids}}
    async with on_socket(FakeUpstream(say_choices)) as served:
        whole = await served.sdk.completions.create(**asked)
        chunks = [chunk async for chunk in await served.sdk.completions.create(**asked, stream=True)]
    assert [(choice.index, choice.text, choice.finish_reason) for choice in whole.choices] == [
        (0, "Hello 0", "stop"),
        (1, "Hello 1", "length"),
        (2, "Hello 2", "length"),
    ]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 6)
    for choice in whole.choices:
        parts = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [None, choice.finish_reason]
        index = choice.index
        expected = {"prompt_token_ids": [8, 9, 8], "token_ids": [index, index]} if ids else {}
        assert choice.model_extra == expected | {"stop_reason": None}
        if ids:
            assert [part.model_extra for part in parts] == [
                {"prompt_token_ids": [8, 9, 8], "token_ids": [index]},
                {"token_ids": [index], "stop_reason": None},
            ]
