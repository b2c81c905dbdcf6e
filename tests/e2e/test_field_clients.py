"""Clients that already speak to ChatGLM on Triton: unchanged, on the gateway's ports for them."""

import ast
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.e2e.field_client import (
    FieldError,
    ask_batched,
    ask_chatglm2,
    conversation,
    infer,
    tensor,
)
from tests.e2e.up_process import UpProcess, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CONTEXT = 512
HELLO = "你好"


@pytest.fixture
def grpc(up: UpProcess) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(up.kserve_grpc) as client:
        yield client


def test_four_threads_ask_ten_times(up: UpProcess) -> None:
    steps = up.gauge("tritongate_engine_batch_size_count", model="chatglm3")
    sequences = up.gauge("tritongate_engine_batch_size_sum", model="chatglm3")

    def ask(number: int) -> tuple[str, str]:
        return ask_batched(
            up.kserve_http, f"{HELLO}{number}", temperature="0.7", max_token="120", nested=number % 2 == 0
        )

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask, range(10)))
    for number, (response, history) in enumerate(answers):
        assert conversation(history) == [("user", f"{HELLO}{number}"), ("assistant", response)]

    def batch_size() -> float:
        after = up.gauge("tritongate_engine_batch_size_count", model="chatglm3") - steps
        return (up.gauge("tritongate_engine_batch_size_sum", model="chatglm3") - sequences) / max(after, 1)

    wait_until(lambda: batch_size() > 1)
    (statistics,) = httpx.get(f"{up.kserve_http}/v2/models/chatglm3/stats").json()["model_stats"]
    assert statistics["inference_count"] >= 10


def test_two_turns_with_the_history_as_json_and_as_a_literal(up: UpProcess) -> None:
    first, history = ask_batched(up.kserve_http, HELLO)
    literal = str(ast.literal_eval(history))
    assert literal != history
    second = [ask_batched(up.kserve_http, "And?", fed, max_token="80") for fed in (history, literal)]
    assert second[0] == second[1]
    assert second[0][0] != ask_batched(up.kserve_http, "And?", max_token="80")[0]
    turns = [("user", HELLO), ("assistant", first), ("user", "And?"), ("assistant", second[0][0])]
    assert conversation(second[0][1]) == turns
    assert ast.literal_eval(second[0][1]) == json.loads(second[0][1])


def test_the_answer_is_that_of_the_openai_api(up: UpProcess, sdk: openai.OpenAI) -> None:
    for model in ("chatglm3", "chatglm2"):
        completion = sdk.chat.completions.create(
            model=model, messages=[{"role": "user", "content": HELLO}], temperature=0, max_tokens=20
        )
        prompt_tokens = completion.usage.prompt_tokens
        expected = completion.choices[0].message.content
        if model == "chatglm3":
            answer, _ = ask_batched(up.kserve_http, HELLO, max_token=str(prompt_tokens + 20))
        else:
            with grpcclient.InferenceServerClient(up.kserve_grpc) as client:
                answer, _ = ask_chatglm2(client, HELLO, [], max_token=str(prompt_tokens + 20))
        assert answer == expected


def test_only_the_last_ten_items_count(up: UpProcess) -> None:
    older = [{"role": "user", "content": "old"}, {"role": "assistant", "content": "older"}]
    items = [
        {"role": role, "content": f"{role} {number}"} for number in range(5) for role in ("user", "assistant")
    ]
    kept = ask_batched(up.kserve_http, HELLO, json.dumps(items), max_token="300")
    assert ask_batched(up.kserve_http, HELLO, json.dumps(older + items), max_token="300") == kept
    assert len(conversation(kept[1])) == 12


def test_temperature_and_length_are_each_requests_own(up: UpProcess) -> None:
    """The field's batches took the maximum of all."""
    alone, _ = ask_batched(up.kserve_http, HELLO, max_token="24")

    def ask(number: int) -> str:
        if number % 2:
            return ask_batched(up.kserve_http, HELLO, temperature="1.9", max_token="200")[0]
        return ask_batched(up.kserve_http, HELLO, max_token="24")[0]

    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(ask, range(12)))
    assert set(answers[::2]) == {alone}
    assert len(set(answers[1::2])) > 1


