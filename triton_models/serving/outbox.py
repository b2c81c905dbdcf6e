"""The way out on the requests' own calls: one thread sends everything there, in order.

Acceptance, refusals, heartbeats, ends, and answers to probes are posted to `Sender`, which also asks Triton,
in between, which clients have left. As it alone sends on these calls, their responses stay in order without a
lock. The deltas of streamed answers go another way, over delta channels (`serving/channel.py`): hundreds of
requests may end in one step, and the frames of the others must not wait for that.

An exception concerns one call: it is logged and ends that one, and the thread goes on. If a send is stuck in
Triton, the `Worker` grows old, and with it the heartbeat that whoever watches the model sees.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from heapq import heappop, heappush
from typing import Any, Final

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
from triton_models.serving.worker import Worker
from wire import names
from wire.channel import Frame, encode_frame
from wire.meta import Meta, encode_meta
from wire.refusal import RefusalCode, refusal_text

log = logging.getLogger(__name__)

POLL_PERIOD_S: Final = 0.2
"""Every open call is asked about once in this time, so that a client that left is noticed within a quarter of
a second. Asking takes Triton some 50 microseconds: for 2,048 calls, half of this time."""

_EARLY: Final = 0.8
"""The share of the heartbeat interval after which one is sent: 2,048 of them take Triton some 160 ms."""

_TURN_S: Final = 0.02
"""How long the sender waits for something to send before it looks at what else is due."""
_AT_ONCE: Final = 16
"""Most heartbeats in a row, and most calls that are asked about, so that nothing to send waits for all."""
_QUESTIONS_BETWEEN: Final = 2
"""Most calls that are asked about while there is something to send."""

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


Refusal = tuple[RefusalCode, str]
"""The code, and the message for the client."""

CANCELLED: Final[Refusal] = (RefusalCode.CANCELLED, "the request was cancelled")
LATE: Final[Refusal] = (RefusalCode.DEADLINE_EXCEEDED, "the request's time is over")
UNLOADED: Final[Refusal] = (RefusalCode.SHUTTING_DOWN, "the model is being unloaded")


def refusal(error: Exception) -> Refusal:
    """Return the code and the message for a client whose request failed with `error`."""
    for kind, code in _REFUSALS:
        if isinstance(error, kind):
            return code, str(error)
    log.error("a request failed", exc_info=error)
    return RefusalCode.INTERNAL, "the request failed"


class Responder:
    """Sends one request's responses. Used by one thread at a time, and not after a final response.

    It holds the response sender and not the request: that would keep the inputs in the memory shared with
    Triton for as long as the answer takes.

    Attributes:
        trace_context: of the request, in W3C's form as a JSON object with `traceparent`; None: it is not
            traced.
    """

    def __init__(self, sender: Any, pb_utils: Any, trace_context: str | None = None) -> None:
        self.trace_context = trace_context
        self._sender = sender
        self._pb_utils = pb_utils

    def send(self, content: str | bytes, meta: Meta, *, final: bool) -> None:
        """Send `response`, which is text or logits, and `meta`, each BYTES [1, 1]."""
        raw = content.encode() if isinstance(content, str) else content
        self._send(raw, encode_meta(meta), final=final)

    def send_frame(self, frame: Frame) -> None:
        """Send the frame as `meta`, with an empty `response`; only `refuse` ends a channel's request."""
        self._send(b"", encode_frame(frame), final=False)

    def send_tensors(self, tensors: Mapping[str, Any], *, final: bool) -> None:
        """Send arrays, by the names of the tensors."""
        outputs = [self._pb_utils.Tensor(name, values) for name, values in tensors.items()]
        self._respond(self._pb_utils.InferenceResponse(output_tensors=outputs), final=final)

    def refuse(self, code: RefusalCode, message: str) -> None:
        """Send an error with the status that fits `code`, as the final response. Never raises."""
        kind = self._pb_utils.TritonError
        try:
            error = kind(refusal_text(code, message), getattr(kind, _STATUSES.get(code, "UNAVAILABLE")))
            self._respond(self._pb_utils.InferenceResponse(error=error), final=True)
        except Exception:
            # The boundary to Triton: the caller serves other requests too, and must continue with them.
            log.exception("a refusal could not be sent")

    def cancelled(self) -> bool:
        """Ask Triton whether the client has left, which takes some 50 microseconds.

        May be called beside `send_frame`.
        """
        return bool(self._sender.is_cancelled())

    def _send(self, content: bytes, document: bytes, *, final: bool) -> None:
        values = {names.RESPONSE: content, names.META: document}
        tensors = {name: np.array([[value]], dtype=np.object_) for name, value in values.items()}
        self.send_tensors(tensors, final=final)

    def _respond(self, response: Any, *, final: bool) -> None:
        flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(response, flags=flags)


