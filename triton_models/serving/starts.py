"""Limits how many calls to another entry are starting at once.

From its start to its first response, a BLS call occupies one of the 32 threads of Triton's pool, which also
send this entry's own responses. If the other entry's process dies in that time, the thread waits for ever; if
all threads did, this entry would be dead as well.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

AT_ONCE: Final = 8
"""The first response takes a millisecond or two, so this allows hundreds of calls per second."""

LOSSES_BORNE: Final = 12
"""Number of threads of the pool that may be lost. With those that `nudges` may lose, and all that start or
nudge at once, they are fewer than 32."""


class StartsLostError(Exception):
    """Too many calls never got a first response: only a new process of this entry helps."""


class Starts:
    """`at_once` places to start calls; one held too long counts as lost and is replaced. Thread-safe."""

    def __init__(self, at_once: int = AT_ONCE, losses_borne: int = LOSSES_BORNE) -> None:
        self._free = threading.Semaphore(at_once)
        self._losses_borne = losses_borne
        self._lock = threading.Lock()
        self._held: dict[object, float] = {}
        self._lost = 0

    @contextlib.contextmanager
    def place(self, timeout_s: float) -> Iterator[None]:
        """Hold a place.

        Raises:
            TimeoutError: none was free for `timeout_s` seconds.
        """
        if not self._free.acquire(timeout=timeout_s):
            raise TimeoutError
        token = object()
        with self._lock:
            self._held[token] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                still_held = self._held.pop(token, None) is not None
            if still_held:
                self._free.release()

    def oldest(self, after: float) -> float | None:
        """Return when the first call after `after` began that is still starting, in monotonic seconds.

        None: none is.
        """
        with self._lock:
            return next((since for since in self._held.values() if since > after), None)

    def replace_lost(self, held_s: float) -> None:
        """Replace the places that were held for `held_s` seconds.

        Raises:
            StartsLostError: more would then be lost in total than the pool can bear; none was replaced.
        """
        before = time.monotonic() - held_s
        with self._lock:
            lost = [token for token, since in self._held.items() if since < before]
            if self._lost + len(lost) > self._losses_borne:
                raise StartsLostError
            for token in lost:
                del self._held[token]
            self._lost += len(lost)
        for _ in lost:
            self._free.release()
