from pathlib import Path

import pytest

from gateway.fleet import Place
from gateway.tally import Tally, mark_ended


def places(folder: Path, count: int) -> list[Place]:
    return [Place(number=number, count=count, folder=folder) for number in range(count)]


def test_alone_there_are_no_others() -> None:
    tally = Tally(gauges=2, counters=1)
    first, second, counter = tally.gauge(), tally.gauge(), tally.counter()
    first.own, second.own, counter.own = 5, -7, 2**40
    assert [each.own for each in (first, second, counter)] == [5, -7, 2**40]
    assert [each.total() for each in (first, second, counter)] == [5, -7, 2**40]
    assert not list(first.of_others())
    assert tally.processes == 1


def test_each_process_writes_its_own_and_reads_all(tmp_path: Path) -> None:
    tallies = [Tally(gauges=2, counters=1, place=place) for place in places(tmp_path, 3)]
    numbers = [(tally.gauge(), tally.gauge(), tally.counter()) for tally in tallies]
    for row, three in enumerate(numbers):
        for column, number in enumerate(three):
            number.own = 10 * row + column
    assert [[number.own for number in three] for three in numbers] == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    assert list(numbers[1][1].of_others()) == [1, 21]
    assert [number.total() for number in numbers[2]] == [30, 33, 36]


def test_what_a_process_did_ends_with_it_and_what_it_counted_does_not(tmp_path: Path) -> None:
    one, other = places(tmp_path, 2)
    ended, watching = (Tally(gauges=1, counters=1, place=place) for place in (one, other))
    ended.gauge().own = 3
    ended.counter().own = 40
    gauge, counter = watching.gauge(), watching.counter()
    assert (gauge.total(), counter.total()) == (3, 40)
    mark_ended(one)
    assert (gauge.total(), counter.total()) == (0, 40)
    replacement = Tally(gauges=1, counters=1, place=one)
    assert (replacement.gauge().own, gauge.total()) == (0, 0)
    replacement.counter().own += 2
    assert counter.total() == 42


def test_a_process_that_ended_before_it_wrote_anything(tmp_path: Path) -> None:
    mark_ended(places(tmp_path, 2)[1])
    assert not list(tmp_path.iterdir())


def test_there_are_as_many_numbers_as_were_asked_for() -> None:
    tally = Tally(gauges=1, counters=0)
    tally.gauge()
    with pytest.raises(StopIteration):
        tally.gauge()
    with pytest.raises(StopIteration):
        tally.counter()


def test_the_table_is_this_users_only(tmp_path: Path) -> None:
    Tally(gauges=1, counters=0, place=places(tmp_path, 2)[0])
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
