"""One generation between its arrival and its final response."""

import enum
import threading
import time
from collections import deque

from triton_models.engine.sequence import FinishReason, TokenOutput
from triton_models.serving.answer import Answer
from triton_models.serving.responder import Responder
from wire.meta import Accepted, Meta
from wire.refusal import RefusalCode
from wire.sampling import Generation

_REFUSALS: dict[FinishReason, tuple[RefusalCode, str]] = {
    FinishReason.CANCELLED: (RefusalCode.CANCELLED, "the request was cancelled"),
    FinishReason.DEADLINE: (RefusalCode.DEADLINE_EXCEEDED, "the request's time is over"),
    FinishReason.SHUTDOWN: (RefusalCode.SHUTTING_DOWN, "the model is being unloaded"),
    FinishReason.ERROR: (RefusalCode.INTERNAL, "the engine failed on this request"),
}


class Phase(enum.Enum):
    """PREPARING -> ACCEPTED -> CLOSED, or PREPARING -> CLOSED for a refusal."""

    PREPARING = enum.auto()
    ACCEPTED = enum.auto()
    CLOSED = enum.auto()


class OpenRequest:
    """Owns the responder: whoever sends holds `lock`, so they keep their order and none follows the last.

    `key` is the engine's name for the request, unique in this process; the client's `request_id` need not be.
    """

    def __init__(self, key: str, generation: Generation, responder: Responder) -> None:
        self.key = key
        self.generation = generation
        self.lock = threading.Lock()
        self.phase = Phase.PREPARING
        self.cancelled = False
        self.answer: Answer | None = None
        self.pending: deque[TokenOutput] = deque()
        self.received = time.monotonic()
        self._responder = responder
        self._last_sent = self.received
        self._sending_since: float | None = None

    def sending_s(self, now: float) -> float:
        """Return for how many seconds a response has been on its way to Triton, 0 if none is."""
        since = self._sending_since
        return 0.0 if since is None else now - since

    def accept(self, answer: Answer, accepted: Accepted) -> None:
        """Tell the client that the request is queued. The caller holds `lock`."""
        self.answer = answer
        self.phase = Phase.ACCEPTED
        self._send("", Meta(accepted=accepted), final=False)

    def refuse(self, code: RefusalCode, message: str) -> None:
        """End the request with an error. The caller holds `lock`."""
        if self.phase is Phase.CLOSED:
            return
        self.phase = Phase.CLOSED
        self._responder.refuse(code, message)

    def deliver(self) -> FinishReason | None:
        """Send what the engine produced since the last call, joined in one response. The caller holds `lock`.

        Returns:
            The reason the answer ended for, on the call that sent its last response; else None.
        """
        if self.phase is not Phase.ACCEPTED or self.answer is None:
            return None
        error = ""
        while self.pending:
            output = self.pending.popleft()
            self.answer.take(output)
            error = output.error or error
        if self.answer.finish is None:
            if self.generation.stream and self.answer.sendable:
                self._send(*self.answer.next_response(), final=False)
            return None
        self._end(self.answer, error)
        return self.answer.finish

    def keep_alive(self, interval_s: float) -> None:
        """Send a heartbeat if nothing was sent for `interval_s` seconds. The caller holds `lock`."""
        if self.phase is Phase.ACCEPTED and time.monotonic() - self._last_sent >= interval_s:
            self._send("", Meta(), final=False)

    def client_gone(self) -> bool:
        """Return True if the client cancelled or hung up. The caller holds `lock`."""
        return self.phase is not Phase.CLOSED and self._responder.cancelled()

    def _end(self, answer: Answer, error: str) -> None:
        if answer.complete:
            self._send(*answer.next_response(), final=True)
            self.phase = Phase.CLOSED
            return
        if self.generation.stream and answer.sendable:
            self._send(*answer.next_response(), final=False)
        code, message = _REFUSALS[answer.finish or FinishReason.ERROR]
        self.refuse(code, f"{message}: {error}" if error else message)

    def _send(self, text: str, meta: Meta, *, final: bool) -> None:
        self._last_sent = self._sending_since = time.monotonic()
        try:
            self._responder.send(text, meta, final=final)
        finally:
            self._sending_since = None
