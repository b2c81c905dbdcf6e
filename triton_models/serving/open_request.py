"""One generation between its arrival and its final response."""

import enum
import threading
import time
from collections import deque

from triton_models.engine.sequence import FinishReason, TokenOutput
from triton_models.serving.answer import Answer
from triton_models.serving.channel import DeltaChannel
from triton_models.serving.responder import Responder
from wire.meta import Accepted, Delivered, Meta, encode_meta
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

    Its deltas come from one of two sources. Without a channel, outputs wait in `pending` until a sender
    thread joins them in `deliver`. With one, the thread of the steps alone calls `take` and `fill_frame`, and
    a sender thread sends the end, in `deliver` too.
    """

    def __init__(self, key: str, generation: Generation, responder: Responder) -> None:
        self.key = key
        self.generation = generation
        self.lock = threading.Lock()
        self.phase = Phase.PREPARING
        self.cancelled = False
        self.answer: Answer | None = None
        self.channel: DeltaChannel | None = None
        self.pending: deque[TokenOutput] = deque()
        self.received = time.monotonic()
        self._responder = responder
        self._stream = 0
        self._deltas = 0
        self._last_sent = self.received
        self._sending_since: float | None = None

    @property
    def ended(self) -> bool:
        """Whether the answer is over, and only its last response is missing."""
        return self.answer is not None and self.answer.finish is not None

    def sending_s(self, now: float) -> float:
        """Return for how many seconds a response has been on its way to Triton, 0 if none is."""
        since = self._sending_since
        return 0.0 if since is None else now - since

    def attach(self, channel: DeltaChannel, stream: int) -> None:
        """Send the deltas to `channel`, as `stream`.

        Raises:
            ChannelLostError: the channel is not open any more.
            InvalidRequestError: another open request has that number.
        """
        channel.attach(stream, self.key)
        self.channel, self._stream = channel, stream

    def detach(self) -> None:
        """Free the number on the channel, where there is one; nothing more comes of the request."""
        if self.channel is not None:
            self.channel.detach(self._stream, self.key)

    def accept(self, accepted: Accepted) -> None:
        """Tell the client that the request is queued. The caller holds `lock`."""
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
        while self.pending:
            self.answer.take(self.pending.popleft())
        if self.answer.finish is None:
            if self.generation.stream and self.answer.sendable:
                self._send(*self.answer.next_response(), final=False)
            return None
        self._end(self.answer)
        return self.answer.finish

    def take(self, output: TokenOutput) -> bool:
        """Take an output of a request with a channel; True if there is something to send, or to end."""
        answer = self.answer
        if answer is None:
            return False
        answer.take(output)
        return answer.sendable or answer.finish is not None

    def fill_frame(self, now: float) -> DeltaChannel | None:
        """Put the text since the last call into the next frame of the channel, which is returned.

        None: there is nothing to show, or nobody to show it to.

        Args:
            now: monotonic seconds; until when the client has heard of this request.
        """
        answer, channel = self.answer, self.channel
        if answer is None or channel is None or channel.lost or answer.complete or not answer.sendable:
            return None  # What is left of a complete answer goes with its last response.
        text, tokens, meta = answer.next_delta()
        channel.add(self._stream, text, tokens, None if meta is None else encode_meta(meta))
        self._deltas += 1
        self._last_sent = now
        return channel

    def fail(self) -> None:
        """Give the answer up: `deliver` then ends the request with an error."""
        if self.answer is not None:
            self.answer.finish = FinishReason.ERROR

    def keep_alive(self, interval_s: float) -> None:
        """Send a heartbeat if nothing was sent for `interval_s` seconds. The caller holds `lock`."""
        if self.phase is Phase.ACCEPTED and time.monotonic() - self._last_sent >= interval_s:
            self._send("", Meta(), final=False)

    def client_gone(self) -> bool:
        """Return True if the client cancelled or hung up. The caller holds `lock`."""
        return self.phase is not Phase.CLOSED and self._responder.cancelled()

    def _end(self, answer: Answer) -> None:
        if self.channel is not None and self.channel.lost:
            self.refuse(RefusalCode.CHANNEL_LOST, "the delta channel was lost under the request")
            return
        if answer.complete:
            self._send(*answer.next_response(self._delivered()), final=True)
            self.phase = Phase.CLOSED
            return
        if self.channel is None and self.generation.stream and answer.sendable:
            self._send(*answer.next_response(), final=False)
        code, message = _REFUSALS[answer.finish or FinishReason.ERROR]
        self.refuse(code, f"{message}: {answer.error}" if answer.error else message)

    def _delivered(self) -> Delivered | None:
        if self.channel is None:
            return None
        return Delivered(deltas=self._deltas, frame=self.channel.last_frame)

    def _send(self, text: str, meta: Meta, *, final: bool) -> None:
        self._last_sent = self._sending_since = time.monotonic()
        try:
            self._responder.send(text, meta, final=final)
        finally:
            self._sending_since = None
