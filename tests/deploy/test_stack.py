"""The CPU profile of docker-compose.yml, run by hand: a real Triton, the gateway, a real Prometheus.

Once for all tests here: it answers, gets traffic with everything in it that dashboards show, loses its
engine, and is restarted.
"""

import concurrent.futures
import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import openai
import pytest

from deploy.docker.triton_health import server_is
from tests.deploy.compose_file import CHOSEN, EXAMPLE_ENV, ROOT, read_env
from tests.deploy.compose_stack import KEY, ComposeStack, keys_in
from tests.deploy.prometheus_client import Prometheus, panels
from tests.e2e.up_process import metric, wait_until
from tests.processes import alive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # the fixtures are one long story

MODEL = "chatglm3-demo"
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
QUESTION = "What is tritongate?"
TRIES = 3
LONG = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
PROMETHEUS = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="LEFT OUT: Prometheus is not installed, so no dashboard was asked (apt install prometheus)",
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    folder = tmp_path_factory.mktemp("stack")
    chosen = CHOSEN | {"TRITON_KEY": "s3cret", "MAX_IN_FLIGHT": "4", "MAX_WAITING": "2"}
    with ComposeStack(folder, read_env(EXAMPLE_ENV) | chosen, keys_in(folder)) as stack:
        if shutil.which("prometheus"):
            stack.start("prometheus")
        stack.start("triton-cpu")
        stack.start("gateway")
        stack.wait_healthy("triton-cpu")
        stack.wait_healthy("gateway")
        yield stack


@pytest.fixture(scope="module")
def sdk(stack: ComposeStack) -> Iterator[openai.OpenAI]:
    url = f"http://{stack.address('gateway', '8080')}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def ask(sdk: openai.OpenAI, **more: object) -> str:
    """Stream an answer; returns its text."""
    messages = [{"role": "user", "content": QUESTION}]
    chunks = sdk.chat.completions.create(model=MODEL, messages=messages, stream=True, **more)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def count(stack: ComposeStack, name: str, **labels: str) -> float:
    return metric(
        httpx.get(f"http://{stack.address('gateway', '8080')}/metrics", timeout=20).text, name, **labels
    )


@pytest.fixture(scope="module")
def eventful(stack: ComposeStack, sdk: openai.OpenAI) -> ComposeStack:
    """A stack that has seen everything that dashboards show."""
    # More at once than may work and wait: some are turned away.
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, sdk, **LONG) for _ in range(12)]
        turned_away = [each for each in asked if isinstance(each.exception(), openai.RateLimitError)]
    assert turned_away
    assert len(turned_away) < len(asked)
    with pytest.raises(openai.BadRequestError):
        ask(sdk, temperature=9)
    # A client that hangs up.
    with sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], stream=True, **LONG
    ) as chunks:
        next(iter(chunks))
    wait_until(lambda: count(stack, "tritongate_client_cancels_total") > 0)
    lose_the_engine(stack, sdk)
    return stack


def lose_the_engine(stack: ComposeStack, sdk: openai.OpenAI) -> None:
    """Kill the model's process under an answer, which goes on once Compose has restarted Triton.

    Triton may die of it, too (divergence 16); then it is done again.
    """
    for _ in range(TRIES):
        with sdk.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": QUESTION}], stream=True, **LONG
        ) as chunks:
            answer = iter(chunks)
            next(answer)
            kill_the_engine(stack)
            with pytest.raises(openai.APIStatusError):  # what had not begun does not wait
                ask(sdk)
            told = told_to_end(stack)
            stack.kill("triton-cpu")  # it gives the dead model its whole --exit-timeout-secs
            stack.start("triton-cpu")  # the restart policy
            stack.wait_healthy("triton-cpu")
            stack.wait_healthy("gateway")
            *_, last = answer
            assert last.choices[0].finish_reason == "length"
        if told:
            return
    pytest.fail(f"Triton aborted {TRIES} times")


def kill_the_engine(stack: ComposeStack) -> None:
    (stub,) = [
        process
        for process in stack.process("triton-cpu").children(recursive=True)
        if f"/{MODEL}/" in " ".join(process.cmdline())
    ]
    stub.kill()


