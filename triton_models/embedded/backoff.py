"""How long to wait before the next attempt."""

import time

_FIRST_S = 0.5
_LONGEST_S = 30.0
_STABLE_S = 60.0


class Backoff:
    """Pauses that double from 0.5 s up to 30 s, and start over after a minute without a failure."""

    def __init__(self) -> None:
        self._next = _FIRST_S
        self._failed_at = -_STABLE_S

    def failed(self) -> float:
        """Record a failure; return the seconds to wait before the next attempt."""
        now = time.monotonic()
        if now - self._failed_at >= _STABLE_S + self._next:
            self._next = _FIRST_S
        pause = self._next
        self._failed_at = now
        self._next = min(2 * self._next, _LONGEST_S)
        return pause
