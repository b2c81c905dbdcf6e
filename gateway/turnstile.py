"""Lets the requests of a burst begin one after the other.

A request has several stages before it is with Triton, and at the end of each the event loop goes on with
whoever is next. Of a hundred that arrive together, none would be sent before all of them were read: the first
would wait as long as the last, and the GPU would have nothing to do meanwhile. Let in a few at a time, the
first are computed while the next are read.
"""

import asyncio
from collections import deque

AT_ONCE = 8
"""Some ten milliseconds of work: few enough for the first, enough for a loop that is busy with streams."""


class Turnstile:
    """Belongs to one event loop. Nobody holds a place: who was let in is no more seen here."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._left = at_once
        """How many may enter in this turn of the loop."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def enter(self) -> None:
        """Return at once, or as soon as those in front were let in: `at_once` in each turn of the loop."""
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._at_once
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its client may have left
                turn.set_result(None)
                self._left -= 1
        self._turning = self._left < self._at_once
        if self._turning:
            loop.call_soon(self._turn, loop)
