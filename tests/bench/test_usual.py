from collections.abc import Sequence

from bench.usual import ALONE, ENGINE, PADDED, Measured, Plan
from bench.usual_work import Job, Run

PLAN = Plan(clients=(1, 4), requests=6, longest=9, rounds=3, limit_s=1.0)


class Ways:
    """Ways whose throughput is written down, and the jobs of each."""

    def __init__(self, **rates: list[float]) -> None:
        self.jobs: list[tuple[str, int, list[Job]]] = []
        self.ways = {name: self._way(name, iter(rate)) for name, rate in rates.items()}

    def _way(self, name: str, rates: object) -> object:
        def way(jobs: Sequence[Job], clients: int) -> Run:
            self.jobs.append((name, clients, list(jobs)))
            rate = next(rates)
            return Run(seconds=10 / rate, waited=[1.0, 3.0], tokens=10)

        return way


def test_all_get_the_same_jobs_in_turn_and_compared_round_by_round() -> None:
    ways = Ways(**{ALONE: [1, 2, 5], PADDED: [4, 2, 8], ENGINE: [1, 8, 3, 8, 10, 24]})
    measured = Measured()
    measured.measure(ways.ways, PLAN, vocabulary=1000)
    assert [(name, clients) for name, clients, _ in ways.jobs] == [
        (ALONE, 1),
        (ENGINE, 1),
        (PADDED, 4),
        (ENGINE, 4),
    ] * 3
    lists = [tuple(jobs) for _, _, jobs in ways.jobs]
    assert lists[0::2] == lists[1::2], "another way gets other jobs"
    assert len(set(lists)) == 6, "earlier jobs may be in a cache"

    rows = {(row.clients, row.way): row for row in measured.rows("m", PLAN)}
    assert list(rows) == [(1, ALONE), (1, ENGINE), (4, PADDED), (4, ENGINE)]
    one, four = rows[1, ENGINE], rows[4, ENGINE]
    assert (one.tok_s, one.to_generate) == (3, "1.50x")  # 1/1, 3/2, 10/5
    assert (four.tok_s, four.to_generate) == (8, "3.00x")  # 8/4, 8/2, 24/8
    assert (one.request_s, one.requests, one.wait_p50, one.wait_p99) == (5 / 3, 6, 1.0, 3.0)
    assert rows[4, PADDED].to_generate == "1.00x"


def test_a_way_measured_afterwards_comes_into_the_same_table() -> None:
    measured = Measured()
    measured.measure(Ways(**{PADDED: [1, 2, 4]}).ways, PLAN, vocabulary=1000)
    measured.measure(Ways(**{ENGINE: [1] * 6}).ways, PLAN, vocabulary=1000)
    ratios = {(row.clients, row.way): row.to_generate for row in measured.rows("m", PLAN)}
    assert ratios == {(1, ENGINE): "", (4, PADDED): "1.00x", (4, ENGINE): "0.50x"}
