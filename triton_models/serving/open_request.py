"""One generation between its arrival and its final response."""

import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence

from triton_models.engine.sequence import FinishReason
from triton_models.serving.channel import DeltaChannel
from triton_models.serving.choice import Choice
from triton_models.serving.responder import Responder
from wire.meta import Accepted, Delivered, Meta, Usage, encode_meta
from wire.refusal import RefusalCode
from wire.sampling import Generation

log = logging.getLogger(__name__)

_REFUSALS: dict[FinishReason, tuple[RefusalCode, str]] = {
    FinishReason.CANCELLED: (RefusalCode.CANCELLED, "the request was cancelled"),
    FinishReason.DEADLINE: (RefusalCode.DEADLINE_EXCEEDED, "the request's time is over"),
    FinishReason.SHUTDOWN: (RefusalCode.SHUTTING_DOWN, "the model is being unloaded"),
    FinishReason.ERROR: (RefusalCode.INTERNAL, "the engine failed on this request"),
    FinishReason.MASK: (
        RefusalCode.INVALID_GRAMMAR,
        "the answer could not be held to its grammar to its end",
    ),
}


class Phase(enum.Enum):
    """PREPARING -> ACCEPTED -> CLOSED, or PREPARING -> CLOSED for a refusal."""

    PREPARING = enum.auto()
    ACCEPTED = enum.auto()
    CLOSED = enum.auto()


