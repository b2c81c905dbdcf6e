"""Whatever dies, breaks or is missing: a clear answer in time, recovery, and no process left behind."""

import asyncio
import contextlib
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.field_client import FieldError, ask_batched
from tests.e2e.long_answers import LONG
from tests.e2e.up_process import GOLDEN, UpProcess, slowed, wait_until
from tests.ports import free_ports
from tests.processes import alive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CLEAR_WITHIN_S = 30.0
FAILS_WITHIN_S = 100.0
RECOVER_WITHIN_S = 60.0
STREAMS = 8
KSERVE_CLIENTS = 16
RESPONSES = 4
PORTS = ("--port", "--kserve-http-port", "--kserve-grpc-port", "--metrics-port")
HELLO = [{"role": "user", "content": "你好"}]


def client(up: UpProcess) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=up.base_url + "/v1", api_key="unused", max_retries=0, timeout=60)


async def endless_stream(sdk: openai.AsyncOpenAI, begun: asyncio.Event, killed: asyncio.Event) -> float:
    """Stream until the answer breaks; return when it did. Ends of answers are no ends: ask again.

    But for one that began after the death, and waited until all was well again.
    """
    while not killed.is_set():
        try:
            stream = await sdk.chat.completions.create(
                model="chatglm3",
                messages=HELLO,
                stream=True,
                max_tokens=LONG,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                begun.set()
        except openai.APIError:
            if not begun.is_set():
                begun.set()  # or its beginning would be waited for
                raise
            break
    return time.monotonic()


async def first_refusal(sdk: openai.AsyncOpenAI) -> tuple[float, openai.APIStatusError]:
    """Ask until nothing is begun any more; return when that was, and the refusal.

    What was on its way when the model died breaks as streams do.
    """
    while True:
        try:
            await sdk.chat.completions.create(model="chatglm3", messages=HELLO, max_tokens=1)
        except openai.APIStatusError as error:
            if error.status_code != httpx.codes.BAD_GATEWAY:
                return time.monotonic(), error


def answers(up: UpProcess) -> bool:
    """Ask once. Ready is not enough: while it repairs a model, it is unloaded, and that does not count."""
    with openai.OpenAI(base_url=up.base_url + "/v1", api_key="unused", max_retries=0) as sdk:
        try:
            answer = sdk.chat.completions.create(model="chatglm3", messages=HELLO, max_tokens=3)
        except openai.InternalServerError:
            return False
    return answer.usage.completion_tokens >= 1


def endless_response(up: UpProcess, amid: threading.Event) -> list[Any]:
    """Stream responses until one breaks; return its events, none if it was refused.

    `amid` is set while text has come of one that has not ended.
    For a thread of its own: a loop that reads many streams sees an answer's text when it is over.
    """
    with openai.OpenAI(base_url=up.base_url + "/v1", api_key="unused", max_retries=0) as sdk:
        while True:
            try:
                stream: Any = sdk.responses.create(
                    model="chatglm3",
                    input="你好",
                    stream=True,
                    max_output_tokens=LONG,
                    extra_body={"ignore_eos": True},
                )
            except openai.APIError:
                return []
            events = []
            for event in stream:
                events.append(event)
                if event.type == "response.output_text.delta":
                    amid.set()
            amid.clear()
            if events[-1].type == "response.failed":
                return events


def said(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def check_failed(events: list[Any]) -> None:
    *before, error, failed = events
    assert (error.type, error.code) == ("error", "service_unavailable")
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert failed.response.error.code == "server_error"
    assert before[-1].type == "response.output_text.delta"
    assert failed.response.output_text == said(events)


def endless_kserve(up: UpProcess) -> int:
    """Ask long questions as clients of Triton do; return the status of the error that one ends with."""
    while True:
        try:
            ask_batched(
                up.kserve_http, "你好", temperature="1", max_token=str(LONG), timeout_s=CLEAR_WITHIN_S
            )
        except FieldError as error:
            return error.status


async def break_under_load(up: UpProcess, victim: psutil.Process) -> None:
    """Kill `victim` amid streams: each breaks with an error in time, 503 follows, then all is well again.

    The engine is slowed until then. Else it may be answers ahead of these clients, who would read on for as
    long as it takes to recover, and ask again.
    """
    async with client(up) as sdk, contextlib.AsyncExitStack() as until_killed:
        begun, dead = [asyncio.Event() for _ in range(STREAMS)], asyncio.Event()
        streams = [asyncio.create_task(endless_stream(sdk, each, dead)) for each in begun]
        with ThreadPoolExecutor(KSERVE_CLIENTS + RESPONSES) as threads:
            until_killed.enter_context(slowed(up.stub("chatglm3")))
            loop = asyncio.get_running_loop()
            asking = [loop.run_in_executor(threads, endless_kserve, up) for _ in range(KSERVE_CLIENTS)]
            amid = [threading.Event() for _ in range(RESPONSES)]
            responses = [loop.run_in_executor(threads, endless_response, up, each) for each in amid]
            await asyncio.gather(*(each.wait() for each in begun))
            served = STREAMS + RESPONSES
            await asyncio.to_thread(wait_until, lambda: up.gauge("tritongate_requests_in_flight") >= served)
            refused = asyncio.create_task(first_refusal(sdk))
            await asyncio.to_thread(wait_until, lambda: all(each.is_set() for each in amid))
            killed = time.monotonic()
            victim.kill()
            dead.set()
            await until_killed.aclose()
            broken = await asyncio.wait_for(asyncio.gather(*streams), CLEAR_WITHIN_S)
            faults = set(await asyncio.gather(*asking))
            failed = [events for events in await asyncio.gather(*responses) if said(events)]
        assert max(broken) - killed < CLEAR_WITHIN_S
        assert failed, "none of the responses broke amid its text"
        for events in failed:
            check_failed(events)
        assert 503 in faults
        assert faults <= {502, 503}
        refused_at, refusal = await asyncio.wait_for(refused, CLEAR_WITHIN_S)
        assert refused_at - killed < CLEAR_WITHIN_S
        assert refusal.status_code == 503
        assert refusal.response.headers["retry-after"]
        await asyncio.to_thread(wait_until, up.is_ready, RECOVER_WITHIN_S)
        await asyncio.to_thread(wait_until, lambda: answers(up), RECOVER_WITHIN_S)
    assert not alive(victim)
    await asyncio.to_thread(wait_until, lambda: up.gauge("tritongate_requests_in_flight") == 0)
    await asyncio.to_thread(wait_until, lambda: up.gauge("tritongate_engine_kv_blocks_used") == 0)


def unload_and_load(up: UpProcess) -> None:
    """Over the KServe door: clients are told in between that the model is away."""
    control = up.kserve_http + "/v2/repository/models/chatglm3"
    assert httpx.post(control + "/unload", timeout=60).status_code == 200
    wait_until(lambda: not up.stubs("chatglm3"))
    with pytest.raises(FieldError) as raised:
        ask_batched(up.kserve_http, "你好", timeout_s=CLEAR_WITHIN_S)
    assert raised.value.status == 503
    assert httpx.post(control + "/load", timeout=100).status_code == 200
    assert ask_batched(up.kserve_http, "你好")


async def test_unloaded_then_a_dead_stub_then_a_dead_server_then_a_clean_end(own_up: UpProcess) -> None:
    processes = len(own_up.tree())
    await asyncio.to_thread(unload_and_load, own_up)
    await break_under_load(own_up, own_up.stub("chatglm3"))
    await break_under_load(own_up, own_up.server())
    await asyncio.to_thread(wait_until, lambda: len(own_up.tree()) == processes)
    assert own_up.stop() == 0


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "broken"
    shutil.copytree(GOLDEN / "chatglm3", directory)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    said = fails("--model", f"glm={directory}", free=free_ports(len(PORTS)))
    assert weights.name in said
    assert "Traceback" not in said


def test_a_port_in_use_is_named() -> None:
    def fails_for(flag: str, free: list[int]) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            said = fails(flag, str(port), free=free)
        assert str(port) in said, flag
        assert "Traceback" not in said, flag

    with ThreadPoolExecutor(len(PORTS)) as threads:
        list(threads.map(fails_for, PORTS, [free_ports(len(PORTS)) for _ in PORTS]))


def fails(*arguments: str, free: list[int]) -> str:
    """Run `tritongate up` on free ports; hold that it fails in time, and return what it said."""
    ports = {flag: str(port) for flag, port in zip(PORTS, free, strict=True)}
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
