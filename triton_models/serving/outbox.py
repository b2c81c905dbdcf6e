"""The way out on the requests' own calls: one thread sends everything there, in order.

Acceptance, refusals, heartbeats, ends, and answers to probes are posted to `Sender`, which also asks Triton,
in between, which clients have left. As it alone sends on these calls, their responses stay in order without a
lock. The deltas of streamed answers go another way, over delta channels (`serving/channel.py`): hundreds of
requests may end in one step, and the frames of the others must not wait for that.

An exception concerns one call: it is logged and ends that one, and the thread goes on. If the thread cannot
go on, or a send is stuck in Triton, its `Pulse` grows old, and with it the heartbeat that whoever watches the
model sees.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from triton_models.errors import (
    ChannelLostError,
    EngineStoppedError,
    InvalidGrammarError,
    LibraryPanicError,
    ModelError,
    PromptTooLongError,
    QueueFullError,
)
from wire import names
from wire.channel import Frame, encode_frame
from wire.meta import Meta, encode_meta
from wire.refusal import RefusalCode, refusal_text

log = logging.getLogger(__name__)

POLL_PERIOD_S: Final = 0.2
"""Every open call is asked about once in this time, so that a client that left is noticed within a quarter of
a second. Asking takes Triton some 50 microseconds: for 2,048 calls, half of this time."""

_TURN_S: Final = 0.02
"""How long the sender waits for something to send before it asks about the next calls."""
_POLLS: Final = 16
"""Most calls that are asked about in a row, so that nothing to send waits for a whole round."""
_POLLS_BETWEEN_SENDS: Final = 2
"""The same while there is something to send."""

_REFUSALS: Final[tuple[tuple[type[Exception], RefusalCode], ...]] = (
    (PromptTooLongError, RefusalCode.CONTEXT_LENGTH_EXCEEDED),
    (QueueFullError, RefusalCode.QUEUE_FULL),
    (EngineStoppedError, RefusalCode.SHUTTING_DOWN),
    (InvalidGrammarError, RefusalCode.INVALID_GRAMMAR),
    (LibraryPanicError, RefusalCode.INTERNAL),
    (ChannelLostError, RefusalCode.CHANNEL_LOST),
    (ModelError, RefusalCode.INVALID_REQUEST),
    (msgspec.MsgspecError, RefusalCode.INVALID_REQUEST),
    (UnicodeDecodeError, RefusalCode.INVALID_REQUEST),
)
"""The first matching class decides; anything else is an internal error."""

_STATUSES: Final = {
    RefusalCode.INVALID_REQUEST: "INVALID_ARG",
    RefusalCode.INVALID_GRAMMAR: "INVALID_ARG",
    RefusalCode.CONTEXT_LENGTH_EXCEEDED: "INVALID_ARG",
    RefusalCode.CANCELLED: "CANCELLED",
    RefusalCode.INTERNAL: "INTERNAL",
}
"""Triton's status for each code; of the others, UNAVAILABLE."""


def refusal(error: Exception) -> tuple[RefusalCode, str]:
    """Return the code and the message for a client whose request failed with `error`."""
    for kind, code in _REFUSALS:
        if isinstance(error, kind):
            return code, str(error)
    log.error("a request failed", exc_info=error)
    return RefusalCode.INTERNAL, "the request failed"


class Responder(Protocol):
    """Sends one request's responses. Used by one thread at a time, and not after a final response."""

    trace_context: str | None
    """W3C trace context of the request, as a JSON object with `traceparent`; None: it is not traced."""

    def send(self, text: str, meta: Meta, *, final: bool) -> None:
        """Send one response."""

    def send_frame(self, frame: Frame) -> None:
        """Send one response of a delta channel, whose request only `refuse` ends."""

    def refuse(self, code: RefusalCode, message: str) -> None:
        """End the request with an error. Never raises: there is nobody left to tell."""

    def cancelled(self) -> bool:
        """Return True once the client cancelled or went away. May be called beside `send_frame`."""


class TritonResponder:
    """The responder for a request of Triton's Python backend.

    It holds the response sender and not the request: that would keep the inputs in the memory shared with
    Triton for as long as the answer takes.
    """

    def __init__(self, sender: Any, pb_utils: Any, trace_context: str | None = None) -> None:
        self.trace_context = trace_context
        self._sender = sender
        self._pb_utils = pb_utils

    def send(self, text: str, meta: Meta, *, final: bool) -> None:
        """Send `response` and `meta`, each BYTES [1, 1]."""
        self._send(text.encode(), encode_meta(meta), final=final)

    def send_frame(self, frame: Frame) -> None:
        """Send the frame as `meta`, with an empty `response`."""
        self._send(b"", encode_frame(frame), final=False)

    def refuse(self, code: RefusalCode, message: str) -> None:
        """Send an error with the status that fits `code`, as the final response."""
        try:
            kind = self._pb_utils.TritonError
            error = kind(refusal_text(code, message), getattr(kind, _STATUSES.get(code, "UNAVAILABLE")))
            self._respond(self._pb_utils.InferenceResponse(error=error), final=True)
        except Exception:
            # The boundary to Triton: the caller serves other requests too, and must continue with them.
            log.exception("a refusal could not be sent")

    def cancelled(self) -> bool:
        """Ask Triton, which takes some 50 microseconds."""
        return bool(self._sender.is_cancelled())

    def _send(self, text: bytes, document: bytes, *, final: bool) -> None:
        tensors = [self._tensor(names.RESPONSE, text), self._tensor(names.META, document)]
        self._respond(self._pb_utils.InferenceResponse(output_tensors=tensors), final=final)

    def _tensor(self, name: str, value: bytes) -> Any:
        return self._pb_utils.Tensor(name, np.array([[value]], dtype=np.object_))

    def _respond(self, response: Any, *, final: bool) -> None:
        flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(response, flags=flags)


