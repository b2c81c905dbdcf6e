"""From the engine's steps to the streams: one thread handles each step's outputs together.

The engine's thread hands over a list and continues. Both threads compete for the interpreter lock, so little
is done here per token: outputs of requests without a delta channel go to the sender threads, and those of
requests with one become a row in the channel's next frame.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from triton_models.engine.sequence import TokenOutput
from triton_models.serving.channel import DeltaChannel
from triton_models.serving.choice import Choice
from triton_models.serving.delivery import Delivery
from triton_models.serving.open_request import OpenRequest

log = logging.getLogger(__name__)


class StepDelivery:
    """Sends the frames of delta channels, and passes all other outputs to `Delivery`.

    Args:
        find: returns the open request and the choice that have this key in the engine; None if it has ended.
        delivery: sends on requests' own streams; started and stopped here.
        on_first_token: called for each choice's first token, with seconds in the queue and since arrival.
        on_lost: called with a channel on which a frame could not be sent.
    """

    def __init__(
        self,
        find: Callable[[str], tuple[OpenRequest, Choice] | None],
        delivery: Delivery,
        *,
        on_first_token: Callable[[float, float], None],
        on_lost: Callable[[DeltaChannel], None],
    ) -> None:
        self._find = find
        self._delivery = delivery
        self._on_first_token = on_first_token
        self._on_lost = on_lost
        self._queue: queue.SimpleQueue[Sequence[TokenOutput] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="step-delivery", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        self._delivery.start()
        self._thread.start()

    def stop(self) -> None:
        """Send what is queued, then join the threads."""
        self._queue.put(None)
        self._thread.join()
        self._delivery.stop()

    def post(self, outputs: Sequence[TokenOutput]) -> None:
        """Queue a step's outputs; called by the engine's thread, never waits."""
        self._queue.put(outputs)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            steps = [self._queue.get()]
            # Steps that piled up during a slow send are joined.
            while not self._queue.empty():
                steps.append(self._queue.get())
            stopping = steps[-1] is None
            rows: dict[Choice, OpenRequest] = {}
            for outputs in steps:
                for output in outputs or ():
                    self._take(output, rows)
            self._send(rows)

    def _take(self, output: TokenOutput, rows: dict[Choice, OpenRequest]) -> None:
        found = self._find(output.request_id)
        if found is None:
            return  # its answer ended at a stop string while this step ran
        request, choice = found
        if output.time_to_first_token is not None:
            choice.first_token = output.queue_seconds or 0.0, output.time_to_first_token
            self._on_first_token(*choice.first_token)
        if request.channel is None:
            self._delivery.post(request, choice, output)
            return
        try:
            if choice.take(output):
                rows[choice] = request
        except Exception:
            # Confined to one request: its failure must not fail the others on this thread.
            log.exception("could not deliver request %s", request.key)
            choice.fail()
            rows[choice] = request

    def _send(self, rows: dict[Choice, OpenRequest]) -> None:
        """Send one frame to each channel, then have the last responses of choices that ended sent."""
        now = time.monotonic()
        filled = {request.fill_frame(choice, now) for choice, request in rows.items()}
        for channel in filled:
            if channel is not None:
                self._flush(channel)
        for choice, request in rows.items():
            if choice.ended:
                self._delivery.finish(request, choice)

    def _flush(self, channel: DeltaChannel) -> None:
        try:
            channel.flush()
        except Exception:
            # Confined to one channel: the others' frames must still be sent.
            log.exception("could not send a frame of channel %s", channel.key)
            self._on_lost(channel)
