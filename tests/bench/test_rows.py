from bench.rows import median_row, table
from gateway.commands.load_rows import LoadRow, summarise
from tests.gateway.commands.test_load_rows import answer


def row(tokens_per_second: float) -> LoadRow:
    done = answer(0.0, 1.0, 1.0 + 1 / tokens_per_second, tokens=2)
    return summarise([done], clients=1, rate=0.0)


def test_the_median_is_a_row_that_was_measured() -> None:
    rows = [row(5.0), row(9.0), row(7.0)]
    assert median_row(rows) is rows[2]
    assert median_row(rows[:2]) is rows[0]


def test_a_table_has_a_line_for_each_row() -> None:
    lines = table(LoadRow, [row(5.0), row(9.0)], leave_out={"rate", "error"}).splitlines()
    assert len(lines) == 4
    assert "rate" not in lines[0]
    assert len({line.count("|") for line in lines}) == 1
