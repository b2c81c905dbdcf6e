"""The engine's inbox: requests and cancels from other threads, which it collects between steps."""

import threading
from collections.abc import Sequence

from triton_models.engine.sequence import Request
from triton_models.errors import (
    DuplicateRequestError,
    EngineStoppedError,
    InvalidRequestError,
    QueueFullError,
)


class Intake:
    """Takes requests and cancels from any thread; the engine's thread collects them before each step.

    It knows which requests are open, so it can refuse new ones at once, on the caller's thread. `limit` is
    how many may be open, running and waiting together: a limit on the waiting ones alone would refuse part of
    a burst that meets an idle engine, which has not had a step yet to start any of them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._new: list[tuple[Request, float]] = []
        self._cancels: dict[str, None] = {}
        self._closed = False

    @property
    def open(self) -> int:
        """Number of requests without a final output yet."""
        return len(self._open)

    def add(self, requests: Sequence[Request], arrived_at: float) -> None:
        """Open requests that arrived together at `arrived_at`, in monotonic seconds: all of them, or none.

        Raises:
            EngineStoppedError: the engine takes no more requests.
            DuplicateRequestError: a request with one of the ids is open.
            InvalidRequestError: there are more of them than may ever be open.
            QueueFullError: too many other requests are open.
        """
        with self._lock:
            if self._closed:
                raise EngineStoppedError("the engine has stopped")
            for request in requests:
                if request.request_id in self._open:
                    raise DuplicateRequestError(f"request {request.request_id!r} is open already")
            if len(requests) > self._limit:
                raise InvalidRequestError(
                    f"{len(requests)} requests at once are more than the {self._limit} that may be open"
                )
            if len(self._open) + len(requests) > self._limit:
                raise QueueFullError(f"{len(self._open)} requests are open already")
            self._open.update(request.request_id for request in requests)
            self._new += [(request, arrived_at) for request in requests]

    def cancel(self, request_id: str) -> bool:
        """Ask the engine to end a request; False if it is not open."""
        with self._lock:
            if request_id not in self._open:
                return False
            self._cancels[request_id] = None
            return True

    def collect(self) -> tuple[list[tuple[Request, float]], list[str]]:
        """Return the requests (with their arrival) and the cancels since the last call, in order."""
        with self._lock:
            new, self._new = self._new, []
            cancels, self._cancels = list(self._cancels), {}
        return new, cancels

    def end(self, request_id: str) -> None:
        """Record that a request had its final output."""
        with self._lock:
            self._open.discard(request_id)
            # A cancel that came too late must not hit the next request with that id.
            self._cancels.pop(request_id, None)

    def close(self) -> None:
        """Take no more requests; those already taken can still be collected."""
        with self._lock:
            self._closed = True