class Call:
    """A request's own call, on which only the sender's thread sends.

    Attributes:
        has_heartbeats: whether a heartbeat is sent when nothing else was.
        key: for the log; of a generation, its key in the service.
        deadline: when the request is given up, in monotonic seconds; None: never.
        cancelled: whether its client has left or cancelled it.
        closed: whether the final response was sent. Triton must not be asked about the call after that.
        last_sent: monotonic seconds.
    """

    has_heartbeats = False

    def __init__(self, key: str, responder: Responder, *, deadline_ms: int | None = None) -> None:
        self.key = key
        self.responder = responder
        self.cancelled = self.closed = False
        self.last_sent = time.monotonic()
        self.deadline = None if deadline_ms is None else self.last_sent + deadline_ms / 1000

    def given_up(self) -> Refusal | None:
        """Return the refusal if the request was cancelled or its deadline has passed, else None."""
        if self.cancelled:
            return CANCELLED
        return LATE if self.deadline is not None and time.monotonic() >= self.deadline else None

    def send(self, content: str | bytes, meta: Meta, *, final: bool = False) -> None:
        """Send a response, unless the call is closed."""
        if self.closed:
            return
        self.last_sent = time.monotonic()
        self.responder.send(content, meta, final=final)
        self.closed = final

    def refuse(self, code: RefusalCode, message: str) -> None:
        """End the call with an error, unless it is closed."""
        if not self.closed:
            self.closed = True
            self.responder.refuse(code, message)

    def gone(self) -> None:
        """Note that the client has left."""
        self.cancelled = True


_Posted = tuple[Call, Callable[[], object]]
"""What is to be done, and the call that it ends if it fails."""


class Sender:
    """Sends on the requests' own calls, and watches their clients.

    Args:
        heartbeat_s: longest silence on a call that has heartbeats.
    """

    def __init__(self, *, heartbeat_s: float) -> None:
        self.worker = Worker[_Posted]("sender", self._handle, idle=self._look, idle_s=_TURN_S)
        self._silence_s = _EARLY * heartbeat_s
        self._watched: deque[Call] = deque()
        """Asked about in turn, from left to right and round again."""
        self._beats: list[tuple[float, int, Call]] = []
        """When each call is next looked at for a heartbeat, as a heap; the number settles ties."""
        self._numbers = itertools.count()
        self._due = 0.0
        """How many questions are due."""
        self._counted_at = time.monotonic()

    def stop(self) -> None:
        """Do what was posted, refuse every call that is still watched, and join the thread."""
        self.worker.stop()
        for call in self._watched:
            self.do(call, partial(call.refuse, *UNLOADED))

    def post(self, call: Call, action: Callable[[], object]) -> None:
        """Have the thread call `action`, which may send on `call`. Never waits."""
        self.worker.put((call, action))

    def do(self, call: Call, action: Callable[[], object]) -> None:
        """Call `action`, on the thread itself; if it fails, end `call`."""
        end = partial(call.refuse, RefusalCode.INTERNAL, "the answer could not be sent")
        for attempt in (action, end):
            try:
                attempt()
            except Exception:
                # Confined to one call: its failure must not fail the others on this thread.
                log.exception("request %s: a response could not be sent", call.key)
            else:
                return

    def refuse(self, call: Call, code: RefusalCode, message: str) -> None:
        """Have the thread end `call` with an error."""
        self.post(call, partial(call.refuse, code, message))

    def watch(self, call: Call) -> None:
        """Notice from now on if the client of `call` leaves, and keep the call alive if it has heartbeats."""
        self.post(call, partial(self._watch, call))

    def _watch(self, call: Call) -> None:
        self._watched.append(call)
        if call.has_heartbeats:
            self._beat_later(call)

    def _handle(self, posted: _Posted) -> None:
        self.do(*posted)
        self._look()

    def _look(self) -> None:
        """Send the heartbeats and ask the questions that are due, but only a few of each in a row."""
        now = time.monotonic()
        for _ in range(_AT_ONCE):
            if not self._beats or self._beats[0][0] > now:
                break
            call = heappop(self._beats)[2]
            if call.last_sent + self._silence_s <= now:
                self.do(call, partial(call.send, "", Meta()))
            if not call.closed:
                self._beat_later(call)
        beats = bool(self._beats) and self._beats[0][0] <= now
        count = len(self._watched)
        self._due = min(self._due + (now - self._counted_at) * count / POLL_PERIOD_S, count)
        self._counted_at = now
        for _ in range(min(int(self._due), _QUESTIONS_BETWEEN if beats or self.worker.waiting else _AT_ONCE)):
            self._due -= 1
            call = self._watched.popleft()
            if not call.closed:
                self.do(call, partial(self._ask, call))
        self.worker.idle_s = 0 if beats or self._due >= 1 else _TURN_S

    def _beat_later(self, call: Call) -> None:
        heappush(self._beats, (call.last_sent + self._silence_s, next(self._numbers), call))

    def _ask(self, call: Call) -> None:
        try:
            gone = call.responder.cancelled()
        except Exception:
            # Confined to one call: a client that cannot be asked about is served no more.
            log.exception("request %s: whether its client left cannot be told", call.key)
            gone = True
        if gone:
            call.gone()  # it ends soon, and is not asked about any more
        else:
            self._watched.append(call)
