"""What the gateway adds: `python -m bench.overhead --model M --grpc 127.0.0.1:PORT --pids PID,PID`.

Time to first token: one-token completions, by turns through the gateway and straight to Triton over gRPC, one
after the other, so that both meet the same machine. CPU time a token: what the gateway's processes (`--pids`)
use while clients stream long answers, divided by the tokens that arrived.
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import click
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from bench.rows import table
from gateway.commands.bench import COUNT, listed
from gateway.commands.http_client import Client
from gateway.commands.load import LoadPool, Workload, closed_loop
from gateway.commands.load_rows import percentile
from wire import names
from wire.strings import pack_strings

_TIMEOUT_S = 60.0
_WARM_UP = 20
"""Pairs of requests before those that count."""
_PROMPT = "你好"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenRow:
    """Times to the first token, in milliseconds."""

    path: str
    requests: int
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuRow:
    """CPU time of the gateway's processes while `clients` stream."""

    clients: int
    tokens_per_s: float
    us_per_token: float
    busy_cores: float


async def first_token(url: str, address: str, model: str, requests: int) -> list[FirstTokenRow]:
    """Send pairs of requests, one through the gateway and one straight to Triton, and time each."""
    body = json.dumps(
        {"model": model, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}
    ).encode()
    client = Client(url)

    async def through_gateway() -> float:
        arrived: list[float] = []
        sent = time.monotonic()
        await client.post("/v1/completions", body, lambda at, _: arrived.append(at), timeout_s=_TIMEOUT_S)
        return arrived[0] - sent

    async with grpc.aio.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        async def straight() -> float:
            return await _ask_triton(stub, model)

        through, direct = await _by_turns((through_gateway, straight), requests)
    client.close()
    return [_row("gateway", through), _row("gRPC", direct)]


async def _by_turns(calls: tuple[Callable[[], Awaitable[float]], ...], requests: int) -> list[list[float]]:
    took: list[list[float]] = [[] for _ in calls]
    for _ in range(_WARM_UP + requests):
        for each, call in zip(took, calls, strict=True):
            each.append(await call())
    return [each[_WARM_UP:] for each in took]


async def _ask_triton(stub: service_pb2_grpc.GRPCInferenceServiceStub, model: str) -> float:
    """Return the seconds from sending a request to the response with its only token."""
    request = service_pb2.ModelInferRequest(model_name=model)
    values = {names.PROMPT: _PROMPT, names.HISTORY: "", names.SAMPLING: '{"max_tokens":1,"temperature":0}'}
    for name, value in values.items():
        request.inputs.add(name=name, datatype="BYTES", shape=(1, 1))
        request.raw_input_contents.append(pack_strings([value.encode()]))
    sent = time.monotonic()
    call = stub.ModelStreamInfer(timeout=_TIMEOUT_S)
    await call.write(request)
    await call.done_writing()
    ended = sent
    async for response in call:
        if response.error_message:
            raise RuntimeError(response.error_message)
        if response.infer_response.outputs:
            ended = time.monotonic()  # acceptance comes first, the answer last
    return ended - sent


def _row(path: str, took: list[float]) -> FirstTokenRow:
    at = {number: 1000 * percentile(took, number) for number in (50, 90, 99)}
    return FirstTokenRow(path=path, requests=len(took), p50=at[50], p90=at[90], p99=at[99])


def cpu(pool: LoadPool, workload: Workload, pids: tuple[int, ...], *, clients: int, rounds: int) -> CpuRow:
    """Run a closed loop and return what it cost the processes `pids`."""
    before, since = _cpu_s(pids), time.monotonic()
    row = closed_loop(pool, workload, "cpu", clients=clients, requests=clients * rounds)
    used, took = _cpu_s(pids) - before, time.monotonic() - since
    tokens = clients * rounds * workload.out
    return CpuRow(
        clients=clients,
        tokens_per_s=row.tokens_per_second,
        us_per_token=1e6 * used / tokens,
        busy_cores=used / took,
    )


def _cpu_s(pids: tuple[int, ...]) -> float:
    """Return the CPU time that the processes have used so far, in seconds (proc_pid_stat(5))."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user and system time
    return ticks / os.sysconf("SC_CLK_TCK")


@click.command(help=__doc__)
@click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="of the gateway")
@click.option("--model", required=True)
@click.option("--grpc", "address", help="of the Triton behind it; without: no times to the first token")
@click.option("--requests", default=300, show_default=True, help="pairs of requests")
@listed("--pids", COUNT, help="of the gateway's processes")
@listed("--conc", COUNT, default="8,64", show_default=True, help="clients of a closed loop")
@click.option("--ids", default=16, show_default=True, help="tokens of each prompt")
@click.option("--ids-below", default=60_000, show_default=True, help="the model's vocabulary, or less")
@click.option("--out", default=256, show_default=True, help="tokens of each answer")
@click.option("--rounds", default=2, show_default=True, help="requests of each client")
@click.option("--processes", default=8, show_default=True)
def main(
    *,
    url: str,
    model: str,
    address: str | None,
    requests: int,
    pids: tuple[int, ...],
    conc: tuple[int, ...],
    ids: int,
    ids_below: int,
    out: int,
    rounds: int,
    processes: int,
) -> None:
    """Measure and print."""
    if address is not None:
        click.echo(table(FirstTokenRow, asyncio.run(first_token(url, address, model, requests))))
    if pids:
        workload = Workload(url=url, model=model, ids=ids, ids_below=ids_below, out=out)
        with LoadPool(processes) as pool:
            closed_loop(pool, workload, "warm-up", clients=2, requests=2)
            rows = [cpu(pool, workload, pids, clients=clients, rounds=rounds) for clients in conc]
        click.echo(table(CpuRow, rows))


if __name__ == "__main__":
    main()
