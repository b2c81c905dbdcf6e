"""Measures the CPU time per token that the gateway needs to pass tokens from a channel to its clients.

The whole application runs in this process, with scripted responses in place of gRPC and no server behind the
ASGI `send`, so what is measured is our own code and the web framework's. Reading a response from gRPC (about
25 microseconds each frame) and the system call of each write are not included.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import uvloop
from tritonclient.grpc import service_pb2 as pb

from gateway.app import create_app
from gateway.settings import load_settings
from wire.channel import Frame, encode_frame
from wire.meta import Accepted, Delivered, Meta, ProbeReport, Usage, encode_meta
from wire.request import ChannelStream, Generation, OpenChannel, Probe, decode_request
from wire.strings import pack_strings, unpack_strings

_PATIENCE_S = 60.0
_WORDS = ("天气", " hello", "的", ",", " and", "今天", " quick", "好")
_BODY = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 1}
).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayDeliveryRow:
    """One measurement of the gateway, excluding the beginnings and ends of requests."""

    streams: int
    tokens: int
    microseconds: float
    """CPU time per token."""


def measure(streams: tuple[int, ...], *, new_tokens: int) -> Iterator[GatewayDeliveryRow]:
    """Measure each number of concurrent streams."""
    for number in streams:
        triton = _ScriptedTriton(number)
        with (
            patch("gateway.triton.backends.Client", lambda _address, triton=triton, **_: triton),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            yield runner.run(_run(triton, new_tokens))


async def _run(triton: "_ScriptedTriton", new_tokens: int) -> GatewayDeliveryRow:
    flags = {"models": ("m",), "upstreams": (triton.address,), "max_in_flight": 1024, "warn_of_faults": False}
    app = create_app(load_settings(flags))
    gateway = app.state.gateway
    async with app.router.lifespan_context(app):
        await _until(gateway.ready)
        clients = [_Client() for _ in range(triton.streams)]
        tasks = [asyncio.create_task(app(client.scope(), client.receive, client.send)) for client in clients]
        await _until(lambda: triton.accepted == triton.streams and all(client.started for client in clients))
        triton.step()  # the first token comes with the role
        await _until(lambda: all(client.written.is_set() for client in clients))
        await _until_written(clients)
        steps = [triton.prepare() for _ in range(new_tokens)]
        began = time.process_time()
        for frame in steps:
            triton.send(frame)
            await _until_written(clients)
        spent = time.process_time() - began
        triton.finish()
        await asyncio.gather(*tasks)
    return GatewayDeliveryRow(
        streams=triton.streams,
        tokens=triton.streams * new_tokens,
        microseconds=1e6 * spent / (triton.streams * new_tokens),
    )


async def _until(holds: Any) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def _until_written(clients: list["_Client"]) -> None:
    """Wait until each client has received another chunk since the last call."""
    for client in clients:
        await client.written.wait()
        client.written.clear()


class _Client:
    """One HTTP client, in the form in which ASGI presents it."""

    def __init__(self) -> None:
        self.started = False
        self.written = asyncio.Event()
        self._sent = False

    def scope(self) -> MutableMapping[str, Any]:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_BODY)).encode())]
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }

    async def receive(self) -> MutableMapping[str, Any]:
        if self._sent:
            await asyncio.Event().wait()
        self._sent = True
        return {"type": "http.request", "body": _BODY, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.started = True
        if message.get("body"):
            self.written.set()


class _ScriptedTriton:
    """Replaces `gateway.triton.client.Client`; its responses are what gRPC would have read."""

    address = "127.0.0.1:1"

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self._ends: dict[int, asyncio.Future[pb.ModelInferResponse]] = {}
        """By the number of the stream on the channel."""
        self._frames: asyncio.Queue[pb.ModelInferResponse] = asyncio.Queue()
        self._count = 0

    @property
    def accepted(self) -> int:
        """Number of generations so far."""
        return len(self._ends)

    async def close(self, *_: object) -> None:
        """Do nothing: there is nothing to close."""

    def end_inference(self, *_: object) -> None:
        """Do nothing: there is no connection to end."""

    async def metadata(self, _entry: str) -> pb.ModelMetadataResponse:
        made = pb.ModelMetadataResponse()
        for name in ("prompt", "history", "sampling"):
            made.inputs.add(name=name)
        return made

    async def infer(self, request: pb.ModelInferRequest, **options: object) -> list[pb.ModelInferResponse]:
        """Return all that `stream_infer` yields."""
        return [response async for response in self.stream_infer(request, **options)]

    async def stream_infer(
        self, request: pb.ModelInferRequest, **_: object
    ) -> AsyncIterator[pb.ModelInferResponse]:
        match decode_request(unpack_strings(request.raw_input_contents[2])[0]):
            case Probe():
                report = ProbeReport(
                    heartbeat_age_s=0,
                    running=0,
                    waiting=0,
                    format="chatglm3",
                    max_context=8192,
                    resumes=True,
                )
                yield _response("", encode_meta(Meta(probe=report)))
            case OpenChannel():
                yield _response("", encode_frame(Frame(frame=0)))
                while True:
                    yield await self._frames.get()
            case Generation(channel=ChannelStream(stream=number)):
                end = self._ends[number] = asyncio.get_running_loop().create_future()
                yield _response("", encode_meta(Meta(accepted=Accepted(request_id="r", prompt_tokens=1))))
                yield await end

    def step(self) -> None:
        """Create one step's frame and deliver it."""
        self.send(self.prepare())

    def prepare(self) -> pb.ModelInferResponse:
        """Return the frame of one step: a token for each stream."""
        self._count += 1
        numbers = list(self._ends)
        texts = [_WORDS[(self._count + number) % len(_WORDS)] for number in numbers]
        frame = Frame(
            frame=self._count,
            streams=numbers,
            tokens=[1] * len(numbers),
            texts=texts,
            ids=[[self._count] for _ in numbers],
        )
        return _response("", encode_frame(frame))

    def send(self, frame: pb.ModelInferResponse) -> None:
        """Deliver a step's frame."""
        self._frames.put_nowait(frame)

    def finish(self) -> None:
        """End every answer."""
        meta = Meta(
            finish_reason="length",
            usage=Usage(prompt_tokens=1, completion_tokens=self._count),
            delivered=Delivered(deltas=self._count, frame=self._count),
        )
        for end in self._ends.values():
            end.set_result(_response("", encode_meta(meta)))


def _response(text: str, document: bytes) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse()
    for tensor, value in (("response", text.encode()), ("meta", document)):
        response.outputs.add(name=tensor, datatype="BYTES", shape=(1, 1))
        response.raw_output_contents.append(pack_strings([value]))
    return response
