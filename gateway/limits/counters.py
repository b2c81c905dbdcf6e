"""Numbers that the processes of a gateway share, so that its limits hold for all of them together.

A table in shared memory: a row of 64-bit integers for each process. A process writes its own row only and
reads all of them, without locks: an aligned word is never seen half written (memoryview moves one by a single
instruction), and a process that is stopped or killed at any moment holds no other up. Only a new name is
given its place under a lock.
"""

import fcntl
import hashlib
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.telemetry.metrics import Place

_WORD = 8
_ALIVE = 0
"""The first number of the table: whether the row's process lives. The parent clears it, see `mark_ended`."""
_BEGUN = 1
"""The second: whether all processes have begun to serve, of which the parent writes, see `mark_begun`."""
_FIRST = 2
"""The next, which is the first that is given out."""


class Number:
    """One number of this process, and the same number of the others."""

    def __init__(self, words: memoryview, alive: memoryview, row: int) -> None:
        self._words = words
        self._alive = alive
        self._row = row
        self._alone = len(words) == 1

    @property
    def own(self) -> int:
        """This process's."""
        return int(self._words[self._row])

    @own.setter
    def own(self, value: int) -> None:
        self._words[self._row] = value

    def of_others(self) -> list[int]:
        """Return those of the other processes, in the order of their places; 0 for one that ended."""
        if self._alone:
            return []
        # A process may end or begin while this runs: it has its place in the list in any case.
        values = [value if alive else 0 for value, alive in zip(self._words, self._alive, strict=True)]
        del values[self._row]
        return values

    def total(self) -> int:
        """Return the sum over all processes."""
        return self.own + sum(self.of_others())

    def add_within(self, count: int, most: int) -> bool:
        """Add `count` to this process's number if the sum over all stays within `most`.

        Returns:
            Whether it was added. Of several processes that do this at once, none may succeed although there
            was room for one, but never more than there was room for.
        """
        if self.total() + count > most:
            return False  # and the others saw nothing of it
        self.own += count
        if self._alone:
            return True
        # Written before the others' are read: the one that writes last sees what all others wrote.
        _fence()
        if self.total() <= most:
            return True
        self.own -= count
        return False


@dataclass(frozen=True, slots=True)
class Named:
    """Room for the numbers of things that come and go while the gateway runs, such as keys."""

    most: int = 0
    """How many names there may ever be."""
    gauges: int = 0
    """Of each."""
    counters: int = 0
    """Of each."""


class Numbers:
    """Columns of the table, given out one by one."""

    def __init__(self, table: "SharedCounters", gauges: range, counters: range) -> None:
        self._of = table
        self._gauges = iter(gauges)
        self._counters = iter(counters)

    def gauge(self) -> Number:
        """Return the next gauge. All processes must ask in the same order."""
        return self._of.number(next(self._gauges), outlives=False)

    def counter(self) -> Number:
        """Return the next counter. All processes must ask in the same order."""
        return self._of.number(next(self._counters), outlives=True)


class SharedCounters(Numbers):
    """This process's part in the shared table.

    Args:
        gauges: how many numbers tell what a process does at present: 0 when it starts and after it ended.
        counters: how many only grow: they outlive their process, and go on with the one that replaces it.
        named: others for each of some names, see `named`.
        place: among the processes of this gateway; None: it is the only one.
    """

    def __init__(
        self, *, gauges: int, counters: int, named: Named = Named(), place: Place | None = None
    ) -> None:
        self.processes = 1 if place is None else place.count
        self._row = 0 if place is None else place.number
        self._named = named
        self._named_gauges = _FIRST + gauges
        first_counter = self._named_gauges + named.most * named.gauges
        self._named_counters = first_counter + counters
        self._names = self._named_counters + named.most * named.counters
        super().__init__(self, range(_FIRST, _FIRST + gauges), range(first_counter, self._named_counters))
        size = (self._names + named.most) * self.processes * _WORD
        self._lock = None if place is None else place.table
        memory = bytearray(size) if place is None else _map(place.table, size)
        self._table = memoryview(memory).cast("q")
        self._alive = self._column(_ALIVE)
        for column in range(_FIRST, first_counter):
            self._table[column * self.processes + self._row] = 0
        self._alive[self._row] = 1
        self._always = memoryview(bytes([1] * self.processes))

    @property
    def begun(self) -> bool:
        """Whether each process has been ready to serve, or has failed so often that it is not waited for."""
        return self._lock is None or any(self._column(_BEGUN))

    def lives(self, process: int) -> bool:
        """Whether the process with that number has started, and has not been found ended since."""
        return bool(self._alive[process])

    def named(self, name: str) -> Numbers | None:
        """Return the numbers of `name`, the same in every process; None: there is no room for another name.

        A name keeps its numbers for as long as the table exists.
        """
        digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]) + 1  # 0 is a free place
        with self._alone():
            places = self._table[self._names * self.processes :: self.processes]
            owners = places.tolist()
            wanted = digest if digest in owners else 0
            if wanted not in owners:
                return None
            at = owners.index(wanted)
            places[at] = digest
        gauges, counters = (
            range(first + at * count, first + (at + 1) * count)
            for first, count in (
                (self._named_gauges, self._named.gauges),
                (self._named_counters, self._named.counters),
            )
        )
        return Numbers(self, gauges, counters)

    def number(self, column: int, *, outlives: bool) -> Number:
        """Return what stands in a column; that of a process that ended counts on if it `outlives` it."""
        return Number(self._column(column), self._always if outlives else self._alive, self._row)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep the other processes from giving a place to another name. The kernel ends it with a process."""
        if self._lock is None:
            yield
            return
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def _column(self, number: int) -> memoryview:
        return self._table[number * self.processes : (number + 1) * self.processes]


@contextmanager
def new_table() -> Iterator[int]:
    """Make an empty table, for the parent to pass on as `Place.table`.

    It is no file on a disk: to write to a page of one waits while it is copied there, and ends the process if
    the disk is full.
    """
    descriptor = os.memfd_create("tritongate-shared")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def mark_ended(place: Place) -> None:
    """Note that the process in that place has ended: its gauges count no more. For the parent to call."""
    os.pwrite(place.table, bytes(_WORD), (_ALIVE * place.count + place.number) * _WORD)


def mark_begun(place: Place) -> None:
    """Note that all processes have begun to serve. For the parent to call, of the place of any."""
    os.pwrite(place.table, b"\1", (_BEGUN * place.count + place.number) * _WORD)


def _map(table: int, size: int) -> mmap.mmap:
    if os.fstat(table).st_size < size:
        os.ftruncate(table, size)  # what is added reads as zeros
    return mmap.mmap(table, size)


def _fence() -> None:
    """Let the other processes see what this one wrote before it reads on.

    Processors read ahead of their own writes. To release a lock orders the writes before it, to acquire it
    again the reads after it, and the one cannot overtake the other.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
