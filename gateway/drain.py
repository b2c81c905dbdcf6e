"""Graceful shutdown: refuse new requests, give running ones a grace period, then end them.

Knows nothing of signals or servers: `gateway.server` drives it, the middleware and flights obey it.
"""

import asyncio
import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.errors import GatewayError, UnavailableError

RETRY_AFTER_S = 1


class Phase(enum.Enum):
    """The state of the gateway."""

    SERVING = "serving"
    DRAINING = "draining"
    """New requests are refused, running ones go on."""
    ENDED = "ended"
    """Running requests were told to end."""


class Drain:
    """Counts requests and ends them. Belongs to one event loop."""

    def __init__(self) -> None:
        self.phase = Phase.SERVING
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._endings: set[Callable[[GatewayError], None]] = set()

    def enter(self) -> None:
        """Count an admitted request; `leave` undoes it."""
        self._active += 1
        self._idle.clear()

    def leave(self) -> None:
        """The request is over."""
        self._active -= 1
        if not self._active:
            self._idle.set()

    def register(self, end: Callable[[GatewayError], None]) -> None:
        """Register `end` to be called when the grace period is over.

        Raises:
            UnavailableError: it is over already.
        """
        if self.phase is Phase.ENDED:
            raise shutting_down()
        self._endings.add(end)

    def unregister(self, end: Callable[[GatewayError], None]) -> None:
        """Forget `end`."""
        self._endings.discard(end)

    @contextmanager
    def registered(self, end: Callable[[GatewayError], None]) -> Iterator[None]:
        """Register `end` for a block."""
        self.register(end)
        try:
            yield
        finally:
            self.unregister(end)

    def begin(self) -> None:
        """Refuse new requests from now on."""
        if self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING

    def end(self) -> None:
        """Tell every running request to end with an error."""
        self.phase = Phase.ENDED
        for end in list(self._endings):
            end(shutting_down())

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no request is left; False when `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


def shutting_down() -> UnavailableError:
    """Return the error for requests during a drain."""
    return UnavailableError("The gateway is shutting down.", retry_after_s=RETRY_AFTER_S)
