"""Watches open requests and channels: notices clients that left and keeps quiet streams alive."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

INTERVAL_S = 0.1


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
    """Looks at every open stream ten times a second, on its own thread.

    Asking Triton whether a request was cancelled costs some 50 microseconds, which rules it out between
    engine steps; ten times a second it is little.
    """

    def __init__(
        self,
        streams: Callable[[], Iterable[W]],
        on_gone: Callable[[W], None],
        heartbeat_s: float,
    ) -> None:
        self._streams = streams
        self._on_gone = on_gone
        # A look may come an interval late, and the promise is to the client.
        self._quiet_s = max(0.0, heartbeat_s - INTERVAL_S)
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
        while not self._stopping.wait(INTERVAL_S):
            for stream in self._streams():
                self._look(stream)

    def _look(self, stream: W) -> None:
        # A held lock means that something is being sent right now, which is all that this would find out.
        if not stream.lock.acquire(blocking=False):
            return
        try:
            gone = stream.client_gone()
            if not gone:
                stream.keep_alive(self._quiet_s)
        except Exception:
            # The boundary of one stream on this thread: the others must still be watched.
            log.exception("could not watch stream %s", stream.key)
            gone = True
        finally:
            stream.lock.release()
        if gone:
            self._on_gone(stream)
