"""How many generations may be at work, and how many may wait for that.

First come, first served. Knows nothing of HTTP, models or deadlines: whoever waits may be cancelled at any
moment, and a permit that was just granted to a cancelled waiter goes to the next one.
"""

import asyncio
import contextlib
from collections import deque

from gateway.errors import RateLimitError

_RETRY_AFTER_S = 1


class Admission:
    """A bounded number of permits and a bounded queue for them. Belongs to one event loop.

    Args:
        max_in_flight: permits.
        max_waiting: callers that may wait for one; any more are refused at once.
    """

    def __init__(self, *, max_in_flight: int, max_waiting: int) -> None:
        self._max_in_flight = max_in_flight
        self._max_waiting = max_waiting
        self._in_flight = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def in_flight(self) -> int:
        """Permits held."""
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Callers in the queue."""
        return len(self._queue)

    async def acquire(self) -> None:
        """Take a permit, waiting for one in order of arrival. Each is given back by `release`.

        Raises:
            RateLimitError: the queue is full.
        """
        if self._in_flight < self._max_in_flight:
            # A free permit means an empty queue: `release` hands permits over, never past a waiter.
            self._in_flight += 1
            return
        if len(self._queue) >= self._max_waiting:
            raise RateLimitError(
                f"The gateway is full: {self._in_flight} requests at work, {len(self._queue)} waiting.",
                retry_after_s=_RETRY_AFTER_S,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # granted and cancelled in the same turn of the loop: pass it on
            else:
                with contextlib.suppress(ValueError):  # `release` may have dropped it from the queue already
                    self._queue.remove(turn)
            raise

    def release(self) -> None:
        """Give a permit back: to the first in the queue if there is one."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._in_flight -= 1