def told_to_end(stack: ComposeStack) -> bool:
    """Hold that Triton calls itself ready and its health check does not; False where it ended by itself."""
    triton = stack.process("triton-cpu")
    with contextlib.suppress(grpc.RpcError):
        assert server_is("Ready", stack.address("triton-cpu", "8001"))
    patience = ("--stale-s=2", "--end-after-s=4")
    wait_until(lambda: stack.healthy("triton-cpu", *patience).returncode == 1)
    wait_until(lambda: stack.healthy("gateway").returncode == 1)

    def told() -> bool:
        stack.healthy("triton-cpu", *patience)
        return "Signal (15) received" in stack.log("triton-cpu")

    wait_until(lambda: told() or not alive(triton))
    return told()


def test_a_chat_completion(stack: ComposeStack, sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": QUESTION}])
    assert "OpenAI" in str(answer.choices[0].message.content)
    with pytest.raises(openai.AuthenticationError):
        ask(sdk.with_options(api_key="another"))


def test_clients_of_a_triton_are_served(stack: ComposeStack) -> None:
    """By the gateway, with its keys; Triton's own HTTP server is off."""
    url = f"http://{stack.address('gateway', '8000')}/v2"
    assert httpx.get(f"{url}/health/ready", timeout=20).status_code == 200
    tensors = {"prompt": QUESTION, "history": "", "temperature": "0.1", "max_token": "64"}
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1, 1], "data": [text]} for name, text in tensors.items()
    ]
    path = f"{url}/models/{MODEL}/infer"
    assert httpx.post(path, json={"inputs": inputs}, timeout=60).status_code == 401
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(path, json={"inputs": inputs}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    outputs = {each["name"]: each["data"] for each in answer.json()["outputs"]}
    assert "OpenAI" in outputs["response"][0]


def test_an_engine_that_died_is_replaced(eventful: ComposeStack, sdk: openai.OpenAI) -> None:
    assert "OpenAI" in ask(sdk)
    assert f"{MODEL}: the engine's last heartbeat was" in eventful.said


@pytest.fixture(scope="module")
def prometheus(eventful: ComposeStack) -> Iterator[Prometheus]:
    assert eventful.healthy("prometheus").returncode == 0, eventful.log("prometheus")
    client = Prometheus(eventful.address("prometheus", "9090"))
    yield client
    client.close()


@PROMETHEUS
def test_every_target_is_scraped_and_every_rule_evaluated(prometheus: Prometheus) -> None:
    targets = prometheus.get("/targets")["activeTargets"]
    assert {each["labels"]["job"]: each["health"] for each in targets} == {
        "tritongate": "up",
        "triton": "up",
        "prometheus": "up",
    }
    assert not prometheus.series("tritongate_no_such_metric", seconds=120)
    rules = [rule for group in prometheus.get("/rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 20
    assert not [rule for rule in rules if rule["health"] != "ok"]
    for rule in rules:
        if rule["type"] == "recording":
            assert prometheus.series(rule["name"], seconds=120), rule["name"]


@PROMETHEUS
@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_shows_something(prometheus: Prometheus, path: Path) -> None:
    empty = [
        f"{title}: {expr}"
        for title, exprs in panels(path)
        for expr in exprs
        # No GPU here: these are asked of a recording, in test_recording.py.
        if "nv_gpu_" not in expr and not prometheus.series(expr, seconds=120)
    ]
    assert not empty, "\n".join(empty)


@PROMETHEUS
@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_variable_has_values(prometheus: Prometheus, path: Path) -> None:
    queries = re.findall(r"label_values\((\w+), (\w+)\)", path.read_text(encoding="utf-8"))
    assert queries
    for name, label in queries:
        assert MODEL in prometheus.label_values(name, label)


def test_it_stops_when_asked(stack: ComposeStack) -> None:
    """Last: nothing is left, and nothing was killed."""
    for name in ("gateway", "triton-cpu"):
        assert stack.stop(name) == 0, stack.log(name)
    with contextlib.suppress(KeyError):
        assert stack.stop("prometheus") == 0
