"""Every way in which the real Triton fails, seen through the gateway's upstream: the error table, proven."""

import asyncio
import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tritonclient.grpc import service_pb2

from gateway.errors import (
    ContextLengthError,
    DeadlineError,
    GatewayError,
    InvalidRequestError,
    RateLimitError,
    UnavailableError,
    UpstreamProtocolError,
)
from gateway.generation import Conversation, Delta, Event, Generation, Message
from gateway.triton.channel import Channel
from gateway.triton.pool import TritonUpstream
from gateway.triton.replicas import ReplicaState
from gateway.triton.status import Fault, TritonError
from tests.e2e.serve_process import ServeProcess
from tests.e2e.up_process import wait_until
from wire.events import Failed, Ready, decode_event
from wire.refusal import RefusalCode
from wire.strings import pack_strings

pytestmark = pytest.mark.e2e

QUEUE = 2
QUEUE_TIMEOUT_S = 1.0
CONFIG = f"""
backend: "python"
max_batch_size: 4
model_transaction_policy {{ decoupled: true }}
input [
  {{ name: "prompt" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "history" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "sampling" data_type: TYPE_STRING dims: [ 1 ] }}
]
output [
  {{ name: "response" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "meta" data_type: TYPE_STRING dims: [ 1 ] }}
]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
dynamic_batching {{
  priority_levels: 2
  default_priority_level: 2
  default_queue_policy {{
    max_queue_size: {QUEUE}
    default_timeout_microseconds: {QUEUE_TIMEOUT_S * 1e6:.0f}
  }}
}}
"""
UNLOAD = service_pb2.RepositoryModelUnloadRequest(model_name="m-stream")
LOAD = service_pb2.RepositoryModelLoadRequest(model_name="m-stream")


