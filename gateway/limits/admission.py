"""Who gets in and when all must leave: admission, the pace of a burst, connections, and the drain.

Admission is first come, first served, also among the processes of a gateway. A waiter may be cancelled at any
moment, and permits that were just granted to it go to the next one. A drain refuses new requests, gives
running ones a grace period, and then ends them: `gateway.process.server` drives it, the middleware and
running requests obey it. Knows nothing of HTTP, models, deadlines or signals.
"""

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, monotonic_ns
from typing import NamedTuple

from gateway.errors import GatewayError, RateLimitError, UnavailableError
from gateway.limits.counters import SharedCounters

_LOOK_EVERY_S = 0.005
"""How often a process whose requests wait looks for permits that another one gave back."""
_CLOSE_NS = 50_000_000
"""Between processes, requests that came so close to each other may overtake each other: when many permits are
given back at once, they need not be granted one by one in turns."""
_ASLEEP_NS = 1_000_000_000
"""A process that has not looked for this long, because it is stopped perhaps, does not hold the others up."""
_AT_ONCE = 8
"""About ten milliseconds of work: few enough for the first, enough while the loop is busy with streams."""
_SPARE_CONNECTIONS = 64
"""Several probers, each with the new connection of a few seconds."""


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
        shared: what the processes know of each other; `GAUGES` of its gauges are used here.
        work: what permits are for, as a refusal says it.
    """

    GAUGES = 4

    def __init__(
        self, *, max_in_flight: int, max_waiting: int, shared: SharedCounters, work: str = "answers"
    ) -> None:
        self._max_in_flight = max_in_flight
        self._max_waiting = max_waiting
        self._work = work
        self._queue: deque[Turn] = deque()
        self._alone = shared.processes == 1
        self._held = shared.gauge()
        self._queued = shared.gauge()
        self._front = shared.gauge()
        """Since when the first in the queue waits; 0: nobody does."""
        self._looked = shared.gauge()
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

    def check(self) -> None:
        """Check that one more may be at work or wait, as things are now; nothing is taken.

        Raises:
            RateLimitError: the queue is full.
        """
        if self._held.total() >= self._max_in_flight and self._queued.total() >= self._max_waiting:
            raise self._full()

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
            raise self._full()
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

    def _full(self) -> RateLimitError:
        return RateLimitError(
            f"The gateway is full: {self._held.total()} {self._work} at work, "
            f"{self._queued.total()} requests wait."
        )

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


class Pacing:
    """Lets the requests of a burst start a few at a time. Belongs to one event loop.

    A request passes several stages before it reaches Triton, and between stages the event loop turns to other
    requests. Of a hundred that arrive together, none would be sent before all were parsed: the first would
    wait as long as the last, with the GPU idle. Let in a few at a time, the first are computed while the next
    are parsed. Requests only pass through: they hold nothing and give nothing back.
    """

    def __init__(self, at_once: int = _AT_ONCE) -> None:
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


class Connections:
    """A bounded number of connections, of all processes of a gateway together.

    At the bound, an idle one of this process makes room for a new one. If there is none, a few more are let
    in, for whoever looks after it: there the caller answers probes, and refuses the rest.

    Args:
        most: connections.
        shared: what the processes know of each other; one of its gauges is used here.
    """

    def __init__(self, most: int, shared: SharedCounters) -> None:
        self._most = most
        self._open = shared.gauge()
        self.closing = False
        """Whether each one of this process is closed after its next answer: another process gets the rest."""
        self._idle: dict[Callable[[], bool], float] = {}
        """What closes an idle one, and since when it is idle; the longest first."""

    @property
    def open(self) -> int:
        """Connections of this process."""
        return self._open.own

    def enter(self) -> bool:
        """Count a connection; `leave` undoes it.

        Returns:
            Whether it is within the bound; else it is one of the few more.

        Raises:
            UnavailableError: not even of these is one left; nothing was counted.
        """
        while not self._open.add_within(1, self._most):
            if not any(close() for close in self._idle):
                break
        else:
            return True
        if self._open.add_within(1, self._most + _SPARE_CONNECTIONS):
            return False
        raise too_many_connections()

    def leave(self) -> None:
        """The connection is closed."""
        self._open.own -= 1

    def rest(self, close: Callable[[], bool]) -> None:
        """A connection is idle from now on, until `wake`.

        Args:
            close: closes it, with `wake` and `leave`, and says whether it did.
        """
        self._idle[close] = monotonic()

    def wake(self, close: Callable[[], bool]) -> None:
        """The connection is not idle any more, if it was."""
        self._idle.pop(close, None)

    def close_idle(self, since_s: float) -> None:
        """Close those that have been idle for so long."""
        before = monotonic() - since_s
        for close in [each for each, since in self._idle.items() if since <= before]:
            close()


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

    @contextmanager
    def registered(self, end: Callable[[GatewayError], None]) -> Iterator[None]:
        """Have `end` called when the grace period is over, if that is during the block.

        Raises:
            UnavailableError: it is over already.
        """
        if self.phase is Phase.ENDED:
            raise shutting_down()
        self._endings.add(end)
        try:
            yield
        finally:
            self._endings.discard(end)

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
    return UnavailableError("The gateway is shutting down.", reason="draining")


def too_many_connections() -> UnavailableError:
    """Return the error for requests on connections beyond the bound."""
    return UnavailableError("The gateway has too many connections.")
