"""A thread that handles what others give it, one thing after the other."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

_END: Final = object()


class Worker(Generic[T]):
    """A thread of its own, whose age tells whether it is stuck.

    An exception out of `handle` or `idle` is logged and ends nothing: whoever handles a request answers it.

    Args:
        name: the thread's.
        handle: called with what was put, in order.
        idle: called when nothing was put for `idle_s` seconds.
        idle_s: may be set at any time.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[T], object],
        *,
        idle: Callable[[], object] = lambda: None,
        idle_s: float | None = None,
    ) -> None:
        self.idle_s = idle_s
        self._handle = handle
        self._idle = idle
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def waiting(self) -> int:
        """How many things wait to be handled."""
        return self._queue.qsize()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Handle what was put, and join the thread."""
        self._queue.put(_END)
        self._thread.join()

    def put(self, item: T) -> None:
        """Have `item` handled. Never waits."""
        self._queue.put(item)

    def take_rest(self) -> list[T]:
        """Return what waits, which is then not handled any more; for `handle`."""
        taken: list[T] = []
        while not self._queue.empty():
            if (item := self._queue.get()) is _END:
                self._queue.put(_END)
                break
            taken.append(item)
        return taken

    def renew(self) -> None:
        """Note that another piece of work begins; for one that consists of several."""
        self._busy_since = time.monotonic()

    def age(self, now: float) -> float:
        """Return for how many seconds it has been at one piece of work; 0 while it waits for work."""
        since = self._busy_since
        return 0.0 if since is None else max(0.0, now - since)

    def _run(self) -> None:
        try:
            while self._turn():
                self._busy_since = None
        finally:
            self.renew()  # for good: a thread that has ended must not look healthy

    def _turn(self) -> bool:
        """Handle one thing; False at the end. Nothing refers to it afterwards."""
        try:
            item = self._queue.get(timeout=self.idle_s)
        except queue.Empty:
            action = self._idle
        else:
            if item is _END:
                return False
            action = partial(self._handle, item)
        self.renew()
        try:
            action()
        except Exception:
            # The thread's outermost frame: whatever failed, it goes on with the others.
            log.exception("%s: something could not be done", self._thread.name)
        return True
