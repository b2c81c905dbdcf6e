"""Watches open requests: notices clients that left and keeps quiet streams alive."""

import logging
import threading
from collections.abc import Callable, Iterable

from triton_models.serving.open_request import OpenRequest

log = logging.getLogger(__name__)

INTERVAL_S = 0.1


class Monitor:
    """Looks at every open request ten times a second, on its own thread.

    Asking Triton whether a request was cancelled costs some 50 microseconds, which rules it out between
    engine steps; ten times a second it is little.
    """

    def __init__(
        self,
        open_requests: Callable[[], Iterable[OpenRequest]],
        cancel: Callable[[OpenRequest], None],
        heartbeat_s: float,
    ) -> None:
        self._open_requests = open_requests
        self._cancel = cancel
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
            for request in self._open_requests():
                self._look(request)

    def _look(self, request: OpenRequest) -> None:
        # A held lock means that something is being sent right now, which is all that this would find out.
        if not request.lock.acquire(blocking=False):
            return
        try:
            gone = request.client_gone()
            if not gone:
                request.keep_alive(self._quiet_s)
        except Exception:
            # The boundary of one request on this thread: the others must still be watched.
            log.exception("could not watch request %s", request.key)
            gone = True
        finally:
            request.lock.release()
        if gone:
            self._cancel(request)
