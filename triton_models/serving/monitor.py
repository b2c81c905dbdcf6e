"""Watches open requests and channels: notices clients that left and keeps quiet streams alive."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

PERIOD_S = 0.21
"""Every stream is looked at once in this time, and what looking takes: a client that left is noticed within a
quarter of a second."""
_TURNS = 3
"""In a period. A turn is for its share of the streams, so that the work comes evenly."""
_TURN_S = PERIOD_S / _TURNS
_FEW = 32
"""Up to so many streams are looked at in every turn."""


class Watched(Protocol):
    """A stream to a client. The methods are called with `lock` held."""

    key: str
    lock: threading.Lock

    def client_gone(self) -> bool:
        """Return True if the client cancelled or hung up."""

    def keep_alive(self, interval_s: float) -> None:
        """Send a heartbeat if the client heard nothing for `interval_s` seconds."""


W = TypeVar("W", bound=Watched)


class Monitor(Generic[W]):
    """Looks at every open stream once in `PERIOD_S`, and at few more often, on its own thread.

    Asking Triton whether a request was cancelled costs some 50 microseconds, which rules it out between
    engine steps, and is a tenth of a processor for 500 streams even so.
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
        """Those whose turn it was while something was being sent; they have the next one, too."""
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
        """Look at the streams whose turn it is; a stream has the same one for as long as it is open."""
        streams = list(self._streams())
        few = len(streams) <= _FEW
        # The next look may come so late, and the promise is to the client.
        quiet_s = max(0.0, self._heartbeat_s - (_TURN_S if few else PERIOD_S))
        missed, self._missed = self._missed, set()
        for stream in streams:
            due = few or stream.key in missed or hash(stream.key) % _TURNS == turn % _TURNS
            if due and not self._look(stream, quiet_s):
                self._missed.add(stream.key)

    def _look(self, stream: W, quiet_s: float) -> bool:
        """Look at one stream; False where something is being sent on it right now."""
        if not stream.lock.acquire(blocking=False):
            return False
        try:
            gone = stream.client_gone()
            if not gone:
                stream.keep_alive(quiet_s)
        except Exception:
            # The boundary of one stream on this thread: the others must still be watched.
            log.exception("could not watch stream %s", stream.key)
            gone = True
        finally:
            stream.lock.release()
        if gone:
            self._on_gone(stream)
        return True
