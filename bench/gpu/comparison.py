"""Puts the same load on several servers in turn, and arranges their rows side by side."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import click

from bench.gpu.servers import Server, ServerError
from gateway.commands.load import LoadPool, Workload, closed_loop, open_loop
from gateway.commands.load_rows import LoadRow, median_row

_FEWEST_REQUESTS = 4
"""Fewest requests of a closed loop, so that there is a median even with one client."""
_WARM_UP_TOKENS = 32
_PEAK_SHARES = (0.5, 0.7, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The measurements that are made of each server."""

    clients: tuple[int, ...]
    rounds: int
    repeats: int
    ids: int | None
    """Token ids of each prompt; None: words, for servers that take text only."""
    ids_below: int = 60_000
    """The models' vocabulary, or less."""
    out: int
    shared: int
    open_s: float
    rates: tuple[float, ...]
    processes: int
    words: int | None = None
    spread: float = 0.0
    also: Mapping[str, Any] = field(default_factory=dict)
    """These two as in `Workload`."""
    ends: float
    """On the clock of `time.monotonic`: no measurement begins later."""

    @property
    def in_time(self) -> bool:
        """Whether another measurement may begin."""
        return time.monotonic() < self.ends


class Comparison:
    """Measures servers by one plan. Measurements for which no time is left are left out, with a note."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.medians: dict[str, list[LoadRow]] = {}
        """For each server, the rows in the order of the plan's settings."""
        self.rows: list[dict[str, Any]] = []
        """Every single measurement."""
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Store a remark, and print it."""
        self.notes.append(text)
        click.echo(f"note: {text}", err=True)

    def run(self, name: str, starting: AbstractContextManager[Server]) -> None:
        """Start a server, measure it and stop it; a failure becomes a note."""
        if not self._plan.in_time:
            self.note(f"{name} not started: no time left")
            return
        plan = self._plan
        rates = plan.rates or peak_rates(next(iter(self.medians.values()), []))
        try:
            with starting as server, LoadPool(plan.processes) as pool:
                self.note(f"{name} was ready after {server.started_s:.0f} s")
                self.medians[name] = []
                workload = Workload(
                    url=server.url,
                    model=server.model,
                    ids=plan.ids,
                    ids_below=plan.ids_below,
                    words=plan.words,
                    shared=plan.shared,
                    out=plan.out,
                    spread=plan.spread,
                    also=plan.also,
                )
                for row in self._closed_loops(name, pool, workload):
                    self.medians[name].append(row)
                if plan.open_s:
                    rates = rates or peak_rates(self.medians[name])
                    self._open_loops(name, pool, workload, rates)
        except (ServerError, RuntimeError) as error:
            self.note(f"{name}: {error}")

    def _closed_loops(self, name: str, pool: LoadPool, workload: Workload) -> Iterator[LoadRow]:
        plan = self._plan
        # A warm-up with every number of clients before any row counts: shapes, caches and connections.
        short = replace(workload, out=min(workload.out, _WARM_UP_TOKENS))
        for clients in plan.clients:
            closed_loop(pool, short, f"warm-up {clients}", clients=clients, requests=clients)
        for clients in plan.clients:
            rows = []
            for repeat in range(plan.repeats):
                if plan.in_time:
                    requests = max(_FEWEST_REQUESTS, plan.rounds * clients)
                    label = f"clients {clients}, repeat {repeat}"
                    rows.append(closed_loop(pool, workload, label, clients=clients, requests=requests))
                    self._keep(name, rows[-1], repeat)
            if len(rows) < plan.repeats:
                self.note(f"{name}: {clients} clients measured {len(rows)} times: no time left")
            if rows:
                yield median_row(rows)

    def _open_loops(self, name: str, pool: LoadPool, workload: Workload, rates: tuple[float, ...]) -> None:
        for rate in rates:
            if not self._plan.in_time:
                self.note(f"{name}: {rate:.1f} requests a second not measured: no time left")
                continue
            row = open_loop(pool, workload, f"rate {rate}", rate=rate, seconds=self._plan.open_s)
            self._keep(name, row, 0)
            self.medians[name].append(row)

    def _keep(self, name: str, row: LoadRow, repeat: int) -> None:
        self.rows.append({"server": name, "repeat": repeat} | asdict(row))
        click.echo(
            f"{name}: {_setting(row)}: {row.tokens_per_second:,.0f} tok/s, TTFT {row.ttft_p50:.1f}, "
            f"token {row.per_token_p50:.2f}, gap p99 {row.gap_p99:.1f} ms, failed {row.failed}",
            err=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """One server at one setting. Times are milliseconds."""

    setting: str
    server: str
    tok_s: float
    to_first: str
    ttft_p50: float
    ttft_p99: float
    token_p50: float
    token_p99: float
    gap_p99: float
    gap_max: float
    within: str
    failed: int


def compared(measured: dict[str, list[LoadRow]]) -> list[ComparedRow]:
    """Return all rows, ordered by setting; `to_first` is the throughput relative to the first server's."""
    first = next(iter(measured.values()), [])
    baseline = {_setting(row): row.tokens_per_second for row in first}
    order = list(dict.fromkeys(_setting(row) for rows in measured.values() for row in rows))
    return [
        ComparedRow(
            setting=setting,
            server=name,
            tok_s=row.tokens_per_second,
            to_first=f"{row.tokens_per_second / baseline[setting]:.2f}x" if setting in baseline else "",
            ttft_p50=row.ttft_p50,
            ttft_p99=row.ttft_p99,
            token_p50=row.per_token_p50,
            token_p99=row.per_token_p99,
            gap_p99=row.gap_p99,
            gap_max=row.gap_max,
            within=f"{row.within:.1%}" if row.rate else "",
            failed=row.failed,
        )
        for setting in order
        for name, rows in measured.items()
        for row in rows
        if _setting(row) == setting
    ]


def _setting(row: LoadRow) -> str:
    return f"{row.rate:.1f} requests/s" if row.rate else f"{row.clients} clients"


def peak_rates(rows: list[LoadRow]) -> tuple[float, ...]:
    """Return the rates for open loops: shares of the highest rate of requests that a closed loop reached."""
    best = max((row.tokens_per_second / row.output_tokens for row in rows if not row.rate), default=0.0)
    return tuple(round(share * best, 1) for share in _PEAK_SHARES) if best else ()
