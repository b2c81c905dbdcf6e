from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic

import pytest

from bench.gpu import comparison
from bench.gpu.comparison import Comparison, Load, Plan, compared, peak_rates
from bench.gpu.servers import Server, ServerError
from gateway.commands.load import LoadPool, Workload
from gateway.commands.load_rows import Answer, LoadRow, summarise

LOAD = Load(clients=(1, 4), rounds=2, requests={"ids": 5, "out": 100})
PLAN = Plan(loads=(LOAD,), repeats=3, processes=1, ends=monotonic() + 1000)


def row(clients: int = 0, rate: float = 0.0, tokens_per_second: float = 100.0) -> LoadRow:
    answer = Answer(sent=0.0, pieces=[0.1, 1.0], ended=1.0, tokens=100)
    return replace(summarise([answer], clients=clients, rate=rate), tokens_per_second=tokens_per_second)


@contextmanager
def server() -> Iterator[Server]:
    yield Server(url="http://127.0.0.1:1", model="m", started_s=1.0)


@contextmanager
def broken() -> Iterator[Server]:
    raise ServerError("it did not start")
    yield


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Have loops answer at once, ever faster, and note what was asked: route, clients or rate, requests."""
    asked: list[tuple[str, int, int]] = []

    def closed(_pool: LoadPool, workload: Workload, _name: str, *, clients: int, requests: int) -> LoadRow:
        asked.append(("closed" if workload.out == 100 else "warm", clients, requests))
        return row(clients=clients, tokens_per_second=100.0 * len(asked))

    def opened(_pool: LoadPool, _workload: Workload, _name: str, *, rate: float, seconds: float) -> LoadRow:
        asked.append(("open", int(rate), int(seconds)))
        return row(rate=rate)

    monkeypatch.setattr(comparison, "closed_loop", closed)
    monkeypatch.setattr(comparison, "open_loop", opened)
    return asked


def test_a_server_is_warmed_up_and_measured_by_the_plan(asked: list[tuple[str, int, int]]) -> None:
    measuring = Comparison(PLAN)
    measuring.run("a", server())
    assert asked == [("warm", 1, 1), ("warm", 4, 4), *[("closed", 1, 4)] * 3, *[("closed", 4, 8)] * 3]
    medians = measuring.medians["a"]
    assert {setting: each.tokens_per_second for setting, each in medians.items()} == {
        "1 clients": 400,
        "4 clients": 700,
    }
    assert [each["repeat"] for each in measuring.rows] == [0, 1, 2] * 2


def test_one_server_is_measured_with_several_loads(asked: list[tuple[str, int, int]]) -> None:
    other = Load(name="two turns", clients=(4,), rounds=1, requests={"ids": 7, "out": 100, "turns": 2})
    measuring = Comparison(replace(PLAN, loads=(LOAD, other), repeats=1))
    measuring.run("a", server())
    assert list(measuring.medians["a"]) == ["1 clients", "4 clients", "4 clients, two turns"]
    assert asked[-2:] == [("warm", 4, 4), ("closed", 4, 4)]


def test_open_loops_take_their_rates_from_the_first_servers_peak(asked: list[tuple[str, int, int]]) -> None:
    measuring = Comparison(replace(PLAN, open_s=20.0, repeats=1))
    measuring.run("a", server())
    measuring.run("b", server())
    rates = [each.rate for each in measuring.medians["a"].values() if each.rate]
    # 400 tokens a second of 100 tokens each.
    assert rates == [2.0, 2.8, 3.6]
    assert [each.rate for each in measuring.medians["b"].values() if each.rate] == rates


def test_what_no_time_is_left_for_is_noted(asked: list[tuple[str, int, int]]) -> None:
    measuring = Comparison(replace(PLAN, ends=monotonic()))
    measuring.run("a", server())
    assert measuring.notes == ["a not started: no time left"]
    assert not asked


def test_a_server_that_fails_is_noted(asked: list[tuple[str, int, int]]) -> None:
    measuring = Comparison(PLAN)
    measuring.run("a", broken())
    assert measuring.notes == ["a: it did not start"]
    measuring.run("b", server())
    assert list(measuring.medians) == ["b"]


def test_rows_stand_setting_by_setting_beside_the_first_servers() -> None:
    first = {"1 clients": row(1), "4 clients": row(4)}
    rows = compared({"a": first, "b": {"4 clients": row(4, tokens_per_second=150.0), "8 clients": row(8)}})
    assert [(each.setting, each.server, each.to_first) for each in rows] == [
        ("1 clients", "a", "1.00x"),
        ("4 clients", "a", "1.00x"),
        ("4 clients", "b", "1.50x"),
        ("8 clients", "b", ""),
    ]


def test_without_closed_loops_there_is_no_peak() -> None:
    assert peak_rates([]) == peak_rates([row(rate=3.0)]) == ()
