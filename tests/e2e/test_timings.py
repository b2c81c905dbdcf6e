"""Where a request's time went, as the real engine and the gateway tell it, and metrics under vLLM's names."""

from typing import Any

import httpx
import openai
import pytest

from tests.e2e.up_process import UpProcess, metric, wait_until

pytestmark = pytest.mark.e2e

MODEL = "chatglm3"
ROUNDING_MS = 0.002
EXTRA = {"include_timings": True, "ignore_eos": True}


def usages(sdk: openai.OpenAI, *, stream: bool, tokens: int = 8) -> list[Any]:
    """The usage of an answer on each route; all but the Responses' are two answers."""
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    asked: dict[str, Any] = {"model": MODEL, "extra_body": EXTRA}
    chat = sdk.chat.completions.create(
        messages=[{"role": "user", "content": "你好"}], max_tokens=tokens, n=2, **asked, **options
    )
    text = sdk.completions.create(prompt=["a", "b"], max_tokens=tokens, **asked, **options)
    response = sdk.responses.create(input="你好", max_output_tokens=tokens, stream=stream, **asked)
    if stream:
        return [[*chat][-1].usage, [*text][-1].usage, [*response][-1].response.usage]
    return [chat.usage, text.usage, response.usage]


def usages_of_one_server(up: UpProcess, sdk: openai.OpenAI, *, stream: bool) -> list[Any]:
    """Those of answers whose server lived: a resumed one does not tell how long it was queued before.

    Where tests share few processors, a tritonserver may die of a process that did not get to run.
    """

    def resumed() -> float:
        return metric(httpx.get(up.base_url + "/metrics").text, "tritongate_resumed_total", model=MODEL)

    while True:
        before = resumed()
        # So many that they cannot all come at once, whoever is late.
        found = usages(sdk, stream=stream, tokens=400)
        if resumed() == before:
            return found


@pytest.mark.parametrize("stream", [False, True])
def test_times_of_the_gateway_and_of_the_engine(stream: bool, up: UpProcess, sdk: openai.OpenAI) -> None:
    for usage in usages_of_one_server(up, sdk, stream=stream):
        times = usage.model_extra["timings"]
        assert times["engine_queued_ms"] is not None, up.output[-4000:]
        assert times["queued_ms"] >= 0
        assert times["engine_queued_ms"] >= 0
        assert times["queued_ms"] + times["engine_queued_ms"] <= times["first_token_ms"] + ROUNDING_MS
        assert times["generation_ms"] > 0
        assert times["first_token_ms"] + times["generation_ms"] <= times["server_ms"] + ROUNDING_MS


def test_metrics_under_vllms_names(up: UpProcess, sdk: openai.OpenAI) -> None:
    def told(name: str, **labels: str) -> float:
        return metric(httpx.get(up.base_url + "/metrics").text, name, **labels)

    tokens = told("vllm:generation_tokens_total", model_name=MODEL)
    ended = told("vllm:request_success_total", model_name=MODEL, finished_reason="length")
    usages(sdk, stream=False)
    assert told("vllm:generation_tokens_total", model_name=MODEL) - tokens == 8 * 5
    assert told("vllm:request_success_total", model_name=MODEL, finished_reason="length") - ended == 5
    # An engine is asked every second.
    wait_until(lambda: told("vllm:kv_cache_usage_perc", model_name=MODEL) == 0)
    exposition = httpx.get(up.base_url + "/metrics").text
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{model_name="{MODEL}"}} 0.0' in exposition
