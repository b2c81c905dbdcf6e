"""The real Triton with a model that does what its prompt says, and a gateway's upstream for it."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from gateway.core.events import Event
from gateway.core.request import Conversation, Generation, Message
from gateway.errors import GatewayError
from gateway.triton.client import Client
from gateway.triton.errors import TritonError
from gateway.triton.options import PoolOptions
from gateway.triton.pool import TritonUpstream
from tests.e2e.repository_server import RepositoryServer
from wire.strings import pack_strings

CONFIG = """
backend: "python"
max_batch_size: 4
model_transaction_policy { decoupled: true }
input [
  { name: "prompt" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "history" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "sampling" data_type: TYPE_STRING dims: [ 1 ] }
]
output [
  { name: "response" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "meta" data_type: TYPE_STRING dims: [ 1 ] }
]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { }
"""


class Scripted:
    """The server, the key of its repository, and the folder of its one entry."""

    def __init__(self, address: str, repository_key: str, entry: Path) -> None:
        self.address = address
        self.repository_key = repository_key
        self.entry = entry

    def connect(self) -> Client:
        return Client(self.address, repository_key=self.repository_key, timeout_s=60)

    def cancels(self) -> int:
        """Return how many requests the model has seen cancelled."""
        return len(list(self.entry.glob("cancelled-*")))

    def forget_cancels(self) -> None:
        for seen in self.entry.glob("cancelled-*"):
            seen.unlink()


@contextlib.contextmanager
def scripted_triton(repository: Path) -> Iterator[Scripted]:
    """Run the real tritonserver on a repository with that one entry."""
    entry = repository / "m"
    (entry / "1").mkdir(parents=True)
    (entry / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
    shutil.copy(Path(__file__).with_name("scripted_model.py"), entry / "1" / "model.py")
    with RepositoryServer(repository) as server:
        yield Scripted(server.ready.grpc, server.ready.repository_key, entry)


async def until(condition: Callable[[], bool], *, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def upstream_of(scripted: Scripted, **options: Any) -> AsyncIterator[TritonUpstream]:
    upstream = TritonUpstream(
        [scripted.address], PoolOptions(repository_key=scripted.repository_key, **options)
    )
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.close()


async def ready(upstream: TritonUpstream) -> None:
    await until(lambda: any(card.ready for card in upstream.models()))


def asking(script: str, *, time_s: float = 60.0, model: str = "m", stream: bool = True) -> Generation:
    return Generation(
        request_id="statuses",
        model=model,
        prompt=Conversation((Message(role="user", content=script),)),
        deadline=asyncio.get_running_loop().time() + time_s,
        stream=stream,
    )


async def ask(upstream: TritonUpstream, script: str, **options: Any) -> list[Event]:
    return [event async for event in upstream.generate(asking(script, **options))]


async def failure(upstream: TritonUpstream, script: str, **options: Any) -> GatewayError:
    with pytest.raises(GatewayError) as raised:
        await ask(upstream, script, **options)
    assert not any(secret in raised.value.message for secret in ("secret", "/", "Traceback", "m_0"))
    return raised.value


async def stream_failure(client: Client, entry: str, shape: list[int]) -> TritonError:
    request = service_pb2.ModelInferRequest(model_name=entry, id="statuses")
    for name in ("prompt", "history", "sampling"):
        request.inputs.add(name=name, datatype="BYTES", shape=shape)
        request.raw_input_contents.append(pack_strings([b"{}"]))
    deadline = asyncio.get_running_loop().time() + 60
    responses = client.stream_infer(request, deadline=deadline, idle_timeout_s=60)
    with pytest.raises(TritonError) as raised:
        await anext(responses)
    return raised.value
