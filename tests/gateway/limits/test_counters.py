import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from threading import Semaphore, Thread, current_thread
from typing import Any

import pytest

from gateway.limits.counters import (
    Named,
    Number,
    SharedCounters,
    mark_begun,
    mark_ended,
    new_table,
)
from tests.gateway.places import places


class Turns:
    """Lets one of several threads run at a time; which one is decided anew at each `pause`."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._gates: dict[Thread, Semaphore] = {}

    def run(self, *works: Callable[[], None]) -> None:
        """Run each of them in a thread to its end."""
        threads = [Thread(target=self._run, args=(work,)) for work in works]
        self._gates = {thread: Semaphore(0) for thread in threads}
        for thread in threads:
            thread.start()
        self._random.choice(list(self._gates.values())).release()
        for thread in threads:
            thread.join()

    def pause(self) -> None:
        """Let any of them go on, perhaps this one."""
        self._random.choice(list(self._gates.values())).release()
        self._gates[current_thread()].acquire()

    def _run(self, work: Callable[[], None]) -> None:
        self._gates[current_thread()].acquire()
        work()
        del self._gates[current_thread()]
        if self._gates:
            self._random.choice(list(self._gates.values())).release()


class Words(list[int]):
    """A column of the table; others may run before each access to a word."""

    def __init__(self, count: int, pause: Callable[[], None]) -> None:
        super().__init__([0] * count)
        self._pause = pause

    def __getitem__(self, row: Any) -> Any:
        self._pause()
        return super().__getitem__(row)

    def __setitem__(self, row: Any, value: Any) -> None:
        self._pause()
        super().__setitem__(row, value)

    def __iter__(self) -> Iterator[int]:
        return (self[row] for row in range(len(self)))


def test_alone_there_are_no_others() -> None:
    shared = SharedCounters(gauges=2, counters=1)
    first, second, counter = shared.gauge(), shared.gauge(), shared.counter()
    first.own, second.own, counter.own = 5, -7, 2**40
    assert [each.own for each in (first, second, counter)] == [5, -7, 2**40]
    assert [each.total() for each in (first, second, counter)] == [5, -7, 2**40]
    assert not list(first.of_others())
    assert shared.processes == 1


def test_each_process_writes_its_own_and_reads_all(table: int) -> None:
    shared = [SharedCounters(gauges=2, counters=1, place=place) for place in places(table, 3)]
    numbers = [(each.gauge(), each.gauge(), each.counter()) for each in shared]
    for row, three in enumerate(numbers):
        for column, number in enumerate(three):
            number.own = 10 * row + column
    assert [[number.own for number in three] for three in numbers] == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    assert list(numbers[1][1].of_others()) == [1, 21]
    assert [number.total() for number in numbers[2]] == [30, 33, 36]


def test_processes_are_told_once_when_all_have_begun(table: int) -> None:
    assert SharedCounters(gauges=1, counters=0).begun  # alone
    one, other = places(table, 2)
    first = SharedCounters(gauges=1, counters=0, place=one)
    assert not first.begun
    mark_begun(other)
    assert first.begun
    mark_ended(one)
    assert SharedCounters(gauges=1, counters=0, place=one).begun  # also a process that replaces one


def test_what_a_process_did_ends_with_it_and_what_it_counted_does_not(table: int) -> None:
    one, other = places(table, 2)
    ended, watching = (SharedCounters(gauges=1, counters=1, place=place) for place in (one, other))
    ended.gauge().own = 3
    ended.counter().own = 40
    gauge, counter = watching.gauge(), watching.counter()
    assert (gauge.total(), counter.total()) == (3, 40)
    mark_ended(one)
    assert (gauge.total(), counter.total()) == (0, 40)
    replacement = SharedCounters(gauges=1, counters=1, place=one)
    assert (replacement.gauge().own, gauge.total()) == (0, 0)
    replacement.counter().own += 2
    assert counter.total() == 42


def test_a_process_that_ended_before_it_wrote_anything(table: int) -> None:
    one, other = places(table)
    mark_ended(other)
    gauge = SharedCounters(gauges=1, counters=0, place=one).gauge()
    gauge.own = 3
    assert gauge.total() == 3


def test_one_that_ended_keeps_its_place_among_the_others(table: int) -> None:
    gauges = [SharedCounters(gauges=1, counters=0, place=place).gauge() for place in places(table, 4)]
    for row, gauge in enumerate(gauges):
        gauge.own = row + 1
    mark_ended(places(table, 4)[2])
    assert list(gauges[1].of_others()) == [1, 0, 4]


def test_no_more_is_added_than_there_is_room_for_whoever_goes_on_when() -> None:
    reached = [most_added(seed) for seed in range(200)]
    assert max(reached) == 2


def most_added(seed: int) -> int:
    """Let three processes add within 2, and take back, a few times; return how much there was at most."""
    turns = Turns(seed)
    words: Any = Words(3, turns.pause)
    numbers = [Number(words, memoryview(bytes([1] * 3)), row) for row in range(3)]
    added, most = [0, 0, 0], 0

    def work(row: int) -> None:
        nonlocal most
        random = Random(f"{seed} {row}")
        for _ in range(8):
            count = random.choice((1, 1, 2))
            if numbers[row].add_within(count, 2):
                added[row] += count
                most = max(most, sum(added))
                turns.pause()
                added[row] -= count
                numbers[row].own -= count

    turns.run(*(partial(work, row) for row in range(3)))
    assert words == [0, 0, 0]
    return most


def test_what_has_no_room_is_never_seen() -> None:
    """Else the others would find no room for a small one while a big one is tried again and again."""
    written = []

    class Seen(list[int]):
        def __setitem__(self, row: Any, value: Any) -> None:
            written.append(value)
            super().__setitem__(row, value)

    words: Any = Seen([0, 3])
    number = Number(words, memoryview(bytes([1, 1])), 0)
    assert not number.add_within(2, 4)
    assert not written
    assert number.add_within(1, 4)
    assert written == [1]


def test_alone_the_bound_is_its_own() -> None:
    number = SharedCounters(gauges=1, counters=0).gauge()
    assert number.add_within(3, 4)
    assert not number.add_within(2, 4)
    assert number.add_within(1, 4)
    assert number.own == 4


def test_there_are_as_many_numbers_as_were_asked_for() -> None:
    shared = SharedCounters(gauges=1, counters=0)
    shared.gauge()
    with pytest.raises(StopIteration):
        shared.gauge()
    with pytest.raises(StopIteration):
        shared.counter()


def test_the_table_is_in_memory() -> None:
    with new_table() as table:
        assert "memfd:" in str(Path(f"/proc/self/fd/{table}").readlink())
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(table)


def test_names_have_the_same_numbers_in_every_process(table: int) -> None:
    room = Named(2, gauges=1, counters=1)
    one, other = (SharedCounters(gauges=1, counters=1, named=room, place=place) for place in places(table))
    first, second = one.named("a"), other.named("b")
    again, last = other.named("a"), one.named("b")
    assert first
    assert second
    assert again
    assert last
    assert one.named("c") is None
    assert other.named("a") is not None
    fixed, gauge, counter = one.gauge(), first.gauge(), first.counter()
    fixed.own, gauge.own, counter.own = 1, 2, 3
    assert other.gauge().total() == 1
    assert (again.gauge().total(), again.counter().total()) == (2, 3)
    assert (second.gauge().total(), last.counter().total(), other.counter().total()) == (0, 0, 0)
    mark_ended(places(table)[0])
    replacement = SharedCounters(gauges=1, counters=1, named=room, place=places(table)[0]).named("a")
    assert replacement is not None
    assert (replacement.gauge().own, replacement.counter().own) == (0, 3)
