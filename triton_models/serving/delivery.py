"""The sender threads, which send everything that goes out on the requests' own streams."""

import logging
import queue
import threading
from collections.abc import Callable

from triton_models.engine.sequence import TokenOutput
from triton_models.serving.choice import Choice
from triton_models.serving.open_request import OpenRequest
from wire.refusal import RefusalCode

log = logging.getLogger(__name__)

SENDERS = 2
"""A send spends most of its time in Triton's shared memory, without the interpreter lock: two suffice."""


class Delivery:
    """Turns outputs into responses on threads of its own, joining what piled up during a slow send.

    Args:
        on_end: called for each choice whose last response was sent, or that ended its request.
    """

    def __init__(self, on_end: Callable[[OpenRequest, Choice], None]) -> None:
        self._on_end = on_end
        # A choice is put here once per output. The first thread that gets it sends all its outputs, and later
        # entries find nothing left to send, so nothing needs to track which choices are queued.
        self._queue: queue.SimpleQueue[tuple[OpenRequest, Choice] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"sender-{number}", daemon=True)
            for number in range(SENDERS)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Send what is queued, then join the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def post(self, request: OpenRequest, choice: Choice, output: TokenOutput) -> None:
        """Queue one output of a request without a delta channel; never waits."""
        choice.pending.append(output)
        self._queue.put((request, choice))

    def finish(self, request: OpenRequest, choice: Choice) -> None:
        """Queue the last response of a choice whose request has a delta channel; never waits."""
        self._queue.put((request, choice))

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            request, choice = entry
            with request.lock:
                ended = self._deliver(request, choice)
            if ended:
                self._on_end(request, choice)

    def _deliver(self, request: OpenRequest, choice: Choice) -> bool:
        try:
            return request.deliver(choice)
        except Exception:
            # Confined to one request: its failure must not fail the other streams on this thread.
            log.exception("could not deliver request %s", request.key)
            choice.fail()
            request.refuse(RefusalCode.INTERNAL, "the answer could not be delivered")
            return True
