"""Looks for requests that wait for nothing: `python -m bench.bursts --model M --grpc 127.0.0.1:PORT`.

Sends bursts of short requests through the gateway, one burst after the other, and probes straight to Triton
while it takes in a large burst of generations. A large burst may take long because much is computed; but if
for 100 ms none of its requests is answered, they waited to be noticed. The requests are the same in every
edition of the wire; for an edition whose engine has an entry of its own, name that with `--entry`.
"""

import asyncio
import json
import multiprocessing
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import click
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from bench.rows import table
from gateway.commands.bench import COUNT, listed
from gateway.commands.http_client import Client, HttpError
from gateway.commands.load_rows import percentile
from wire import names
from wire.strings import pack_strings

_LATE_S = 0.1
_WITHIN_S = 1.5e-3
"""A burst's requests begin at random moments of this time, as those of separate clients do."""
_TIMEOUT_S = 60.0
_START_S = 0.5
"""From the order for a flood until it begins: the process that sends it is there by then."""
_PROMPT = "你好"
_PROBE: dict[str, object] = {"probe": True}


class Timing(NamedTuple):
    """When a request was sent and answered, in seconds of one clock."""

    sent: float
    ended: float


Burst = Sequence[Timing | None]
"""The requests of a burst; None: it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstRow:
    """The requests of all bursts of one size. Times are milliseconds and exclude failed requests."""

    what: str
    size: int
    bursts: int
    requests: int
    failed: int
    over_100_ms: int
    p50: float
    p99: float
    max: float
    stalled: int
    """Bursts in which no request was answered for 100 ms."""
    longest_gap: float
    """Longest time in which no request of a burst was answered."""


def summarise(what: str, size: int, bursts: Sequence[Burst]) -> BurstRow:
    """Return the row of bursts of one size."""
    answered = [[timing for timing in burst if timing is not None] for burst in bursts]
    took = [timing.ended - timing.sent for burst in answered for timing in burst]
    gaps = [longest_gap(burst) for burst in answered]
    requests = sum(map(len, bursts))
    return BurstRow(
        what=what,
        size=size,
        bursts=len(bursts),
        requests=requests,
        failed=requests - len(took),
        over_100_ms=sum(each > _LATE_S for each in took),
        p50=1000 * percentile(took, 50),
        p99=1000 * percentile(took, 99),
        max=1000 * percentile(took, 100),
        stalled=sum(gap > _LATE_S for gap in gaps),
        longest_gap=1000 * max(gaps, default=0.0),
    )


def longest_gap(burst: Sequence[Timing]) -> float:
    """Return the longest time between two answers, or before the first one, in seconds."""
    if not burst:
        return 0.0
    moments = [min(timing.sent for timing in burst), *sorted(timing.ended for timing in burst)]
    return max(later - earlier for earlier, later in pairwise(moments))


async def through_gateway(url: str, model: str, size: int, seconds: float) -> BurstRow:
    """Send bursts of one-token completions for some seconds, each when the one before it is answered."""
    body = json.dumps({"model": model, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0}).encode()
    client = Client(url)

    async def complete() -> None:
        await client.post("/v1/completions", body, lambda *_: None, timeout_s=_TIMEOUT_S)

    bursts: list[Burst] = []
    end = time.monotonic() + seconds
    while not bursts or time.monotonic() < end:
        bursts.append(await asyncio.gather(*(_timed(complete) for _ in range(size))))
    client.close()
    return summarise("completion", size, bursts)


async def probes_behind(address: str, entry: str, size: int, bursts: int, *, first: bool) -> BurstRow:
    """Probe an entry again and again while another process sends it `size` generations at once.

    Args:
        address: Triton's gRPC address.
        entry: the name of the engine's repository entry.
        size: generations of each burst.
        bursts: number of bursts.
        first: whether the probes have a place before others in Triton's queue, where it has priorities.
    """
    probes: list[Burst] = []
    channel = grpc.aio.insecure_channel(address)
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    async def probe() -> None:
        await _infer(stub, entry, "", _PROBE, first=first)

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(time.sleep, 0).result()  # it has begun
        for _ in range(bursts):
            begin = time.monotonic() + _START_S
            flood: Future[int] = pool.submit(_flood, address, entry, size, begin)
            await asyncio.sleep(begin - time.monotonic())
            during: list[Timing | None] = []
            while not flood.done():
                during.append(await _timed(probe))
            probes.append(during)
            if failed := flood.result():
                click.echo(f"{failed} of {size} generations failed", err=True)
    await channel.close()
    return summarise("probe behind generations", size, probes)


def _flood(address: str, entry: str, size: int, begin: float) -> int:
    """Send generations at once, at `begin` on the monotonic clock; return the number that failed."""

    async def send() -> int:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

            async def generate() -> None:
                await _infer(stub, entry, _PROMPT, {"max_tokens": 1, "temperature": 0})

            await asyncio.sleep(begin - time.monotonic())
            timings = await asyncio.gather(*(_timed(generate) for _ in range(size)))
        return timings.count(None)

    return asyncio.run(send())


async def _infer(
    stub: service_pb2_grpc.GRPCInferenceServiceStub,
    entry: str,
    prompt: str,
    sampling: dict[str, object],
    *,
    first: bool = False,
) -> None:
    """Send one request on a stream of its own and wait for the stream's end.

    Raises:
        RuntimeError: it was refused.
        grpc.aio.AioRpcError: it was not answered.
    """
    request = service_pb2.ModelInferRequest(model_name=entry)
    values = {names.PROMPT: prompt, names.HISTORY: "", names.SAMPLING: json.dumps(sampling)}
    for name, value in values.items():
        request.inputs.add(name=name, datatype="BYTES", shape=(1, 1))
        request.raw_input_contents.append(pack_strings([value.encode()]))
    if first:
        request.parameters["priority"].uint64_param = 1
    call = stub.ModelStreamInfer(timeout=_TIMEOUT_S)
    await call.write(request)
    await call.done_writing()
    async for response in call:
        if response.error_message:
            raise RuntimeError(response.error_message)


async def _timed(send: Callable[[], Awaitable[None]]) -> Timing | None:
    """Send a request and return its times, or None if it failed."""
    await asyncio.sleep(random.random() * _WITHIN_S)  # noqa: S311 - nothing secret
    sent = time.perf_counter()
    try:
        await send()
    except (HttpError, RuntimeError, grpc.aio.AioRpcError):
        return None
    return Timing(sent, time.perf_counter())


@click.command(help=__doc__)
@click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="of the gateway")
@click.option("--model", required=True)
@click.option("--grpc", "address", help="address of a Triton behind it; without: no probes")
@click.option("--entry", help="the repository entry to probe, if it is not called like the model")
@listed("--sizes", COUNT, default="1,8,32,64", show_default=True, help="of a burst")
@click.option("--seconds", default=10.0, show_default=True, help="for each size")
@click.option("--behind", default=1024, show_default=True, help="generations that the probes come behind")
@click.option("--bursts", default=5, show_default=True, help="number of those bursts")
def main(
    *,
    url: str,
    model: str,
    address: str | None,
    entry: str | None,
    sizes: tuple[int, ...],
    seconds: float,
    behind: int,
    bursts: int,
) -> None:
    """Measure and print."""
    rows = [asyncio.run(through_gateway(url, model, int(size), seconds)) for size in sizes]
    if address is not None:
        where = entry or model
        rows.append(asyncio.run(probes_behind(address, where, behind, bursts, first=where != model)))
    click.echo(table(BurstRow, rows))


if __name__ == "__main__":
    main()
