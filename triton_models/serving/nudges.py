"""Wakes an entry whose requests Triton may forget for half a second, by sending it one more.

ARCHITECTURE.md ("Requests that Triton forgets") says why. Gateways do the same (`gateway/triton/unheard.py`).
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from triton_models.serving.starts import Starts, StartsLostError

log = logging.getLogger(__name__)

AFTER_S: Final = 0.03
"""A first response takes a millisecond or two; this is what a gateway waits, too."""

AT_ONCE: Final = 2
"""A nudge can be forgotten, too."""

LOSSES_BORNE: Final = 6
"""Number of nudges that may be lost (see `starts`); with more there are none, and calls are as slow as Triton
makes them."""


class Nudges:
    """Sends nudges while a start takes longer than `AFTER_S`, until one of them was answered.

    The answer to a nudge shows that there was an execution, which took every start before it.

    Args:
        starts: the calls that are starting.
        nudge: sends a small request to their entry, and waits for the response. Must not raise.
    """

    def __init__(self, starts: Starts, nudge: Callable[[], None]) -> None:
        self._starts = starts
        self._nudge = nudge
        self._own = Starts(AT_ONCE, LOSSES_BORNE)
        self._begun = threading.Event()
        self._taken = 0.0
        """Starts before this, in monotonic seconds, need no nudge any more."""
        threading.Thread(target=self._run, name="nudges", daemon=True).start()

    def begin(self) -> None:
        """Take note that a call has begun to start."""
        self._begun.set()

    def replace_lost(self, held_s: float) -> None:
        """Give up nudges that were not answered for `held_s` seconds; see `LOSSES_BORNE`."""
        with contextlib.suppress(StartsLostError):
            self._own.replace_lost(held_s)

    def _run(self) -> None:
        while self._begun.wait():
            self._begun.clear()
            while (oldest := self._starts.oldest(self._taken)) is not None:
                early_s = oldest + AFTER_S - time.monotonic()
                if early_s <= 0:
                    self._begin_nudge()
                time.sleep(early_s if early_s > 0 else AFTER_S)

    def _begin_nudge(self) -> None:
        try:
            # It may wait for ever.
            threading.Thread(target=self._send, name="nudge", daemon=True).start()
        except RuntimeError:
            log.exception("no thread for a nudge")  # this one must go on

    def _send(self) -> None:
        # No place: enough others are on their way.
        with contextlib.suppress(TimeoutError), self._own.place(0):
            sent = time.monotonic()
            self._nudge()
            self._taken = max(self._taken, sent)
