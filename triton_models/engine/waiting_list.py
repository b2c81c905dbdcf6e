"""The waiting sequences, ordered by priority and arrival, with deadlines."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from triton_models.engine.sequence import Sequence

_rank = attrgetter("rank")


class WaitingList:
    """Lower priority first, equal ones in order of arrival; `PRIORITY_S` of waiting are worth one level.

    So no sequence starves behind a stream of more urgent ones. A preempted sequence keeps its rank, which
    puts it at the head of its priority: whatever waits there came later. The list has no limit of its own:
    `Intake` refuses new requests, and a preempted sequence must always have a place.
    """

    def __init__(self) -> None:
        # Sorted by rank. Moving a few hundred pointers costs less than a heap that must forget removed
        # entries.
        self._order: list[Sequence] = []
        self._members: dict[str, Sequence] = {}
        self._earliest_deadline = math.inf
        """No member's deadline is before this."""

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._order)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence in order."""
        insort(self._order, sequence, key=_rank)
        self._members[sequence.request.request_id] = sequence
        if sequence.request.deadline is not None:
            self._earliest_deadline = min(self._earliest_deadline, sequence.request.deadline)

    def first(self) -> Sequence | None:
        """Return the first sequence, without removing it."""
        return self._order[0] if self._order else None

    def remove(self, request_id: str) -> Sequence | None:
        """Remove a sequence, wherever it is; None if it does not wait."""
        sequence = self._members.pop(request_id, None)
        if sequence is not None:
            del self._order[bisect_left(self._order, sequence.rank, key=_rank)]
        return sequence

    def expired(self, now: float) -> list[Sequence]:
        """Return the members whose deadline is at or before `now`, in monotonic seconds."""
        if now < self._earliest_deadline:
            return []
        deadlines = [
            (each.request.deadline, each) for each in self._order if each.request.deadline is not None
        ]
        self._earliest_deadline = min((deadline for deadline, _ in deadlines), default=math.inf)
        return [sequence for deadline, sequence in deadlines if deadline <= now]
