"""Watches open requests and channels: notices clients that left, and sends heartbeats on silent streams."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

PERIOD_S = 0.21
"""Every stream is checked once in this time plus the time that checking takes, so a client that left is
noticed within a quarter of a second."""
_TURNS = 3
"""Turns per period. Each checks its share of the streams, which spreads the work evenly."""
_TURN_S = PERIOD_S / _TURNS
_FEW = 32
"""Up to this many streams are all checked in every turn."""


class Watched(Protocol):
    """A stream to a client. The methods are called with `lock` held."""

    key: str
    lock: threading.Lock

    def client_gone(self) -> bool:
        """Return True if the client cancelled or hung up."""

    def keep_alive(self, interval_s: float) -> None:
        """Send a heartbeat if nothing was sent to the client for `interval_s` seconds."""


W = TypeVar("W", bound=Watched)


class Monitor(Generic[W]):
    """Checks every open stream once per `PERIOD_S`, more often if there are few, on a thread of its own.

    Asking Triton whether a request was cancelled takes some 50 microseconds. That is too slow between engine
    steps, and even here takes a tenth of a CPU core for 500 streams.
    """

    def __init__(
        self,
        streams: Callable[[], Iterable[W]],
        on_gone: Callable[[W], None],
        heartbeat_s: float,
    ) -> None:
        self._streams = streams
        self._on_gone = on_gone
        self._heartbeat_s = heartbeat_s
        self._missed: set[str] = set()
        """Streams that were busy sending in their turn; they are checked in the next one as well."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="request-monitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and join it."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        turn = 0
        while not self._stopping.wait(_TURN_S):
            self.look(turn)
            turn += 1

    def look(self, turn: int) -> None:
        """Check the streams of this turn; a stream keeps its turn for as long as it is open."""
        streams = list(self._streams())
        few = len(streams) <= _FEW
        # The next check may come late by that much, but the client must get its heartbeat in time.
        silent_s = max(0.0, self._heartbeat_s - (_TURN_S if few else PERIOD_S))
        missed, self._missed = self._missed, set()
        for stream in streams:
            due = few or stream.key in missed or hash(stream.key) % _TURNS == turn % _TURNS
            if due and not self._look(stream, silent_s):
                self._missed.add(stream.key)

    def _look(self, stream: W, silent_s: float) -> bool:
        """Check one stream; return False if something is being sent on it right now."""
        if not stream.lock.acquire(blocking=False):
            return False
        try:
            gone = stream.client_gone()
            if not gone:
                stream.keep_alive(silent_s)
        except Exception:
            # Confined to one stream: the others must still be watched.
            log.exception("could not watch stream %s", stream.key)
            gone = True
        finally:
            stream.lock.release()
        if gone:
            self._on_gone(stream)
        return True
