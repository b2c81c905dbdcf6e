"""Closed-loop load on an OpenAI endpoint: so many clients, each asking again as soon as it was answered."""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

_TIMEOUT_S = 300.0


@dataclass(slots=True)
class _Answer:
    """When its pieces came, in `time.perf_counter` seconds."""

    asked: float
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """One measurement. Times in milliseconds."""

    clients: int
    tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    per_token_p50: float
    """Mean time per output token after the first, the median over requests."""
    gap_p99: float
    """Between two pieces of one answer."""


async def run_load(url: str, body: dict[str, Any], *, clients: int, rounds: int) -> LoadRow:
    """Have `clients` clients stream `rounds` answers each to `body`.

    Raises:
        httpx.HTTPError: a request failed; a benchmark with failures measures nothing.
    """
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits) as http:
        began = time.perf_counter()
        answers = await asyncio.gather(*(_client(http, body, rounds) for _ in range(clients)))
        taken = time.perf_counter() - began
    return _row(clients, taken, [answer for each in answers for answer in each])


async def _client(http: httpx.AsyncClient, body: dict[str, Any], rounds: int) -> list[_Answer]:
    return [await _ask(http, body) for _ in range(rounds)]


async def _ask(http: httpx.AsyncClient, body: dict[str, Any]) -> _Answer:
    answer = _Answer(time.perf_counter())
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            await response.aread()
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk.get("usage"):
                answer.tokens = chunk["usage"]["completion_tokens"]
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                answer.pieces.append(time.perf_counter())
    return answer


def _row(clients: int, taken: float, answers: Sequence[_Answer]) -> LoadRow:
    first = [1000 * (answer.pieces[0] - answer.asked) for answer in answers]
    gaps = [
        1000 * (b - a) for answer in answers for a, b in zip(answer.pieces, answer.pieces[1:], strict=False)
    ]
    per_token = [
        1000 * (answer.pieces[-1] - answer.pieces[0]) / max(1, answer.tokens - 1) for answer in answers
    ]
    return LoadRow(
        clients=clients,
        tokens_per_second=sum(answer.tokens for answer in answers) / taken,
        ttft_p50=statistics.median(first),
        ttft_p99=_percentile(first, 99),
        per_token_p50=statistics.median(per_token),
        gap_p99=_percentile(gaps, 99),
    )


def _percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
