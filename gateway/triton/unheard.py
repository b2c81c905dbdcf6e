"""Requests to one repository entry without a response yet, and the nudge for those that Triton forgot.

The dynamic batcher of Triton 2.51 loses a wake-up now and then, for every entry with a queue policy or
priorities: notified that an execution ended, it checks for a waiting instance before the instance waits
again, and then sleeps for half a second with requests in its queue, unless another one arrives. So where the
oldest request has waited for a while, a nudge is sent: a request that costs the model next to nothing. Once
it is answered, an execution has taken the oldest requests from Triton's queue as well, as many as fit into
one, and they get no further nudge, however long the model takes.

One timer serves all requests; without requests there is none. No client asked for nudges (divergence 14).
"""

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable
from itertools import islice

from gateway.triton.status import TritonError

NUDGES_LIMIT = 4
"""Unanswered nudges at a time. More than one, since a nudge can be forgotten, too."""


class Unheard:
    """Belongs to the event loop's thread, and must be made inside the running event loop.

    Args:
        nudge: sends a nudge and returns when it is answered; raises TritonError.
        after_s: age of a request that causes a nudge, and the pause between two nudges, in seconds.
        taken: requests that an answered nudge took along; those after it need another one.
    """

    def __init__(self, nudge: Callable[[], Awaitable[None]], *, after_s: float, taken: int) -> None:
        self._nudge = nudge
        self._after_s = after_s
        self._taken = taken
        self._loop = asyncio.get_running_loop()
        self._next_number = 0
        self._sent: dict[int, float] = {}
        """When each request was sent that may be in Triton's queue, by number; the oldest first."""
        self._timer: asyncio.TimerHandle | None = None
        self._nudges: set[asyncio.Task[None]] = set()

    def sent(self) -> int:
        """Record a request that is sent now; return its number for `heard`."""
        number = self._next_number
        self._next_number += 1
        self._sent[number] = now = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(now + self._after_s, self._look)
        return number

    def heard(self, number: int) -> None:
        """Note that a request got a response, or is over; may be called again."""
        self._sent.pop(number, None)

    async def close(self) -> None:
        """Stop sending nudges."""
        self._sent.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self._nudges:
            task.cancel()
        await asyncio.gather(*self._nudges, return_exceptions=True)

    def _look(self) -> None:
        self._timer = None
        if not self._sent:
            return
        now = self._loop.time()
        due = next(iter(self._sent.values())) + self._after_s
        if due <= now:
            due = now + self._after_s
            if len(self._nudges) < NUDGES_LIMIT:
                self._send(now - self._after_s / 2)
        self._timer = self._loop.call_at(due, self._look)

    def _send(self, before: float) -> None:
        task = asyncio.create_task(
            self._free(before),
            name="nudge",
            context=contextvars.Context(),  # not that of the request that set the timer
        )
        self._nudges.add(task)
        task.add_done_callback(self._nudges.discard)

    async def _free(self, before: float) -> None:
        """Nudge, and drop the oldest of the requests sent before then; others may still be on their way."""
        with contextlib.suppress(TritonError):  # the requests fail in the same way, and report it
            await self._nudge()
        for number, sent in list(islice(self._sent.items(), self._taken)):
            if sent <= before:
                del self._sent[number]
