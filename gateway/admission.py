"""Admission control: how many answers may run at once, and how many requests may wait.

First come, first served. Knows nothing of HTTP, models or deadlines: a waiter may be cancelled at any moment,
and permits that were just granted to it go to the next one.
"""

import asyncio
from collections import deque

from gateway.errors import RateLimitError

_RETRY_AFTER_S = 1

Turn = tuple[asyncio.Future[None], int]
"""A waiter: resolved when it is its turn, and the number of permits it waits for."""


class Admission:
    """A bounded number of permits and a bounded queue for them. Belongs to one event loop.

    A caller takes as many permits as its request costs upstream. One that wants more than exist takes all of
    them, so that nothing is refused for its size. The first in the queue is never overtaken by a smaller one.

    Args:
        max_in_flight: number of permits.
        max_waiting: callers that may wait; more are refused at once.
        work: what permits are for, as a refusal says it.
    """

    def __init__(self, *, max_in_flight: int, max_waiting: int, work: str = "answers") -> None:
        self._max_in_flight = max_in_flight
        self._max_waiting = max_waiting
        self._work = work
        self._in_flight = 0
        self._queue: deque[Turn] = deque()

    @property
    def in_flight(self) -> int:
        """Permits held."""
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Callers in the queue."""
        return len(self._queue)

    async def acquire(self, permits: int = 1) -> int:
        """Take permits, waiting in order of arrival; `release` them with the same number.

        Returns:
            How many were taken.

        Raises:
            RateLimitError: the queue is full.
        """
        wanted = self._possible(permits)
        if not self._queue and self._in_flight + wanted <= self._max_in_flight:
            self._in_flight += wanted
            return wanted
        if len(self._queue) >= self._max_waiting:
            raise RateLimitError(
                f"The gateway is full: {self._in_flight} {self._work} at work, "
                f"{len(self._queue)} requests wait.",
                retry_after_s=_RETRY_AFTER_S,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((turn, wanted))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._in_flight -= wanted  # granted and cancelled in the same turn of the loop: pass them on
            self._grant()
            raise
        return wanted

    def release(self, permits: int = 1) -> None:
        """Give permits back: to the first in the queue if there is one."""
        self._in_flight -= self._possible(permits)
        self._grant()

    def _possible(self, permits: int) -> int:
        return min(permits, self._max_in_flight)

    def _grant(self) -> None:
        """Drop cancelled waiters, and wake the others from the front while there are permits."""
        self._queue = deque(entry for entry in self._queue if not entry[0].cancelled())
        while self._queue and self._in_flight + self._queue[0][1] <= self._max_in_flight:
            turn, wanted = self._queue.popleft()
            self._in_flight += wanted
            turn.set_result(None)
