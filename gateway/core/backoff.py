"""Delays between attempts."""


class Backoff:
    """Delays that double from `first_s` to `limit_s`."""

    def __init__(self, first_s: float, limit_s: float) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._next_s = first_s

    def next(self) -> float:
        """Return the delay before the next attempt, in seconds."""
        delay = self._next_s
        self._next_s = min(2 * delay, self._limit_s)
        return delay

    def reset(self) -> None:
        """Begin again with `first_s`."""
        self._next_s = self._first_s