class Scripted:
    """The server, and the folder of its one entry."""

    def __init__(self, address: str, entry: Path) -> None:
        self.address = address
        self.entry = entry

    @property
    def saw_cancel(self) -> Path:
        return self.entry / "cancelled"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    repository = tmp_path_factory.mktemp("repository")
    entry = repository / "m-stream"
    (entry / "1").mkdir(parents=True)
    (entry / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
    shutil.copy(Path(__file__).with_name("scripted_model.py"), entry / "1" / "model.py")
    command = [sys.executable, "-m", "triton_models.embedded", "--exit-with-stdin"]
    command += ["--repository", str(repository)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        for line in process.stdout:
            event = decode_event(line)
            assert not isinstance(event, Failed), event
            if isinstance(event, Ready):
                yield Scripted(event.grpc, entry)
                break
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(20)


async def until(condition: Callable[[], bool], *, within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def upstream_of(scripted: Scripted, **options: Any) -> AsyncIterator[TritonUpstream]:
    upstream = TritonUpstream(upstreams=[scripted.address], **options)
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.close()


@pytest.fixture
async def upstream(scripted: Scripted) -> AsyncIterator[TritonUpstream]:
    async with upstream_of(scripted) as upstream:
        await ready(upstream)
        yield upstream


async def ready(upstream: TritonUpstream) -> None:
    await until(lambda: any(card.ready for card in upstream.models()))


def asking(script: str, *, time_s: float = 30.0) -> Generation:
    return Generation(
        request_id="statuses",
        model="m",
        prompt=Conversation((Message(role="user", content=script),)),
        deadline=asyncio.get_running_loop().time() + time_s,
    )


async def ask(upstream: TritonUpstream, script: str, *, time_s: float = 30.0) -> list[Event]:
    return [event async for event in upstream.generate(asking(script, time_s=time_s))]


async def failure(upstream: TritonUpstream, script: str, *, time_s: float = 30.0) -> GatewayError:
    with pytest.raises(GatewayError) as raised:
        await ask(upstream, script, time_s=time_s)
    assert not any(secret in raised.value.message for secret in ("secret", "/", "Traceback", "m-stream"))
    return raised.value


async def test_models_are_found_and_answer(upstream: TritonUpstream) -> None:
    assert [card.id for card in upstream.models()] == ["m"]
    assert upstream.model("m").max_context == 8
    events = await ask(upstream, "hello")
    assert isinstance(events[-1], Delta)
    assert events[-1].text == "hello"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (RefusalCode.INVALID_REQUEST, InvalidRequestError),
        (RefusalCode.CONTEXT_LENGTH_EXCEEDED, ContextLengthError),
        (RefusalCode.QUEUE_FULL, RateLimitError),
        (RefusalCode.DEADLINE_EXCEEDED, DeadlineError),
        (RefusalCode.CANCELLED, UnavailableError),
        (RefusalCode.SHUTTING_DOWN, UnavailableError),
        (RefusalCode.INTERNAL, UpstreamProtocolError),
    ],
)
async def test_refusals(upstream: TritonUpstream, code: RefusalCode, error: type[GatewayError]) -> None:
    assert type(await failure(upstream, f"refuse {code}")) is error


def test_what_clients_get_over_http(scripted: Scripted) -> None:
    codes = {"invalid_request": 400, "context_length_exceeded": 400, "queue_full": 429}
    codes |= {"internal": 502, "shutting_down": 503, "deadline_exceeded": 504}
    scripts = {"hello": 200, "raise": 502} | {f"refuse {code}": status for code, status in codes.items()}
    with contextlib.closing(ServeProcess(scripted.address)) as gateway:
        for script, status in scripts.items():
            body = {"model": "m", "messages": [{"role": "user", "content": script}], "stream": True}
            answer = httpx.post(gateway.base_url + "/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == status, script
            assert ("retry-after" in answer.headers) == (status in {429, 503}), script
            assert status == 200 or set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert not any(secret in answer.text for secret in ("secret", "Traceback", "m-stream"))
            # After a refusal that puts the replica in doubt the gateway has none until its next probe.
            wait_until(gateway.is_ready, 30)


async def test_a_burst_of_refusals_leaves_the_server_alive(upstream: TritonUpstream) -> None:
    """Asked for their statuses by `triton_grpc_error`, tritonserver 2.51 dies of one in some hundreds."""
    # One after another: two at once wait for Triton's batcher, now and then for half a second.
    for _ in range(3000):
        assert type(await failure(upstream, "refuse invalid_request")) is InvalidRequestError


async def test_an_exception_in_execute(upstream: TritonUpstream) -> None:
    assert type(await failure(upstream, "raise")) is UpstreamProtocolError


async def test_a_model_that_triton_does_not_know(scripted: Scripted) -> None:
    async with upstream_of(scripted, models=["other"]) as upstream:
        await until(lambda: upstream.replicas()[0].state is ReplicaState.NOT_READY)
        with pytest.raises(UnavailableError):
            [event async for event in upstream.generate(asking_other())]
    channel = Channel(scripted.address)
    try:
        assert (await stream_failure(channel, "other-stream", [1, 1])).fault is Fault.NOT_READY
    finally:
        await channel.close()


def asking_other() -> Generation:
    loop = asyncio.get_running_loop()
    return Generation(request_id="r", model="other", prompt=Conversation(()), deadline=loop.time() + 30)


async def stream_failure(channel: Channel, entry: str, shape: list[int]) -> TritonError:
    request = service_pb2.ModelInferRequest(model_name=entry, id="statuses")
    for name in ("prompt", "history", "sampling"):
        request.inputs.add(name=name, datatype="BYTES", shape=shape)
        request.raw_input_contents.append(pack_strings([b"{}"]))
    deadline = asyncio.get_running_loop().time() + 30
    responses = channel.stream_infer(request, deadline=deadline, idle_timeout_s=20)
    with pytest.raises(TritonError) as raised:
        await anext(responses)
    return raised.value


async def test_tensors_of_another_shape(scripted: Scripted) -> None:
    channel = Channel(scripted.address)
    try:
        error = await stream_failure(channel, "m-stream", [1])
        assert error.fault is Fault.INTERNAL
        assert "unexpected shape" in error.detail
    finally:
        await channel.close()


async def test_tritons_queue_when_it_is_full_and_when_it_takes_too_long(
    upstream: TritonUpstream, scripted: Scripted
) -> None:
    blocking = asyncio.create_task(ask(upstream, "block 3"))
    await until((scripted.entry / "blocking").exists)
    queued = [asyncio.create_task(failure(upstream, "hello")) for _ in range(QUEUE)]
    await asyncio.sleep(0.3)
    assert type(await failure(upstream, "hello")) is RateLimitError
    assert [type(error) for error in await asyncio.gather(*queued)] == [DeadlineError] * QUEUE
    await blocking


async def test_the_requests_own_deadline(upstream: TritonUpstream, scripted: Scripted) -> None:
    scripted.saw_cancel.unlink(missing_ok=True)
    assert type(await failure(upstream, "beat", time_s=1.0)) is DeadlineError
    await until(scripted.saw_cancel.exists)


async def test_silence(scripted: Scripted) -> None:
    async with upstream_of(scripted, idle_timeout_s=1.0) as upstream:
        await ready(upstream)
        scripted.saw_cancel.unlink(missing_ok=True)
        error = await failure(upstream, "hang")
        assert type(error) is UnavailableError
        assert "stopped answering" in error.message
        await until(scripted.saw_cancel.exists)
        await ready(upstream)


@pytest.mark.parametrize("script", ["hang", "beat"])
async def test_hanging_up_is_seen_by_the_model(
    upstream: TritonUpstream, scripted: Scripted, script: str
) -> None:
    scripted.saw_cancel.unlink(missing_ok=True)
    events = upstream.generate(asking(script))
    await anext(events)
    await events.aclose()
    await until(scripted.saw_cancel.exists)


async def test_a_stub_that_dies_and_is_brought_back(upstream: TritonUpstream) -> None:
    error = await failure(upstream, "die")
    assert type(error) is UnavailableError
    assert error.retry_after_s
    assert type(await failure(upstream, "hello")) is UnavailableError
    await ready(upstream)
    assert await ask(upstream, "hello")


async def test_an_unloaded_model(upstream: TritonUpstream, scripted: Scripted) -> None:
    channel = Channel(scripted.address)
    try:
        await channel.unary("RepositoryModelUnload", UNLOAD, timeout_s=20)
        assert (await stream_failure(channel, "m-stream", [1, 1])).fault is Fault.NOT_READY
        readiness = service_pb2.ModelReadyRequest(name="m-stream")
        assert not (await channel.unary("ModelReady", readiness, timeout_s=5)).ready
        await until(lambda: not upstream.model("m").ready)
        assert type(await failure(upstream, "hello")) is UnavailableError
    finally:
        await channel.unary("RepositoryModelLoad", LOAD, timeout_s=30)
        await channel.close()
    await ready(upstream)


async def test_a_model_that_is_being_loaded(scripted: Scripted) -> None:
    """503 while it loads, also to a gateway that is started meanwhile; then it serves."""
    hold = scripted.entry / "hold"
    channel = Channel(scripted.address)
    loading = None
    try:
        async with upstream_of(scripted) as upstream:
            await ready(upstream)
            hold.touch()
            await channel.unary("RepositoryModelUnload", UNLOAD, timeout_s=20)
            loading = asyncio.create_task(channel.unary("RepositoryModelLoad", LOAD, timeout_s=60))
            await until(lambda: upstream.replicas()[0].state is ReplicaState.NOT_READY)
            error = await failure(upstream, "hello")
            assert type(error) is UnavailableError
            assert error.retry_after_s
            async with upstream_of(scripted, models=["m"]) as late:
                await until(lambda: late.replicas()[0].state is ReplicaState.NOT_READY)
                assert type(await failure(late, "hello")) is UnavailableError
                hold.unlink()
                await ready(late)
                await ready(upstream)
                assert await ask(late, "hello")
                assert await ask(upstream, "hello")
    finally:
        hold.unlink(missing_ok=True)
        if loading is not None:
            await loading
        await channel.close()