def test_rows_of_one_request_are_answered_each_by_itself(up: UpProcess) -> None:
    url = f"{up.kserve_http}/v2/models/chatglm3/infer"
    prompts, lengths = [HELLO, "hi"], ["30", "50"]
    rows = [
        tensor("prompt", [2, 1], prompts),
        tensor("history", [2, 1], ["", "[]"]),
        tensor("temperature", [2, 1], ["0", "0.0"]),
        tensor("max_token", [2, 1], lengths),
    ]
    alone = [
        ask_batched(up.kserve_http, prompt, max_token=length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    outputs = infer(url, rows)
    assert list(zip(outputs["response"], outputs["history"], strict=True)) == alone
    rows[2] = tensor("temperature", [2, 1], ["0", "hot"])
    with pytest.raises(FieldError, match="row 1: temperature") as raised:
        infer(url, rows)
    assert raised.value.status == 400


def test_max_token_is_the_total_and_never_over_the_context(up: UpProcess) -> None:
    conversation = {"model": "chatglm3", "messages": [{"role": "user", "content": HELLO}]}
    count = httpx.post(up.base_url + "/tokenize", json=conversation).json()["count"]
    with pytest.raises(FieldError, match="together may have"):
        ask_batched(up.kserve_http, HELLO, max_token=str(count))
    ask_batched(up.kserve_http, HELLO, max_token=str(count + 1))
    full = ask_batched(up.kserve_http, HELLO, max_token=str(CONTEXT))
    assert ask_batched(up.kserve_http, HELLO, max_token="1000000") == full


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", "2.1", "temperature"),
        ("temperature", "-1", "temperature"),
        ("temperature", "nan", "temperature"),
        ("temperature", "", "temperature"),
        ("max_token", "0", "max_token"),
        ("max_token", "12.5", "max_token"),
        ("max_token", "many", "max_token"),
        ("history", "[" * 2_000_000, "history"),
        ("history", "(" * 100_000, "nests too deeply"),
        ("history", "__import__('os')", "neither JSON nor"),
        ("history", '{"role": "user"}', "history"),
        ("history", '[{"role": "root", "content": ""}]', "role"),
        ("history", '[["q", "a"], {"role": "user", "content": ""}]', "mixed"),
        ("history", '[{"role":"user","content":"a"},{"role":"system","content":"b"}]', "only the first"),
        ("prompt", HELLO * CONTEXT, "context"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(up: UpProcess, field: str, value: str, words: str) -> None:
    request = {"prompt": HELLO, "history": "", "temperature": "0", "max_token": "40"} | {field: value}
    with pytest.raises(FieldError, match=words) as raised:
        ask_batched(up.kserve_http, **request)
    assert raised.value.status == 400
    assert "Traceback" not in str(raised.value)


def test_chatglm2_over_grpc(up: UpProcess, grpc: grpcclient.InferenceServerClient) -> None:
    first, history = ask_chatglm2(grpc, HELLO, [], max_token="100")
    assert history == [HELLO, first]
    second, longer = ask_chatglm2(grpc, "再说", history)
    assert longer == [HELLO, first, "再说", second]
    forgetful, kept = ask_chatglm2(grpc, "再说", history, rounds="0")
    assert kept == ["再说", forgetful]
    assert forgetful == ask_chatglm2(grpc, "再说", [])[0]
    assert forgetful != second
    long = [f"{kind}{number}" for number in range(4) for kind in "qa"]
    assert ask_chatglm2(grpc, HELLO, long, rounds="2")[1][:-1] == [*long[-4:], HELLO]


def test_chatglm2s_refusals(grpc: grpcclient.InferenceServerClient) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "flat list": {"history": ["q"]},
        "history_len": {"rounds": "-1"},
        "max_token": {"max_token": "x"},
        "temperature": {"temperature": "1e9"},
    }
    for words, changes in wrong.items():
        arguments = {"prompt": HELLO, "history": [], **changes}
        with pytest.raises(InferenceServerException, match=words) as raised:
            ask_chatglm2(grpc, **arguments)
        assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"


@pytest.mark.parametrize("size", [5_000_000, 20_000_000])
def test_a_body_that_kills_a_triton_is_refused(up: UpProcess, size: int) -> None:
    for url in (up.kserve_http, up.base_url):
        with pytest.raises(FieldError, match="exceeds the limit") as raised:
            ask_batched(url, "x" * size)
        assert raised.value.status == 413
    with grpcclient.InferenceServerClient(up.kserve_grpc) as client:
        with pytest.raises(InferenceServerException) as refused:
            ask_chatglm2(client, "x" * size, [])
        assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        assert ask_chatglm2(client, HELLO, [])


def test_the_same_on_every_port(up: UpProcess) -> None:
    assert ask_batched(up.base_url, HELLO) == ask_batched(up.kserve_http, HELLO)
    assert httpx.get(up.kserve_http + "/v1/models").json() == httpx.get(up.base_url + "/v1/models").json()
