"""Admission control: how many answers may run at once, and how many requests may wait.

First come, first served, also among the processes of a gateway. Knows nothing of HTTP, models or deadlines: a
waiter may be cancelled at any moment, and permits that were just granted to it go to the next one.
"""

import asyncio
from collections import deque
from time import monotonic_ns
from typing import NamedTuple

from gateway.errors import RateLimitError
from gateway.tally import Tally

_RETRY_AFTER_S = 1
_LOOK_EVERY_S = 0.005
"""How often a process whose requests wait looks for permits that another one gave back."""
_CLOSE_NS = 50_000_000
"""Between processes, requests that came so close to each other may overtake each other: when many permits are
given back at once, they need not be granted one by one in turns."""
_ASLEEP_NS = 1_000_000_000
"""A process that has not looked for this long, because it is stopped perhaps, does not hold the others up."""


class Turn(NamedTuple):
    """A waiter."""

    granted: asyncio.Future[None]
    """Resolved when it is its turn."""
    permits: int
    since: int
    """Nanoseconds of the clock that all processes of a machine share."""


class Admission:
    """A bounded number of permits and a bounded queue for them. Belongs to one event loop.

    A caller takes as many permits as its request costs upstream. One that wants more than exist takes all of
    them, so that nothing is refused for its size. The first in the queue is never overtaken by a smaller one.

    Several processes share both bounds: whatever is free goes to the process whose first waiter came first.

    Args:
        max_in_flight: number of permits.
        max_waiting: callers that may wait; more are refused at once.
        tally: what the processes know of each other; `GAUGES` of its gauges are used here.
        work: what permits are for, as a refusal says it.
    """

    GAUGES = 4

    def __init__(self, *, max_in_flight: int, max_waiting: int, tally: Tally, work: str = "answers") -> None:
        self._max_in_flight = max_in_flight
        self._max_waiting = max_waiting
        self._work = work
        self._queue: deque[Turn] = deque()
        self._alone = tally.processes == 1
        self._held = tally.gauge()
        self._queued = tally.gauge()
        self._front = tally.gauge()
        """Since when the first in the queue waits; 0: nobody does."""
        self._looked = tally.gauge()
        """When the queue was last looked at."""
        self._look: asyncio.TimerHandle | None = None

    @property
    def in_flight(self) -> int:
        """Permits held by this process."""
        return self._held.own

    @property
    def waiting(self) -> int:
        """Callers in this process's queue."""
        return len(self._queue)

    async def acquire(self, permits: int = 1) -> int:
        """Take permits, waiting in order of arrival; `release` them with the same number.

        Returns:
            How many were taken.

        Raises:
            RateLimitError: the queue is full.
        """
        wanted = self._possible(permits)
        turn = Turn(asyncio.get_running_loop().create_future(), wanted, monotonic_ns())
        if not self._queue and self._take(turn):
            return wanted
        if not self._queued.add_within(1, self._max_waiting):
            raise RateLimitError(
                f"The gateway is full: {self._held.total()} {self._work} at work, "
                f"{self._queued.total()} requests wait.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._queue.append(turn)
        self._tell()
        try:
            await turn.granted
        except asyncio.CancelledError:
            if turn.granted.done() and not turn.granted.cancelled():
                self._held.own -= wanted  # granted and cancelled in the same turn of the loop: pass them on
            self._grant()
            raise
        return wanted

    def release(self, permits: int = 1) -> None:
        """Give permits back: to the first in the queue if there is one."""
        self._held.own -= self._possible(permits)
        self._grant()

    def _possible(self, permits: int) -> int:
        return min(permits, self._max_in_flight)

    def _take(self, turn: Turn) -> bool:
        """Take permits for `turn` if they are free, and no other process's first waiter came before it."""
        awake = monotonic_ns() - _ASLEEP_NS
        for front, looked in zip(self._front.of_others(), self._looked.of_others(), strict=True):
            if 0 < front < turn.since - _CLOSE_NS and looked > awake:
                return False
        return self._held.add_within(turn.permits, self._max_in_flight)

    def _grant(self) -> None:
        """Drop cancelled waiters, and wake the others from the front while there are permits."""
        if not self._queue:
            return
        self._queue = deque(turn for turn in self._queue if not turn.granted.cancelled())
        while self._queue and self._take(self._queue[0]):
            self._queue.popleft().granted.set_result(None)
        self._tell()

    def _tell(self) -> None:
        """Tell the other processes of the queue, and look again soon for what they give back."""
        self._queued.own = len(self._queue)
        self._front.own = self._queue[0].since if self._queue else 0
        self._looked.own = monotonic_ns()
        if self._queue and self._look is None and not self._alone:
            self._look = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._grant()
