"""Measures the gateway under far more clients than it has places for: `python -m bench.overload`.

Starts `tritongate up` with the built-in model and few places. As many clients as may be at work or wait show
its capacity; then 20 times as many come, of which most are refused and try again after one to two seconds:
Retry-After says one. Each row has the times of answers, of refusals, and of `/health` on a new connection
each, the gateway's part of a core, and its memory before and after. A second table says which promises held.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import click
import httpx
import psutil

from bench.rows import table
from bench.serving import running
from gateway.commands.http_client import Client, HttpError
from gateway.commands.load_rows import percentile

_TIMEOUT_S = 120.0
_RETRY_AFTER_S = 1.0
_PROBE_EVERY_S = 0.1
_REFUSED = ("status 429", "status 503")

_SERVED_TIMES = 1.5
"""How much longer than at full load those served may wait, at the 99th percentile."""
_REFUSED_MS = 300.0
"""How long refusals may take, at the median."""
_GROWTH_MIB = 32.0
"""What the flood may leave in memory: 320 connections took 5 MiB (LOG.md, 2026-11-25)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadRow:
    """What happened to some number of clients; times in milliseconds, memory in MiB."""

    clients: int
    served: int
    served_per_s: float
    served_p50: float
    served_p99: float
    refused: int
    refused_p50: float
    refused_p99: float
    failed: int
    health_p50: float
    health_p99: float
    busy_cores: float
    mib_before: float
    mib_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a promise held under the flood."""

    promise: str
    limit: float
    seen: float
    holds: str


def judge(full: OverloadRow, flood: OverloadRow) -> list[Verdict]:
    """Compare a flood with full load, and with what is promised."""
    found = {
        "answers at p99, times full load": (_SERVED_TIMES, flood.served_p99 / full.served_p99),
        "refusals at p50, ms": (_REFUSED_MS, flood.refused_p50),
        "growth of memory, MiB": (_GROWTH_MIB, flood.mib_after - flood.mib_before),
    }
    return [
        Verdict(promise=promise, limit=limit, seen=seen, holds="yes" if seen <= limit else "NO")
        for promise, (limit, seen) in found.items()
    ]


@dataclass(slots=True)
class _Seen:
    """Seconds that each of these took."""

    served: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    failed: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)


async def _ask(client: Client, body: bytes, end: float, seen: _Seen) -> None:
    while (sent := time.monotonic()) < end:
        try:
            await client.post("/v1/chat/completions", body, lambda *_: None, timeout_s=_TIMEOUT_S)
            seen.served.append(time.monotonic() - sent)
        except HttpError as error:
            took = time.monotonic() - sent
            (seen.refused if str(error).startswith(_REFUSED) else seen.failed).append(took)
            await asyncio.sleep(_RETRY_AFTER_S * random.uniform(1, 2))  # noqa: S311 - not for secrets


async def _probe(url: str, end: float, seen: _Seen) -> None:
    parts = urlsplit(url)
    while (sent := time.monotonic()) < end:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"/health: {answer[:200]!r}")
        seen.health.append(time.monotonic() - sent)
        writer.close()
        await asyncio.sleep(_PROBE_EVERY_S)


async def _flood(url: str, body: bytes, clients: int, seconds: float) -> _Seen:
    client, seen, end = Client(url), _Seen(), time.monotonic() + seconds
    await asyncio.gather(_probe(url, end, seen), *(_ask(client, body, end, seen) for _ in range(clients)))
    client.close()
    return seen


def _gateway_of(url: str) -> psutil.Process:
    port = urlsplit(url).port
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(each.laddr.port == port for each in process.net_connections("tcp")):
                return process
    raise RuntimeError(f"no process of ours listens on {url}")


def measure(places: int, times: int, tokens: int, seconds: float) -> Iterator[OverloadRow]:
    """Start a server, and measure it with as many clients as have a place, and with `times` as many.

    Args:
        places: answers at work, and requests that may wait.
        times: see above.
        tokens: of each answer.
        seconds: of each measurement.
    """
    flags = {"max-in-flight": places, "max-waiting": places, "workers": 1, "log-level": "error"}
    with running(*(f"--{name}={value}" for name, value in flags.items())) as url:
        model = httpx.get(url + "/v1/models", timeout=20).json()["data"][0]["id"]
        messages = [{"role": "user", "content": "你好"}]
        body = json.dumps(
            {"model": model, "messages": messages, "max_tokens": tokens, "ignore_eos": True}
        ).encode()
        gateway = _gateway_of(url)
        asyncio.run(_flood(url, body, 2, 2.0))
        for clients in (2 * places, 2 * places * times):
            before, busy = gateway.memory_info().rss, _busy_s(gateway)
            seen = asyncio.run(_flood(url, body, clients, seconds))
            busy_cores = (_busy_s(gateway) - busy) / seconds
            yield _row(clients, seconds, seen, busy_cores, (before, gateway.memory_info().rss))


def _busy_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _row(clients: int, seconds: float, seen: _Seen, busy_cores: float, rss: tuple[int, int]) -> OverloadRow:
    def ms(values: list[float], percent: int) -> float:
        return 1000 * percentile(values, percent)

    return OverloadRow(
        clients=clients,
        served=len(seen.served),
        served_per_s=len(seen.served) / seconds,
        served_p50=ms(seen.served, 50),
        served_p99=ms(seen.served, 99),
        refused=len(seen.refused),
        refused_p50=ms(seen.refused, 50),
        refused_p99=ms(seen.refused, 99),
        failed=len(seen.failed),
        health_p50=ms(seen.health, 50),
        health_p99=ms(seen.health, 99),
        busy_cores=busy_cores,
        mib_before=rss[0] / 2**20,
        mib_after=rss[1] / 2**20,
    )


@click.command()
@click.option("--places", default=8, show_default=True, help="answers at work; as many requests wait")
@click.option("--times", default=20, show_default=True, help="as many clients as have a place")
@click.option("--tokens", default=32, show_default=True, help="of each answer")
@click.option("--seconds", default=60.0, show_default=True, help="of each of the two measurements")
def main(places: int, times: int, tokens: int, seconds: float) -> None:
    """Measure on this machine and print two tables for LOG.md."""
    full, flood = measure(places, times, tokens, seconds)
    click.echo(table(OverloadRow, [full, flood]))
    click.echo("\n" + table(Verdict, judge(full, flood)))


if __name__ == "__main__":
    main()
