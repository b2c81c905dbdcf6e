"""Models come and go while `tritongate up` runs: by the gateway, by command, by another gateway."""

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.serve_process import ServeProcess
from tests.e2e.up_process import GOLDEN, UpProcess, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ENTRY = ["chatglm3"]
TIMEOUT_S = 120.0
HELLO: list[Any] = [{"role": "user", "content": "你好"}]
FIRST: list[Any] = [
    {"role": "system", "content": "You answer briefly, politely and in the language of the question."},
    {"role": "user", "content": "你好，请介绍一下你自己"},
]
KEYS = json.dumps(
    [
        {"name": "client", "key": "sk-client"},
        {"name": "operator", "key": "sk-admin", "scopes": ["admin", "inference"]},
    ]
)


@pytest.fixture(scope="module")
def up() -> Iterator[UpProcess]:
    os.environ["TRITONGATE_API_KEYS"] = KEYS
    try:
        process = UpProcess("--model", str(GOLDEN / "chatglm3"), "--dtype", "float32")
    finally:
        del os.environ["TRITONGATE_API_KEYS"]
    try:
        yield process.wait_ready()
    finally:
        process.close()


def change(up: UpProcess, action: str, key: str = "sk-admin", **options: Any) -> httpx.Response:
    url = f"{up.base_url}/v1/models/chatglm3/{action}"
    return httpx.post(url, json=options, headers={"Authorization": f"Bearer {key}"}, timeout=120)


def model(up: UpProcess) -> dict[str, Any]:
    url = up.base_url + "/v1/models/chatglm3"
    headers = {"Authorization": "Bearer sk-client"}
    return dict(httpx.get(url, headers=headers, timeout=TIMEOUT_S).json())


def client(up: UpProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=up.base_url + "/v1", api_key="sk-client", max_retries=0)


def ask(up: UpProcess, messages: list[Any] = HELLO, **options: Any) -> Any:
    with client(up) as sdk:
        return sdk.chat.completions.create(model="chatglm3", messages=messages, temperature=0, **options)


def test_a_model_is_unloaded_and_its_memory_comes_back(up: UpProcess) -> None:
    cached = second_turn(up, FIRST)
    before = ask(up, cached, max_tokens=20)
    assert len(up.stubs("chatglm3")) == 1
    memory = sum(process.memory_info().rss for process in up.stubs("chatglm3"))
    answer = change(up, "unload")
    assert answer.status_code == 200, answer.text
    assert answer.json()["changes"][0]["entries"] == ENTRY
    wait_until(lambda: not up.stubs("chatglm3"))
    assert memory > 100 * 2**20
    assert model(up)["unloaded"]
    ready = httpx.get(up.base_url + "/health/ready", timeout=TIMEOUT_S)
    assert (ready.status_code, ready.json()["models"]) == (200, [])
    with pytest.raises(openai.APIStatusError) as refused:
        ask(up)
    assert (refused.value.status_code, "retry-after" in refused.value.response.headers) == (503, True)
    assert change(up, "unload").json()["changes"][0]["entries"] == []
    answer = change(up, "load")
    assert answer.json()["changes"][0]["entries"] == ENTRY
    assert answer.json()["model"]["ready"]
    fresh = ask(up, cached, max_tokens=20)
    assert fresh.choices[0].message.content == before.choices[0].message.content
    assert before.usage.prompt_tokens_details.cached_tokens > 0
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0


def second_turn(up: UpProcess, messages: list[Any]) -> list[Any]:
    """Ask, and return the conversation's next turn; the engine's cache has the turns before it by then."""
    first = ask(up, messages, max_tokens=20)
    said = {"role": "assistant", "content": first.choices[0].message.content or ""}
    conversation = [*messages, said, {"role": "user", "content": "And in English?"}]
    second = ask(up, conversation, max_tokens=20)
    cached = second.usage.prompt_tokens_details.cached_tokens
    # All of the first turn's prompt but what does not fill a block of 16.
    assert cached >= first.usage.prompt_tokens // 16 * 16 > 0
    hits = "tritongate_engine_prefix_hit_tokens_total"
    wait_until(lambda: up.gauge(hits, model="chatglm3") >= cached)
    again = ask(up, conversation, max_tokens=20)
    assert again.usage.prompt_tokens_details.cached_tokens >= cached
    assert again.choices[0].message.content == second.choices[0].message.content
    return conversation


