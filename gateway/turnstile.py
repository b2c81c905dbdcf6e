"""Lets the requests of a burst start a few at a time.

A request passes several stages before it reaches Triton, and between stages the event loop turns to other
requests. Of a hundred that arrive together, none would be sent before all were parsed: the first would wait
as long as the last, with the GPU idle. Let in a few at a time, the first are computed while the next are
parsed.
"""

import asyncio
from collections import deque

AT_ONCE = 8
"""About ten milliseconds of work: few enough for the first, enough while the loop is busy with streams."""


class Turnstile:
    """Belongs to one event loop. Requests only pass through: they hold nothing and give nothing back."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._left = at_once
        """How many may enter in this turn of the loop."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def enter(self) -> None:
        """Return at once, or after those in front: each turn of the event loop lets `at_once` in."""
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
