"""Counts requests that Triton forgets, by sending bursts of probes directly to a stream entry.

`python -m bench.forgotten 127.0.0.1:8001 chatglm3-demo`; ARCHITECTURE.md explains why Triton forgets any.
"""

import asyncio
import random
import statistics
import time

import click
import grpc
import grpc.aio
from tritonclient.grpc import service_pb2_grpc

from gateway.dialects.chatglm import ChatGLMDialect

_BURSTS = (1, 2, 4, 8)
_WITHIN_S = 1.5e-3
_FORGOTTEN_S = 0.3
"""A probe that takes longer was forgotten: the batcher sleeps for half a second, and a probe takes 1 ms."""


@click.command()
@click.argument("address")
@click.argument("model")
@click.option("--seconds", default=10.0, help="for each size of burst")
def main(address: str, model: str, seconds: float) -> None:
    """Send bursts of probes to MODEL on the Triton at ADDRESS (gRPC), and count those that it forgot."""
    asyncio.run(_measure(address, model, seconds))


async def _measure(address: str, model: str, seconds: float) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for size in _BURSTS:
            bursts: list[list[float]] = []
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                bursts.append(await asyncio.gather(*(_probe(stub, model) for _ in range(size))))
            took = [each for burst in bursts for each in burst]
            forgotten = sum(each > _FORGOTTEN_S for each in took)
            hit = sum(max(burst) > _FORGOTTEN_S for burst in bursts)
            print(
                f"{size} at a time: {len(bursts)} bursts, {hit / len(bursts):.2%} with a forgotten one; "
                f"{forgotten} of {len(took)} probes; median {statistics.median(took) * 1e3:.1f} ms"
            )


async def _probe(stub: service_pb2_grpc.GRPCInferenceServiceStub, model: str) -> float:
    await asyncio.sleep(random.random() * _WITHIN_S)  # noqa: S311 - nothing secret
    begin = time.perf_counter()
    call = stub.ModelStreamInfer()
    await call.write(ChatGLMDialect().probe(model))
    await call.done_writing()
    async for _ in call:
        pass
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