class OpenRequest:
    """Owns the responder. Whoever sends holds `lock`, so responses stay in order and none follows the last.

    `key` is unique in this process; the client's `request_id` need not be.

    Deltas are sent in one of two ways. Without a channel, outputs wait in a choice's `pending` until a sender
    thread joins them in `deliver`. With one, only the step-delivery thread lets the choice take them and
    calls `fill_frame`; a sender thread sends the last response, also in `deliver`.

    The first choice that ends with an error ends the request with that error.

    `received` and `queued` are in monotonic seconds; `queued` is None until the request is in the engine.
    `on_end` is called at the end, with the code of the refusal if there was one.
    """

    def __init__(
        self, key: str, generation: Generation, responder: Responder, on_end: "OnEnd | None" = None
    ) -> None:
        self.key = key
        self.generation = generation
        self.lock = threading.Lock()
        self.phase = Phase.PREPARING
        self.cancelled = False
        self.choices: Sequence[Choice] = ()
        """Empty until the prompt was tokenised and the choices made."""
        self.channel: DeltaChannel | None = None
        self.received = time.monotonic()
        self.queued: float | None = None
        self.prompt_tokens = 0
        self._responder = responder
        self._streams = range(0)
        self._on_end = on_end
        self._last_sent = self.received
        self._sending_since: float | None = None

    @property
    def deadline(self) -> float | None:
        """When the request is given up, in monotonic seconds; None: never."""
        limit_ms = self.generation.deadline_ms
        return None if limit_ms is None else self.received + limit_ms / 1000

    def given_up(self) -> tuple[RefusalCode, str] | None:
        """Return the refusal if the request was cancelled or its deadline has passed, else None."""
        if self.cancelled:
            return _REFUSALS[FinishReason.CANCELLED]
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return _REFUSALS[FinishReason.DEADLINE]
        return None

    def sending_s(self, now: float) -> float:
        """Return for how many seconds a response has been on its way to Triton; 0 if none is."""
        since = self._sending_since
        return 0.0 if since is None else now - since

    def attach(self, channel: DeltaChannel, streams: range) -> None:
        """Send the deltas over `channel`, those of each choice under one of the numbers `streams`.

        Raises:
            ChannelLostError: the channel is not open any more.
            InvalidRequestError: another open request has one of those numbers.
        """
        channel.attach(streams, self.key)
        self.channel, self._streams = channel, streams

    def detach(self) -> None:
        """Free the numbers on the channel, if there is one, after the request's last delta."""
        if self.channel is not None:
            self.channel.detach(self._streams, self.key)

    def expect(self, choices: Sequence[Choice], prompt_tokens: int) -> None:
        """Set the choices that will be queued in the engine, and the length of their prompt."""
        self.choices, self.prompt_tokens = choices, prompt_tokens

    def accept(self, accepted: Accepted) -> None:
        """Tell the client that the request is queued. The caller holds `lock`."""
        self.phase = Phase.ACCEPTED
        self._send("", Meta(accepted=accepted), final=False)

    def refuse(self, code: RefusalCode, message: str) -> None:
        """End the request with an error. The caller holds `lock`."""
        if self.phase is Phase.CLOSED:
            return
        self._responder.refuse(code, message)
        self._close(code)

    def deliver(self, choice: Choice) -> bool:
        """Send what a choice has gained since the last call. The caller holds `lock`.

        Returns:
            True on the call that sent the choice's last response, or ended the request.
        """
        if self.phase is not Phase.ACCEPTED or choice.closed:
            return False
        answer, streams = choice.answer, self.generation.stream
        choice.take_pending()
        for part in answer.prompt_parts():
            self._send(*part, final=False)
        if not choice.ended:
            if (streams and answer.sendable) or answer.tells_prompt:
                self._send(*answer.next_response(), final=False)
            return False
        choice.closed_at = time.monotonic()
        self._end(choice)
        return True

    def fill_frame(self, choice: Choice, now: float) -> DeltaChannel | None:
        """Put a choice's text since the last call into the channel's next frame, and return the channel.

        Returns None if there is nothing to send now, or nobody to send it to.

        Args:
            choice: one that has gained something.
            now: monotonic seconds; counts as the time of the last response to this request.
        """
        answer, channel = choice.answer, self.channel
        if channel is None or channel.lost or answer.complete or not answer.sendable:
            return None  # a complete answer's remaining text goes with its last response
        if self.phase is Phase.CLOSED:
            return None  # ended by another choice
        text, tokens, meta = answer.next_delta()
        number = self._streams.start + choice.index
        channel.add(number, text, tokens, None if meta is None else encode_meta(meta))
        choice.deltas += 1
        self._last_sent = now
        return channel

    def keep_alive(self, interval_s: float) -> None:
        """Send a heartbeat if nothing was sent for `interval_s` seconds. The caller holds `lock`."""
        if self.generation.quiet:
            return
        if self.phase is Phase.ACCEPTED and time.monotonic() - self._last_sent >= interval_s:
            self._send("", Meta(), final=False)

    def client_gone(self) -> bool:
        """Return True if the client cancelled or hung up. The caller holds `lock`."""
        return self.phase is not Phase.CLOSED and self._responder.cancelled()

    def _close(self, code: RefusalCode | None) -> None:
        self.phase = Phase.CLOSED
        if self._on_end is None:
            return
        try:
            self._on_end(self, code)
        except Exception:
            log.exception("the end of request %s could not be noted", self.key)

    def _end(self, choice: Choice) -> None:
        answer = choice.answer
        if self.channel is not None and self.channel.lost:
            self.refuse(RefusalCode.CHANNEL_LOST, "the delta channel was lost under the request")
            return
        if answer.complete:
            last = all(each.closed for each in self.choices)
            usage = self._usage() if last else None
            self._send(*answer.next_response(usage, self._delivered(choice)), final=last)
            if last:
                self._close(None)
            return
        if self.channel is None and self.generation.stream and answer.sendable:
            self._send(*answer.next_response(), final=False)
        code, message = _REFUSALS[answer.finish or FinishReason.ERROR]
        self.refuse(code, f"{message}: {answer.error}" if answer.error else message)

    def _usage(self) -> Usage:
        answers = [choice.answer for choice in self.choices]
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=sum(answer.completion_tokens for answer in answers),
            # The least: the other choices also found in the cache what the first one computed.
            cached_tokens=min(answer.cached_tokens for answer in answers),
        )

    def _delivered(self, choice: Choice) -> Delivered | None:
        if self.channel is None:
            return None
        return Delivered(deltas=choice.deltas, frame=self.channel.last_frame)

    def _send(self, text: str, meta: Meta, *, final: bool) -> None:
        self._last_sent = self._sending_since = time.monotonic()
        try:
            self._responder.send(text, meta, final=final)
        finally:
            self._sending_since = None


OnEnd = Callable[[OpenRequest, RefusalCode | None], None]
"""Called at a request's end with the code of its refusal; None if it was answered."""
