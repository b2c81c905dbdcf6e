"""Puts the same load on several servers in turn, and arranges their rows side by side."""

import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from bench.gpu.servers import Server, ServerError
from bench.rows import median_row
from gateway.commands.load import LoadPool, Workload, closed_loop, open_loop
from gateway.commands.load_rows import LoadRow

_FEWEST_REQUESTS = 4
"""Fewest requests of a closed loop, so that there is a median even with one client."""
_WARM_UP_TOKENS = 32
_PEAK_SHARES = (0.5, 0.7, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests, and how many clients send them."""

    name: str = ""
    clients: tuple[int, ...]
    rounds: int
    requests: Mapping[str, Any]
    """Fields of `Workload`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The measurements that are made of each server."""

    loads: tuple[Load, ...]
    repeats: int
    open_s: float = 0.0
    """Seconds of each open loop, of the first load's requests; 0: none."""
    rates: tuple[float, ...] = ()
    processes: int
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
        self.medians: dict[str, dict[str, LoadRow]] = {}
        """For each server, the row of each setting, in the plan's order."""
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
        rates = plan.rates or peak_rates(next(iter(self.medians.values()), {}).values())
        try:
            with starting as server, LoadPool(plan.processes) as pool:
                self.note(f"{name} was ready after {server.started_s:.0f} s")
                self.medians[name] = {}
                for load in plan.loads:
                    self._closed_loops(name, pool, load, _workload(server, load))
                if plan.open_s:
                    rates = rates or peak_rates(self.medians[name].values())
                    self._open_loops(name, pool, _workload(server, plan.loads[0]), rates)
        except (ServerError, RuntimeError) as error:
            self.note(f"{name}: {error}")

    def _closed_loops(self, name: str, pool: LoadPool, load: Load, workload: Workload) -> None:
        plan = self._plan
        # A warm-up with every number of clients before any row counts: shapes, caches and connections.
        short = replace(workload, out=min(workload.out, _WARM_UP_TOKENS))
        for clients in load.clients:
            if plan.in_time:
                warm_up = f"warm-up {load.name}{clients}"
                closed_loop(pool, short, warm_up, clients=clients, requests=clients)
        for clients in load.clients:
            setting = f"{clients} clients" + (f", {load.name}" if load.name else "")
            rows = []
            for repeat in range(plan.repeats):
                if plan.in_time:
                    requests = max(_FEWEST_REQUESTS, load.rounds * clients)
                    row = closed_loop(
                        pool, workload, f"{setting}, repeat {repeat}", clients=clients, requests=requests
                    )
                    self._keep(name, setting, row, repeat)
                    rows.append(row)
            if len(rows) < plan.repeats:
                self.note(f"{name}: {setting} measured {len(rows)} times: no time left")
            if rows:
                self.medians[name][setting] = median_row(rows)

    def _open_loops(self, name: str, pool: LoadPool, workload: Workload, rates: tuple[float, ...]) -> None:
        for rate in rates:
            if not self._plan.in_time:
                self.note(f"{name}: {rate:.1f} requests a second not measured: no time left")
                continue
            row = open_loop(pool, workload, f"rate {rate}", rate=rate, seconds=self._plan.open_s)
            setting = f"{rate:.1f} requests/s"
            self._keep(name, setting, row, 0)
            self.medians[name][setting] = row

    def _keep(self, name: str, setting: str, row: LoadRow, repeat: int) -> None:
        self.rows.append({"server": name, "setting": setting, "repeat": repeat} | asdict(row))
        click.echo(
            f"{name}: {setting}: {row.tokens_per_second:,.0f} tok/s, TTFT {row.ttft_p50:.1f}, "
            f"token {row.per_token_p50:.2f}, gap p99 {row.gap_p99:.1f} ms, failed {row.failed}",
            err=True,
        )


def _workload(server: Server, load: Load) -> Workload:
    return Workload(url=server.url, model=server.model, **load.requests)


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


def compared(measured: Mapping[str, Mapping[str, LoadRow]]) -> list[ComparedRow]:
    """Return all rows, ordered by setting; `to_first` is the throughput relative to the first server's."""
    first = next(iter(measured.values()), {})
    return [
        ComparedRow(
            setting=setting,
            server=name,
            tok_s=row.tokens_per_second,
            to_first=f"{row.tokens_per_second / first[setting].tokens_per_second:.2f}x"
            if setting in first
            else "",
            ttft_p50=row.ttft_p50,
            ttft_p99=row.ttft_p99,
            token_p50=row.per_token_p50,
            token_p99=row.per_token_p99,
            gap_p99=row.gap_p99,
            gap_max=row.gap_max,
            within=f"{row.within:.1%}" if row.rate else "",
            failed=row.failed,
        )
        for setting in dict.fromkeys(setting for rows in measured.values() for setting in rows)
        for name, rows in measured.items()
        if (row := rows.get(setting)) is not None
    ]


def peak_rates(rows: Iterable[LoadRow]) -> tuple[float, ...]:
    """Return the rates for open loops: shares of the highest rate of requests that a closed loop reached."""
    best = max((row.tokens_per_second / row.output_tokens for row in rows if not row.rate), default=0.0)
    return tuple(round(share * best, 1) for share in _PEAK_SHARES) if best else ()