class Call:
    """A request's own call, on which only the sender's thread sends.

    Attributes:
        key: for the log; of a generation, its key in the service.
        closed: whether the final response was sent. Triton must not be asked about the call after that.
        last_sent: monotonic seconds.
    """

    def __init__(self, key: str, responder: Responder) -> None:
        self.key = key
        self.responder = responder
        self.closed = False
        self.last_sent = time.monotonic()

    def send(self, text: str, meta: Meta, *, final: bool = False) -> None:
        """Send a response, unless the call is closed."""
        if self.closed:
            return
        self.last_sent = time.monotonic()
        self.responder.send(text, meta, final=final)
        self.closed = final

    def refuse(self, code: RefusalCode, message: str) -> None:
        """End the call with an error, unless it is closed."""
        if not self.closed:
            self.closed = True
            self.responder.refuse(code, message)

    def keep_alive(self, now: float, silence_s: float) -> None:
        """Send a heartbeat if the call needs one and nothing was sent for `silence_s` seconds."""

    def gone(self) -> None:
        """Note that the client has left."""


class Pulse:
    """For how long a thread has been at one piece of work; one that waits for work is fresh."""

    def __init__(self) -> None:
        self._since: float | None = None

    def work(self) -> None:
        """Note that a piece of work begins."""
        self._since = time.monotonic()

    def rest(self) -> None:
        """Note that it is done."""
        self._since = None

    def age(self, now: float) -> float:
        """Return the seconds since the current piece of work began; 0 if there is none."""
        since = self._since
        return 0.0 if since is None else max(0.0, now - since)


class Sender:
    """Sends on the requests' own calls, and watches their clients.

    Args:
        heartbeat_s: longest silence on a call that needs heartbeats.
        orphaned: whether tritonserver is gone. Then Triton is asked nothing more: the call would never return
            and hold the interpreter lock.
    """

    def __init__(self, *, heartbeat_s: float, orphaned: Callable[[], bool] = lambda: False) -> None:
        self.pulse = Pulse()
        self._orphaned = orphaned
        # The next look may come late by that much, but the client must get its heartbeat in time.
        self._silence_s = max(heartbeat_s / 2, heartbeat_s - POLL_PERIOD_S - 0.05)
        self._queue: queue.SimpleQueue[tuple[Call, Callable[[], object]] | None] = queue.SimpleQueue()
        self._watched: deque[Call] = deque()
        """Looked at in turn, from left to right and round again."""
        self._due = 0.0
        """How many looks are due."""
        self._counted_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Do what was posted, refuse every call that is still watched, and join the thread."""
        self._queue.put(None)
        self._thread.join()

    def post(self, call: Call, action: Callable[[], object]) -> None:
        """Have the thread call `action`, which may send on `call`. Never waits."""
        self._queue.put((call, action))

    def refuse(self, call: Call, code: RefusalCode, message: str) -> None:
        """Have the thread end `call` with an error."""
        self.post(call, partial(call.refuse, code, message))

    def watch(self, call: Call) -> None:
        """Notice from now on if the client of `call` leaves, and keep the call alive."""
        self._watched.append(call)

    def _run(self) -> None:
        try:
            while (posted := self._next()) is not None:
                self.pulse.work()
                for call, action in posted:
                    self._do(call, action)
                self._look()
                self.pulse.rest()
            for call in self._watched:
                self._do(call, partial(call.refuse, RefusalCode.SHUTTING_DOWN, "the model is being unloaded"))
        finally:
            self.pulse.work()  # for good: a thread that has ended must not look healthy

    def _next(self) -> "Sequence[tuple[Call, Callable[[], object]]] | None":
        """Wait for something to do, but no longer than until the next look is due; None at the end."""
        try:
            posted = self._queue.get(timeout=0 if self._due >= 1 else _TURN_S)
        except queue.Empty:
            return ()
        return None if posted is None else (posted,)

    def _do(self, call: Call, action: Callable[[], object]) -> None:
        """Call `action`; if it fails, end `call`."""
        end = partial(call.refuse, RefusalCode.INTERNAL, "the answer could not be sent")
        for attempt in (action, end):
            try:
                attempt()
            except Exception:
                # Confined to one call: its failure must not fail the others on this thread.
                log.exception("request %s: a response could not be sent", call.key)
            else:
                return

    def _look(self) -> None:
        """Look at as many calls as are due, but only a few of them in a row."""
        now, count = time.monotonic(), len(self._watched)
        self._due = min(self._due + (now - self._counted_at) * count / POLL_PERIOD_S, count)
        self._counted_at = now
        if self._orphaned():
            return
        for _ in range(min(int(self._due), _POLLS if self._queue.empty() else _POLLS_BETWEEN_SENDS)):
            self._due -= 1
            call = self._watched.popleft()
            if not call.closed:
                self._do(call, partial(self._check, call, now))

    def _check(self, call: Call, now: float) -> None:
        try:
            gone = call.responder.cancelled()
        except Exception:
            # Confined to one call: a client that cannot be asked about is served no more.
            log.exception("request %s: whether its client left cannot be told", call.key)
            gone = True
        if gone:
            call.gone()  # it ends soon, and is not asked about any more
            return
        self._watched.append(call)
        call.keep_alive(now, self._silence_s)
