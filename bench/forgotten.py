"""Counts requests that Triton forgets, by sending bursts of small requests directly to a model's entries.

`python -m bench.forgotten chatglm3-demo 127.0.0.1:8001`; several addresses get bursts of the same size in
turns, in random order. ARCHITECTURE.md explains why Triton forgets any.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable

import click
import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from wire.tokenizing import Tokenizing, encode_tokenizing

from gateway.dialects.chatglm import ChatGLMDialect
from wire import names
from wire.strings import pack_strings

_BURSTS = (1, 2, 4, 8)
_WITHIN_S = 1.5e-3
_FORGOTTEN_S = 0.3
"""What takes longer was forgotten: the batcher sleeps for half a second, and these requests take some
milliseconds."""

_Send = Callable[[service_pb2_grpc.GRPCInferenceServiceStub, str], Awaitable[None]]


async def _probe(stub: service_pb2_grpc.GRPCInferenceServiceStub, model: str) -> None:
    """Send a probe to `M-stream`."""
    call = stub.ModelStreamInfer()
    await call.write(ChatGLMDialect().probe(model))
    await call.done_writing()
    async for _ in call:
        pass


async def _tokenize(stub: service_pb2_grpc.GRPCInferenceServiceStub, model: str) -> None:
    """Send a short text to `M-tokenizer`."""
    request = service_pb2.ModelInferRequest(model_name=names.tokenizer_entry(model))
    request.inputs.add(name=names.REQUEST, datatype="BYTES", shape=(1,))
    request.raw_input_contents.append(pack_strings([encode_tokenizing(Tokenizing(text="你好"))]))
    await stub.ModelInfer(request)


def _ask_field(temperature: bytes) -> _Send:
    async def ask(stub: service_pb2_grpc.GRPCInferenceServiceStub, model: str) -> None:
        values = {
            names.PROMPT: "你好".encode(),
            names.HISTORY: b"",
            names.TEMPERATURE: temperature,
            names.MAX_TOKEN: b"1",
        }
        request = service_pb2.ModelInferRequest(model_name=model)
        for name, value in values.items():
            request.inputs.add(name=name, datatype="BYTES", shape=(1, 1))
            request.raw_input_contents.append(pack_strings([value]))
        try:
            await stub.ModelInfer(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise

    return ask


_ENTRIES: dict[str, _Send] = {
    "stream": _probe,
    "tokenizer": _tokenize,
    # Refused by `M` itself, and by `M-stream`, which `M` calls: by then, both have had it in their queues.
    "field": _ask_field(b"none"),
    "field-stream": _ask_field(b"0.5"),
}


@click.command()
@click.argument("model")
@click.argument("addresses", nargs=-1, required=True)
@click.option("--entry", type=click.Choice(list(_ENTRIES)), default="stream", help="what to send to")
@click.option("--seconds", default=10.0, help="for each size of burst")
def main(model: str, addresses: tuple[str, ...], entry: str, seconds: float) -> None:
    """Send bursts to an entry of MODEL on the Tritons at ADDRESSES (gRPC); count what they forgot."""
    asyncio.run(_measure(model, addresses, _ENTRIES[entry], seconds))


async def _measure(model: str, addresses: tuple[str, ...], send: _Send, seconds: float) -> None:
    channels = {address: grpc.aio.insecure_channel(address) for address in addresses}
    stubs = {
        address: service_pb2_grpc.GRPCInferenceServiceStub(channel) for address, channel in channels.items()
    }
    for size in _BURSTS:
        bursts: dict[str, list[list[float]]] = {address: [] for address in addresses}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for address in random.sample(addresses, len(addresses)):
                took = await asyncio.gather(*(_time(send, stubs[address], model) for _ in range(size)))
                bursts[address].append(took)
        for address in addresses:
            print(f"{address}, {size} at a time: {_summary(bursts[address])}", flush=True)
    for channel in channels.values():
        await channel.close()


async def _time(send: _Send, stub: service_pb2_grpc.GRPCInferenceServiceStub, model: str) -> float:
    await asyncio.sleep(random.random() * _WITHIN_S)  # noqa: S311 - nothing secret
    begin = time.perf_counter()
    await send(stub, model)
    return time.perf_counter() - begin


def _summary(bursts: list[list[float]]) -> str:
    took = sorted(each for burst in bursts for each in burst)
    forgotten = sum(each > _FORGOTTEN_S for each in took)
    hit = sum(max(burst) > _FORGOTTEN_S for burst in bursts)
    return (
        f"{len(bursts)} bursts, {hit / len(bursts):.2%} with a forgotten one; "
        f"{forgotten} of {len(took)} requests; median {statistics.median(took) * 1e3:.1f} ms, "
        f"p99 {took[int(len(took) * 0.99)] * 1e3:.0f} ms, longest {took[-1] * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
