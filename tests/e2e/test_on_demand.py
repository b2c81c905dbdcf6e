"""Ten models on a Triton with room for two, and two gateways: a request loads what it needs."""

import asyncio
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.serve_process import ServeProcess
from tests.e2e.stock_server import StockServer, stock_server
from tests.e2e.up_process import GOLDEN, UpProcess, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODELS = [f"model-{number}" for number in range(10)]
ROOM = 2
CLIENTS = 50
INPUTS = {
    "text_input": "STRING",
    "sampling_parameters": "STRING",
    "stream": "BOOL",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
OUTPUTS = {
    "text_output": "STRING",
    "finish_reason": "STRING",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}


def write_entry(folder: Path) -> None:
    (folder / "1").mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("foreign_model.py"), folder / "1" / "model.py")
    lines = ['backend: "python"', "model_transaction_policy { decoupled: true }"]
    for name, kind in INPUTS.items():
        optional = str(name != "text_input").lower()
        lines.append(f'input {{ name: "{name}" data_type: TYPE_{kind} dims: 1 optional: {optional} }}')
    lines += [
        f'output {{ name: "{name}" data_type: TYPE_{kind} dims: -1 }}' for name, kind in OUTPUTS.items()
    ]
    lines += [
        'parameters { key: "plays" value { string_value: "vllm" } }',
        "instance_group { kind: KIND_CPU }",
    ]
    (folder / "config.pbtxt").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockServer]:
    folder = tmp_path_factory.mktemp("on_demand")
    for model in MODELS:
        write_entry(folder / "repository" / model)
    flags = ("--model-control-mode=explicit", "--disable-auto-complete-config")
    with stock_server(folder / "repository", temporary=folder, flags=flags) as server:
        yield server


def gateway(server: StockServer, *, workers: int) -> ServeProcess:
    flags = ("--load-on-demand", "--max-loaded-models", str(ROOM), "--min-loaded-s", "0.3")
    return ServeProcess(server.grpc, *flags, "--workers", str(workers))


def in_memory(server: StockServer) -> int:
    index = httpx.post(f"http://{server.http}/v2/repository/index", json={}, timeout=20).json()
    return sum(entry.get("state") in ("LOADING", "READY", "UNLOADING") for entry in index)


async def test_ten_models_in_the_room_of_two(server: StockServer) -> None:
    with gateway(server, workers=2) as first, gateway(server, workers=1) as second:
        wait_until(lambda: all(len(listed(each)) == len(MODELS) for each in (first, second)))
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, await asyncio.to_thread(in_memory, server))
                await asyncio.sleep(0.05)

        async def ask(sdk: openai.AsyncOpenAI, number: int) -> str:
            """Return the answer's text, or the reason of a refusal."""
            model, prompt = MODELS[number % len(MODELS)], f"SAY:client {number}"
            try:
                if number % 4:
                    answer = await sdk.completions.create(model=model, prompt=prompt, max_tokens=20)
                    return answer.choices[0].text
                stream = await sdk.completions.create(model=model, prompt=prompt, max_tokens=20, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])
            except openai.APIStatusError as error:
                return f"{error.status_code}: {error.message}"

        async with first.sdk() as one, second.sdk() as two:
            watching = asyncio.create_task(watch())
            asks = [ask((one, two)[number // len(MODELS) % 2], number) for number in range(CLIENTS)]
            answers = await asyncio.gather(*asks)
            watching.cancel()
            assert answers == [f"client {number}" for number in range(CLIENTS)]
        wait_until(lambda: in_memory(server) <= ROOM)
        loads = sum(each.gauge("tritongate_model_loads_total", outcome="loaded") for each in (first, second))
        unloads = sum(each.gauge("tritongate_model_unloads_total", reason="room") for each in (first, second))
        assert len(MODELS) <= loads <= CLIENTS
        assert unloads >= loads - ROOM - 1
        assert most == ROOM  # on one machine, no race is lost


def test_up_loads_as_many_as_may_be_and_no_failed_load_twice(tmp_path: Path) -> None:
    for name in ("first", "second", "broken"):
        shutil.copytree(GOLDEN / "chatglm3", tmp_path / name)
    flags = [text for name in ("first", "second", "broken") for text in ("--model", str(tmp_path / name))]
    limits = ("--load-on-demand", "--max-loaded-models", "1", "--min-loaded-s", "0.3")
    with UpProcess(*flags, "--dtype", "float32", *limits) as up:
        up.wait_ready()
        wait_until(lambda: loaded(up) == {"first"})
        assert answer(up, "second").status_code == 200
        assert loaded(up) == {"second"}
        (tmp_path / "broken" / "config.json").unlink()
        refused = answer(up, "broken")
        assert refused.status_code == 503, refused.text
        assert "could not be loaded" in refused.text
        assert answer(up, "first").status_code == 200
        until = time.monotonic() + 4
        while time.monotonic() < until:  # nobody loads again what could not be loaded, or makes room for it
            assert loaded(up) == {"first"}


def loaded(up: UpProcess) -> set[str]:
    models = httpx.get(up.base_url + "/v1/models", timeout=20).json()["data"]
    return {model["id"] for model in models if not model.get("unloaded", False)}


def answer(up: UpProcess, model: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    return httpx.post(up.base_url + "/v1/chat/completions", json=body, timeout=60)


def listed(gateway: ServeProcess) -> list[str]:
    return [each["id"] for each in httpx.get(gateway.base_url + "/v1/models", timeout=20).json()["data"]]