def test_requests_in_flight_finish_and_parallel_changes_conflict(up: UpProcess) -> None:
    with client(up) as sdk, ThreadPoolExecutor(4) as threads:
        stream = sdk.chat.completions.create(
            model="chatglm3", messages=HELLO, stream=True, max_tokens=480, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        reloads = [threads.submit(change, up, "load", reload=True) for _ in range(4)]
        chunks = list(stream)
        statuses = sorted(reload.result().status_code for reload in reloads)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert statuses == [200, 409, 409, 409]
    assert model(up)["ready"]
    wait_until(lambda: len(up.stubs("chatglm3")) == 1)


def test_clients_that_leave_with_the_reason_for_the_end_do_not_keep_the_model(up: UpProcess) -> None:
    with client(up) as sdk:
        for length in range(100):
            with sdk.chat.completions.create(
                model="chatglm3", messages=HELLO, stream=True, max_tokens=1 + length % 5
            ) as stream:
                next(chunk for chunk in stream if chunk.choices[0].finish_reason)
    assert change(up, "unload").status_code == 200
    assert change(up, "load").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_at_any_moment_do_not_keep_the_model(up: UpProcess, stream: bool) -> None:
    dice = random.Random(0)
    body = {"model": "chatglm3", "messages": HELLO, "stream": stream, "max_tokens": 24}
    before = up.gauge("tritongate_client_cancels_total", model="chatglm3")

    def leave(http: httpx.Client) -> None:
        limit = httpx.Timeout(TIMEOUT_S, read=dice.uniform(0.001, 0.1))
        with (
            contextlib.suppress(httpx.ReadTimeout),
            http.stream("POST", "/v1/chat/completions", json=body, timeout=limit) as answer,
        ):
            for _ in zip(answer.iter_raw(), range(dice.randint(0, 24)), strict=False):
                pass

    with (
        httpx.Client(base_url=up.base_url, headers={"Authorization": "Bearer sk-client"}) as http,
        ThreadPoolExecutor(8) as threads,
    ):
        list(threads.map(leave, [http] * 500))
    wait_until(lambda: up.gauge("tritongate_requests_in_flight") == 0)
    assert up.gauge("tritongate_client_cancels_total", model="chatglm3") > before
    assert change(up, "unload").status_code == 200
    assert change(up, "load").status_code == 200


def test_clients_that_are_refused_do_not_keep_the_model(up: UpProcess) -> None:
    with client(up) as sdk, ThreadPoolExecutor(8) as threads:

        def refused(stream: bool) -> None:
            with pytest.raises(openai.BadRequestError):
                sdk.completions.create(model="chatglm3", prompt="x " * 900, stream=stream)

        list(threads.map(refused, [True, False] * 200))
    assert change(up, "unload").status_code == 200
    assert change(up, "load").status_code == 200


def test_who_may_and_what_may_not(up: UpProcess) -> None:
    assert change(up, "unload", "sk-client").status_code == 403
    assert change(up, "unload", "sk-wrong").status_code == 401
    elsewhere = change(up, "unload", upstream="127.0.0.1:1")
    assert (elsewhere.status_code, elsewhere.json()["error"]["param"]) == (400, "upstream")
    for name, status in (("nope", 404), ("chatglm3-stream", 404), ("..%2fx", 404)):
        url = f"{up.base_url}/v1/models/{name}/load"
        headers = {"Authorization": "Bearer sk-admin"}
        assert httpx.post(url, json={}, headers=headers, timeout=TIMEOUT_S).status_code == status
    assert model(up)["ready"]


def command(up: UpProcess, *words: str, key: str = "sk-admin") -> tuple[int, str]:
    done = subprocess.run(
        [Path(sys.executable).with_name("tritongate"), *words, "--url", up.base_url],
        env=os.environ | {"TRITONGATE_KEY": key},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_commands_that_are_refused(up: UpProcess) -> None:
    status, said = command(up, "load", "nope")
    assert (status, "nope" in said, "Traceback" in said) == (1, True, False)
    assert command(up, "unload", "chatglm3", key="sk-client")[0] == 1


def test_by_another_gateway(up: UpProcess) -> None:
    """The supervisor leaves alone what somebody unloaded, and readiness follows."""
    with ServeProcess(up.triton_grpc, key=up.repository_key) as other:
        url = f"{other.base_url}/v1/models/chatglm3"
        assert httpx.post(url + "/unload", json={}, timeout=TIMEOUT_S).status_code == 200
        wait_until(lambda: model(up).get("unloaded", False))
        assert httpx.get(up.base_url + "/health/ready", timeout=TIMEOUT_S).status_code == 200
        wait_until(lambda: not up.stubs("chatglm3"))
        assert httpx.post(url + "/load", json={}, timeout=120).status_code == 200
        wait_until(lambda: model(up)["ready"])
    assert ask(up, max_tokens=2).choices[0].finish_reason == "length"


def test_what_cannot_be_loaded_says_why(up: UpProcess) -> None:
    status, said = command(up, "unload", "chatglm3")
    assert (status, said.splitlines()[-1]) == (0, "chatglm3 is unloaded")
    config = next(
        Path(word.partition("=")[2]) / "chatglm3" / "config.pbtxt"
        for word in up.server().cmdline()
        if word.startswith("--model-repository=")
    )
    good = config.read_text(encoding="utf-8")
    config.write_text(good.replace(str(GOLDEN / "chatglm3"), "/nowhere/at/all"), encoding="utf-8")
    answer = change(up, "load")
    message = answer.json()["error"]["message"]
    assert (answer.status_code, "/nowhere/at/all" in message) == (502, True)
    assert "\n" not in message
    assert "At:" not in message
    assert httpx.get(up.base_url + "/health/ready", timeout=TIMEOUT_S).status_code == 503
    config.write_text(good, encoding="utf-8")

    def loaded() -> bool:
        status, said = command(up, "load", "chatglm3")
        return (status, said.splitlines()[-1]) == (0, "chatglm3 is ready")

    wait_until(loaded)  # the supervisor may be loading it already, which is a conflict
    assert ask(up, max_tokens=2).choices[0].finish_reason == "length"
    assert up.stop() == 0
