"""Numbers that the processes of a gateway share, so that its limits hold for all of them together.

A table in a mapped file: a row of 64-bit integers for each process. A process writes its own row only and
reads all of them, without locks: an aligned word is never seen half written, and a process that is stopped
or killed at any moment holds no other up.
"""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from gateway.fleet import Place

_WORD = 8
_ALIVE = 0
"""The first number of the table: whether the row's process lives. The parent clears it, see `mark_ended`."""


class Number:
    """One number of this process, and the same number of the others."""

    def __init__(self, words: memoryview, alive: memoryview, row: int) -> None:
        self._words = words
        self._alive = alive
        self._row = row

    @property
    def own(self) -> int:
        """This process's."""
        return int(self._words[self._row])

    @own.setter
    def own(self, value: int) -> None:
        self._words[self._row] = value

    def of_others(self) -> Iterator[int]:
        """Yield those of the other processes, in the order of their places."""
        for row, value in enumerate(self._words):
            if row != self._row and self._alive[row]:
                yield value

    def total(self) -> int:
        """Return the sum over all processes."""
        return self.own + sum(self.of_others())


class Tally:
    """This process's part in the shared table.

    Args:
        gauges: how many numbers tell what a process does at present: 0 when it starts and after it ended.
        counters: how many only grow: they outlive their process, and go on with the one that replaces it.
        place: among the processes of this gateway; None: it is the only one.
    """

    def __init__(self, *, gauges: int, counters: int, place: Place | None = None) -> None:
        self.processes = 1 if place is None else place.count
        self._row = 0 if place is None else place.number
        size = (1 + gauges + counters) * self.processes * _WORD
        memory = bytearray(size) if place is None else _map(_file(place), size)
        self._table = memoryview(memory).cast("q")
        self._gauges = iter(range(1, 1 + gauges))
        self._counters = iter(range(1 + gauges, 1 + gauges + counters))
        self._alive = self._column(_ALIVE)
        for column in range(1, 1 + gauges):
            self._column(column)[self._row] = 0
        self._alive[self._row] = 1
        self._always = memoryview(bytes([1] * self.processes))

    def gauge(self) -> Number:
        """Return the next gauge. All processes must ask in the same order."""
        return Number(self._column(next(self._gauges)), self._alive, self._row)

    def counter(self) -> Number:
        """Return the next counter. All processes must ask in the same order."""
        return Number(self._column(next(self._counters)), self._always, self._row)

    def _column(self, number: int) -> memoryview:
        return self._table[number * self.processes : (number + 1) * self.processes]


def mark_ended(place: Place) -> None:
    """Note that the process in that place has ended: its gauges count no more. For the parent to call."""
    if not (path := _file(place)).exists():
        return  # it ended before it wrote anything
    _map(path, place.count * _WORD)[place.number * _WORD : (place.number + 1) * _WORD] = bytes(_WORD)


def _file(place: Place) -> Path:
    return place.folder / "tally"


def _map(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)  # what is added reads as zeros
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
