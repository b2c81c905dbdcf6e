"""Wakes an entry whose requests Triton may forget for half a second, by sending it one more.

ARCHITECTURE.md ("Requests that Triton forgets") says why. Gateways do the same (`gateway/triton/unheard.py`).
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

from triton_models.serving.starts import Starts, StartsLostError

AFTER_S: Final = 0.03
"""A first response takes a millisecond or two; this is what a gateway waits, too."""

LOSSES_BORNE: Final = 4
"""Number of nudges that may never be answered, each of which costs a thread of Triton's pool; after one more
there are none, and calls are as slow as Triton makes them."""


class Nudges:
    """Sends a nudge while a start takes longer than `AFTER_S`: one at a time, `AFTER_S` apart.

    Args:
        starts: the calls that are starting.
        nudge: sends a small request to their entry, and waits for the response.
    """

    def __init__(self, starts: Starts, nudge: Callable[[], None]) -> None:
        self._starts = starts
        self._nudge = nudge
        self._own = Starts(1, LOSSES_BORNE)
        self._begun = threading.Event()
        threading.Thread(target=self._run, name="nudges", daemon=True).start()

    def begin(self) -> None:
        """Take note that a call is about to start."""
        self._begun.set()

    def replace_lost(self, held_s: float) -> None:
        """Give up a nudge that was not answered for `held_s` seconds; see `LOSSES_BORNE`."""
        with contextlib.suppress(StartsLostError):
            self._own.replace_lost(held_s)

    def _run(self) -> None:
        while self._begun.wait():
            self._begun.clear()
            while (oldest := self._starts.oldest()) is not None:
                early_s = oldest + AFTER_S - time.monotonic()
                if early_s <= 0:
                    threading.Thread(target=self._send, name="nudge", daemon=True).start()
                time.sleep(early_s if early_s > 0 else AFTER_S)

    def _send(self) -> None:
        # No place: another one is on its way.
        with contextlib.suppress(TimeoutError), self._own.place(0):
            self._nudge()
