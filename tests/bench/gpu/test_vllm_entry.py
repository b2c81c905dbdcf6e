from dataclasses import replace

from bench.gpu.vllm_entry import ENTRY, SERVE, faults
from gateway.commands.load_rows import Answer, LoadRow, summarise


def row(clients: int) -> LoadRow:
    answer = Answer(sent=0.0, pieces=[0.1, 1.0], ended=1.0, prompt_tokens=5, tokens=100)
    return summarise([answer], clients=clients, rate=0.0)


def rows(*measured: LoadRow) -> dict[str, LoadRow]:
    return {f"{each.clients} clients": each for each in measured}


def test_a_comparison_of_the_same_work_counts() -> None:
    assert not faults({SERVE: rows(row(1), row(8)), ENTRY: rows(row(1), row(8))}, clients=2)


def test_one_that_is_not_complete_does_not() -> None:
    assert faults({SERVE: rows(row(1), row(8)), ENTRY: rows(row(1))}, clients=2) == [
        "not everything was measured"
    ]
    assert faults({}, clients=1)


def test_one_with_failures_or_other_tokens_does_not() -> None:
    failed = replace(row(1), failed=3, error="full")
    assert faults({SERVE: rows(failed), ENTRY: rows(row(1))}, clients=1) == ["3 requests failed: full"]
    other = replace(row(1), prompt_tokens=6.0)
    assert faults({SERVE: rows(row(1)), ENTRY: rows(other)}, clients=1) == [
        "1 clients: different tokens: 5 + 100, 6 + 100"
    ]
