"""What request bodies may take: memory while they are held, and the event loop's time while they are read.

Knows nothing of HTTP or JSON's meaning.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TypeVar

from gateway.errors import RateLimitError
from gateway.limits.counters import SharedCounters

T = TypeVar("T")

_LARGE_BYTES = 256 * 2**10
"""What is smaller is read within milliseconds."""
_WIDEST = 4
_VALUE_BYTES = 44
"""A place in a list, and the number there: 580,000 token ids in 3.4 MB took 25.6 MB."""
_OBJECT_BYTES = 800
"""A message or a part of one: 5,000 messages in 168 kB took 3.9 MB."""


_BEYOND_16_BITS = tuple(bytes([first]) for first in range(0xF0, 0xF5))
"""The first bytes of characters that take four in UTF-8."""

_OBJECT_BEGINS = tuple(b"{" + after for after in (b'"', b" ", b"\n", b"\r", b"\t"))
"""Of objects that are not empty; within a text, quotes and ends of lines are escaped."""


def grown(body: bytes) -> int:
    """Return how many bytes a JSON body takes beside its own once it was read: rather more than less.

    A text takes 1 to 4 times its length, since Python keeps all its characters as wide as the widest.
    """
    width = 1
    if not body.isascii():
        width = _WIDEST if any(first in body for first in _BEYOND_16_BITS) else 2
    if width < _WIDEST and b"\\" in body and b"\\u" in body:
        width = _WIDEST if b"\\ud" in body.lower() else 2
    objects = body.count(b"{")
    if objects * _OBJECT_BYTES > len(body):  # perhaps code or formulas within a text
        objects = sum(body.count(begin) for begin in _OBJECT_BEGINS)
    return width * len(body) + _VALUE_BYTES * body.count(b",") + _OBJECT_BYTES * objects


class Bodies:
    """The bodies that are held, by all processes of a gateway together. Belongs to one event loop.

    Args:
        most: bytes, of the bodies and of what they become.
        shared: what the processes know of each other; one of its gauges is used here.
    """

    def __init__(self, most: int, shared: SharedCounters) -> None:
        self._most = most
        self._held = shared.gauge()
        self._reading = asyncio.Lock()

    @property
    def held(self) -> int:
        """Bytes that this process holds."""
        return self._held.own

    def hold(self, count: int) -> None:
        """Count bytes among those that are held; `release` undoes it.

        Raises:
            RateLimitError: they would exceed the limit; nothing was counted.
        """
        if not self._held.add_within(count, self._most):
            raise RateLimitError("Too many requests are being sent at once.")

    def release(self, count: int) -> None:
        """Uncount bytes."""
        self._held.own -= count

    def keep(self, body: bytes, resources: AsyncExitStack) -> None:
        """Count what a complete body becomes, too, until `resources` are released.

        Raises:
            RateLimitError: as for `hold`.
        """
        count = grown(body)
        self.hold(count)
        resources.callback(self.release, count)

    async def read(self, body: bytes, work: Callable[[], T]) -> T:
        """Do `work`, which reads a body: at once, or if it is large, on a thread and one after the other.

        While it is read, a body takes up to 28 times its size, and up to two seconds for 4 MiB.
        """
        if len(body) <= _LARGE_BYTES:
            return work()
        async with self._reading:
            return await asyncio.to_thread(work)
