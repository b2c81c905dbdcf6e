"""A gRPC proxy in front of Triton that can lose a delta channel, or a single delta, and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import msgspec
from tritonclient.grpc import service_pb2 as pb

from wire.channel import Frame, decode_frame, encode_frame
from wire.request import OpenChannel, decode_request
from wire.strings import pack_strings, unpack_strings

_STREAM = "ModelStreamInfer"


class MeddlingProxy(grpc.GenericRpcHandler):
    """Passes every call on as bytes. Belongs to the event loop that it is made and started in."""

    def __init__(self, upstream: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._channel = grpc.aio.insecure_channel(upstream)
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._reset = asyncio.Event()
        self.opened = 0
        """Channels that were opened through it."""
        self.steal = 0
        """Deltas still to be taken out of frames, each the first one of its frame."""

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)
        await self._channel.close()

    def reset_channels(self) -> None:
        """Reset every open channel, as a proxy does that limits how long a stream lasts; from any thread."""
        self._loop.call_soon_threadsafe(self._reset_all)

    def _reset_all(self) -> None:
        self._reset.set()
        self._reset = asyncio.Event()

    def service(self, details: Any) -> Any:
        method = details.method
        if method.endswith(_STREAM):
            return grpc.stream_stream_rpc_method_handler(self._stream(method))
        return grpc.unary_unary_rpc_method_handler(self._unary(method))

    def _unary(self, method: str) -> Any:
        call = self._channel.unary_unary(method)

        async def forward(request: bytes, context: Any) -> Any:
            try:
                return await call(request, timeout=context.time_remaining())
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
                raise

        return forward

    def _stream(self, method: str) -> Any:
        call = self._channel.stream_stream(method)

        async def forward(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            # The gateway sends one request on each stream.
            request = await anext(aiter(requests))
            upstream = call(timeout=context.time_remaining())
            try:
                await upstream.write(request)
                await upstream.done_writing()
                is_channel = _opens_channel(request)
                self.opened += is_channel
                reset = asyncio.create_task(self._reset.wait())
                try:
                    while True:
                        reading = asyncio.ensure_future(upstream.read())
                        await asyncio.wait(
                            {reading, reset} if is_channel else {reading},
                            return_when=asyncio.FIRST_COMPLETED,
                        )
                        if not reading.done():
                            await context.abort(grpc.StatusCode.CANCELLED, "upstream max stream duration")
                        message = reading.result()
                        if message is grpc.aio.EOF:
                            return
                        yield self._meddle(message) if is_channel and self.steal else message
                finally:
                    reset.cancel()
            finally:
                upstream.cancel()

        return forward

    def _meddle(self, message: bytes) -> Any:
        response = pb.ModelStreamInferResponse.FromString(message)
        raw = response.infer_response.raw_output_contents
        frame = decode_frame(unpack_strings(raw[1])[0])
        if frame.streams:
            self.steal -= 1
            frame = msgspec.structs.replace(
                frame,
                streams=frame.streams[1:],
                tokens=frame.tokens[1:],
                texts=frame.texts[1:],
                ids=frame.ids[1:],
                metas={},
            )
            raw[1] = pack_strings([encode_frame(Frame(**msgspec.structs.asdict(frame)))])
        return response.SerializeToString()


def _opens_channel(message: bytes) -> bool:
    request = pb.ModelInferRequest.FromString(message)
    inputs = dict(zip((tensor.name for tensor in request.inputs), request.raw_input_contents, strict=True))
    return isinstance(decode_request(unpack_strings(inputs["sampling"])[0]), OpenChannel)
