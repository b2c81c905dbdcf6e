"""What legacy clients send, and a model that answers them by what it was asked."""

import base64
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.app import create_app
from gateway.core.events import (
    Accepted,
    Delta,
    Event,
    Usage,
)
from gateway.core.request import Generation, Turns
from gateway.kserve.grpc import GrpcServer
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import Served, settings
from tests.ports import free_ports
from wire.meta import Segment
from wire.strings import pack_strings

VALUES: dict[str, Any] = {"prompt": "你好", "history": "", "temperature": "0.3", "max_token": "1024"}
"""Contract 1's question."""


async def echo(request: Generation) -> AsyncGenerator[Event, None]:
    """Answer in two deltas, of which the second opens a segment."""
    assert isinstance(request.prompt, Turns)
    yield Accepted(prompt_tokens=3)
    yield Delta(pieces=(f"\nre {request.prompt.text}",), tokens=1)
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    yield Delta(
        pieces=("\nmore",),
        segments=(Segment(0, "assistant"),),
        tokens=1,
        finish_reason="stop",
        usage=usage,
    )


def tensor(name: str, data: list[Any], shape: list[int] | None = None, datatype: str = "BYTES") -> Any:
    return {"name": name, "shape": shape or [1, 1], "datatype": datatype, "data": data}


def body(**changes: Any) -> dict[str, Any]:
    """Contract 1 as JSON; a changed value of None leaves its tensor out."""
    values = {name: value for name, value in (VALUES | changes).items() if value is not None}
    return {"inputs": [tensor(name, [value]) for name, value in values.items()]}


def unbatched(**changes: Any) -> dict[str, Any]:
    """Contract 2 as JSON."""
    values = {
        "prompt": "你好",
        "history": "",
        "temperature": "0",
        "max_token": 40,
        "history_len": 5,
    } | changes
    return {
        "inputs": [
            tensor(name, [value], [1], "INT16" if isinstance(value, int) else "BYTES")
            for name, value in values.items()
        ]
    }


def predict_body(model: str = "glm", values: Mapping[str, str] = VALUES, **changes: Any) -> dict[str, Any]:
    """Contract 1 as protobuf's JSON."""
    inputs = [
        {
            "name": name,
            "datatype": "BYTES",
            "shape": [-1],
            "contents": {"bytes_contents": [base64.b64encode(value.encode()).decode()]},
        }
        for name, value in values.items()
    ]
    return {"model_name": model, "inputs": inputs, **changes}


def question(model: str = "glm", **changes: Any) -> Any:
    """Contract 1 as a message; a changed value of None leaves its tensor out."""
    request = service_pb2.ModelInferRequest(model_name=model, id="7")
    for name, value in (VALUES | changes).items():
        if value is not None:
            request.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
            request.raw_input_contents.append(pack_strings([value.encode()]))
    return request


@asynccontextmanager
async def over_grpc(upstream: FakeUpstream, **values: Any) -> AsyncIterator[tuple[Served, Any, str]]:
    """Serve; yield what is served, a stub, and the address."""
    upstream.settings = settings(**values)
    app = create_app(upstream.settings, upstream)
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    server = GrpcServer(app.state.door, app.state.records)
    async with app.router.lifespan_context(app):
        await server.start(address)
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                yield Served(app.state.gateway, upstream, None), stub, address
        finally:
            await server.stop(0)
