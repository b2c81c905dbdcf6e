"""Whatever dies, breaks or is missing: a clear answer in time, recovery, and no process left behind."""

import asyncio
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.e2e.up_process import GOLDEN, UpProcess, lives, wait_until
from tests.ports import free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CLEAR_WITHIN_S = 30.0
FAILS_WITHIN_S = 100.0
RECOVER_WITHIN_S = 60.0
STREAMS = 8
HELLO = [{"role": "user", "content": "你好"}]


def client(up: UpProcess) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=up.base_url + "/v1", api_key="unused", max_retries=0, timeout=60)


async def endless_stream(sdk: openai.AsyncOpenAI, begun: asyncio.Event) -> float:
    """Stream until the answer breaks; return when it did. Ends of answers are no ends: ask again."""
    while True:
        try:
            stream = await sdk.chat.completions.create(
                model="chatglm3", messages=HELLO, stream=True, max_tokens=480, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                begun.set()
        except openai.APIError:
            return time.monotonic()


async def first_refusal(sdk: openai.AsyncOpenAI, until: float) -> openai.APIStatusError:
    """Ask until nothing is begun any more; what was on its way when the model died breaks as streams do."""
    while time.monotonic() < until:
        try:
            await sdk.chat.completions.create(model="chatglm3", messages=HELLO, max_tokens=1)
        except openai.APIStatusError as error:
            if error.status_code != httpx.codes.BAD_GATEWAY:
                return error
    pytest.fail("the gateway never said that the model is away")


def answers(up: UpProcess) -> bool:
    """Ask once. Ready is not enough: while it repairs a model, it is unloaded, and that does not count."""
    with openai.OpenAI(base_url=up.base_url + "/v1", api_key="unused", max_retries=0) as sdk:
        try:
            answer = sdk.chat.completions.create(model="chatglm3", messages=HELLO, max_tokens=3)
        except openai.InternalServerError:
            return False
    return answer.usage.completion_tokens >= 1


async def break_under_load(up: UpProcess, victim: psutil.Process) -> None:
    """Kill `victim` amid streams: each breaks with an error in time, 503 follows, then all is well again."""
    async with client(up) as sdk:
        begun = [asyncio.Event() for _ in range(STREAMS)]
        streams = [asyncio.create_task(endless_stream(sdk, each)) for each in begun]
        await asyncio.gather(*(each.wait() for each in begun))
        killed = time.monotonic()
        victim.kill()
        refused = asyncio.create_task(first_refusal(sdk, until=killed + CLEAR_WITHIN_S))
        broken = await asyncio.wait_for(asyncio.gather(*streams), CLEAR_WITHIN_S)
        assert max(broken) - killed < CLEAR_WITHIN_S
        refusal = await refused
        assert refusal.status_code == 503
        assert refusal.response.headers["retry-after"]
        await asyncio.to_thread(wait_until, up.is_ready, RECOVER_WITHIN_S)
        await asyncio.to_thread(wait_until, lambda: answers(up), RECOVER_WITHIN_S)
    assert not lives(victim)
    await asyncio.to_thread(wait_until, lambda: up.gauge("tritongate_requests_in_flight") == 0)
    await asyncio.to_thread(wait_until, lambda: up.gauge("tritongate_engine_kv_blocks_used") == 0)


async def test_dead_stub_then_dead_server_then_a_clean_end(own_up: UpProcess) -> None:
    processes = len(own_up.tree())
    await break_under_load(own_up, own_up.stub("chatglm3"))
    await break_under_load(own_up, own_up.server())
    await asyncio.to_thread(wait_until, lambda: len(own_up.tree()) == processes)
    assert own_up.stop() == 0


@pytest.mark.parametrize("victim", ["the gateway", "the supervisor"])
def test_nothing_outlives_a_killed_parent(own_up: UpProcess, victim: str) -> None:
    assert own_up.tree()
    if victim == "the gateway":
        own_up.process.kill()
        own_up.process.wait()
    else:
        own_up.supervisor().kill()
        assert own_up.process.wait(CLEAR_WITHIN_S) != 0
    wait_until(lambda: not own_up.tree())


def broken_checkpoint(folder: Path, damage: str) -> Path:
    directory = folder / "broken"
    shutil.copytree(GOLDEN / "chatglm3", directory)
    weights = directory / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "garbage":
        weights.write_bytes(b"\0" * 4096)
    else:
        (directory / damage).unlink()
    return directory


@pytest.mark.parametrize(
    "damage", ["truncated", "garbage", "model.safetensors", "tokenizer.model", "config.json"]
)
def test_a_broken_checkpoint_is_named(tmp_path: Path, damage: str) -> None:
    directory = broken_checkpoint(tmp_path, damage)
    said = fails("--model", f"glm={directory}")
    named = damage if "." in damage else "model.safetensors"
    assert named in said
    assert "Traceback" not in said


@pytest.mark.parametrize("flag", ["--port", "--kserve-http-port", "--kserve-grpc-port", "--metrics-port"])
def test_a_port_in_use_is_named(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = fails(flag, str(port))
    assert str(port) in said
    assert "Traceback" not in said


def fails(*arguments: str) -> str:
    """Run `tritongate up` on free ports; hold that it fails in time, and return what it said."""
    flags = ("--port", "--kserve-http-port", "--kserve-grpc-port", "--metrics-port")
    ports = {flag: str(port) for flag, port in zip(flags, free_ports(len(flags)), strict=True)}
    ports |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    words = [text for pair in ports.items() for text in pair]
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("tritongate")),
            "up",
            *words,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=FAILS_WITHIN_S,
        check=False,
    )
    assert done.returncode != 0
    return done.stdout
