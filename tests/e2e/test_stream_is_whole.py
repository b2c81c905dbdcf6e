"""Joined streams are the whole answers on the real engine: random requests, greedy or by a seed."""

from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState

pytestmark = pytest.mark.e2e

REQUESTS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["chatglm3", "chatglm2"]),
        "messages": st.text(min_size=1, max_size=12).map(lambda text: [{"role": "user", "content": text}]),
        "max_tokens": st.integers(1, 40),
        "seed": st.integers(0, 2**63 - 1),
        "temperature": st.sampled_from([0, 0.8, 2]),
    },
    optional={
        "n": st.integers(1, 3),
        "stop": st.lists(st.sampled_from(["的", " ", "e", "\n", "。"]), min_size=1, max_size=3),
        "top_p": st.floats(0.1, 1),
        "presence_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(3, 700).map(str), st.integers(-100, 20), max_size=3),
        "response_format": st.just({"type": "json_object"}),
    },
)


@hypothesis_settings(
    max_examples=40, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(asked=REQUESTS, logprobs=st.sampled_from([None, 0, 3]))
def test_random_requests(asked: dict[str, Any], logprobs: int | None, sdk: openai.OpenAI) -> None:
    if logprobs is not None:
        asked |= {"logprobs": True, "top_logprobs": logprobs}
    whole = sdk.chat.completions.create(**asked)
    state: Any = ChatCompletionStreamState()
    for chunk in sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        state.handle_chunk(chunk)
    joined = state.current_completion_snapshot
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(joined.usage, name) == getattr(whole.usage, name)
    for one, other in zip(joined.choices, whole.choices, strict=True):
        assert (one.index, one.finish_reason) == (other.index, other.finish_reason)
        assert (one.message.content or "") == (other.message.content or "")
        assert not any(stop in (one.message.content or "") for stop in asked.get("stop", ()))
        if logprobs is not None:
            listed = one.logprobs.content if one.logprobs else []  # of no text, no chunk has any
            for token, same in zip(listed, other.logprobs.content, strict=True):
                assert (token.token, token.bytes) == (same.token, same.bytes)
                # The second has its prompt from the cache, whose products may be rounded otherwise.
                assert token.logprob == pytest.approx(same.logprob, abs=1e-4)
                assert len(token.top_logprobs) == len(same.top_logprobs) == logprobs
