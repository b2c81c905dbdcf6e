"""Delta channels: the deltas of many streamed answers in one response per engine step.

A Triton response costs the same whether it holds one delta or hundreds, here and in the gateway. The frames
are defined in `wire.channel`. One thread, `Delivery`, turns each step's outputs into text and sends the
frames; the ends of answers it leaves to the `Sender`, for the requests' own calls. A channel's own end is
sent there, too, once `Delivery` has sent its last frame.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from triton_models.engine.sequence import TokenOutput
from triton_models.errors import ChannelLostError, InvalidRequestError, QueueFullError
from triton_models.serving.outbox import UNLOADED, Call, Responder, Sender
from triton_models.serving.request import Choice, OpenRequest, logits_parts
from triton_models.serving.worker import Worker
from wire.channel import Frame
from wire.meta import encode_meta
from wire.refusal import RefusalCode

log = logging.getLogger(__name__)

OPEN_LIMIT: Final = 256
"""Most channels open at once. A gateway process has one; each is asked about like a request."""

_KEEP_ALIVE_S: Final = 0.1
"""How often the channels are looked at for one that needs a heartbeat."""

_COUNT_PERIOD_S: Final = 1.0
"""How often the client of an answer that is not streamed is told of its tokens, from the first one on: who
leaves before the end is to know how many there are, and everybody when they came."""


class DeltaChannel(Call):
    """One client's open channel. Only `Delivery` sends frames; the intake and the sender call the rest.

    Attributes:
        lost: true once no more frames are sent; its requests end with an error, each on its own call.
    """

    def __init__(
        self, channel_id: str, responder: Responder, on_gone: Callable[["DeltaChannel"], object]
    ) -> None:
        super().__init__(channel_id, responder)
        self.lost = False
        self._on_gone = on_gone
        self._streams: dict[int, str] = {}
        self._next = Frame(frame=0)
        """The frame that is sent next, as far as it is filled."""

    @property
    def last_frame(self) -> int:
        """The number of the newest frame sent."""
        return self._next.frame - 1

    def attach(self, streams: range, key: str) -> None:
        """Reserve the numbers `streams` for the choices of the open request `key`; on the preparing thread.

        Raises:
            ChannelLostError: the channel is not open any more.
            InvalidRequestError: another open request has one of those numbers.
        """
        for stream in streams:
            if stream in self._streams:
                raise InvalidRequestError(f"stream {stream} of the channel is another open request's")
        self._streams |= dict.fromkeys(streams, key)
        # Looked at last: whoever loses the channel sets `lost` first, and then cancels the requests.
        if self.lost:
            self.detach(streams, key)
            raise _not_open(self.key)

    def detach(self, streams: range, key: str) -> None:
        """Free the numbers that request `key` has reserved."""
        for stream in streams:
            if self._streams.get(stream) == key:
                del self._streams[stream]

    def gone(self) -> None:
        """Note that the client has left."""
        self._on_gone(self)

    def add(self, stream: int, text: str, tokens: int, meta: bytes | None, ids: Sequence[int] = ()) -> None:
        """Put a delta into the next frame, which holds at most one delta of each stream."""
        frame = self._next
        if meta is not None:
            frame.metas[len(frame.streams)] = msgspec.Raw(meta)
        frame.streams.append(stream)
        frame.tokens.append(tokens)
        frame.texts.append(text)
        frame.ids.append(list(ids))

    def flush(self) -> None:
        """Send everything added as one frame, also if that is nothing; if the channel is lost, drop it."""
        frame = self._next
        self._next = Frame(frame=frame.frame if self.lost else frame.frame + 1)
        if self.lost:
            return
        if not any(frame.ids):
            frame.ids.clear()
        self.last_sent = time.monotonic()
        self.responder.send_frame(frame)


_Posted = Sequence[TokenOutput] | Callable[[], None]
"""A step's outputs, or a channel's opening or end, which comes behind the steps before it."""


class Delivery:
    """Takes each engine step's outputs, and sends the frames of delta channels on a thread of its own.

    The engine's thread puts a list into `worker` and continues. Both compete for the interpreter lock,
    so little is done here per token.

    Args:
        find: returns the open request and the choice that have this key in the engine; None if it has ended.
        sender: sends the ends of answers and channels.
        on_first_token: called for each choice's first token, with seconds in the queue and since arrival.
        on_lost: called with a channel that was lost, to cancel its requests.
        heartbeat_s: longest silence on a channel.
    """

    def __init__(
        self,
        find: Callable[[str], tuple[OpenRequest, Choice] | None],
        sender: Sender,
        *,
        on_first_token: Callable[[float, float], None],
        on_lost: Callable[[DeltaChannel], object],
        heartbeat_s: float,
    ) -> None:
        self.worker = Worker[_Posted]("delivery", self._handle, idle=self._keep_alive, idle_s=_KEEP_ALIVE_S)
        self._channels: dict[str, DeltaChannel] = {}
        """The open ones, by id: added on the intake's thread, found on the preparing one, removed on ours."""
        self._find = find
        self._sender = sender
        self._on_first_token = on_first_token
        self._on_lost = on_lost
        self._silence_s = max(heartbeat_s / 2, heartbeat_s - 2 * _KEEP_ALIVE_S)
        self._kept_alive_at = 0.0

    def stop(self) -> None:
        """Send what is queued, close every channel, and join the thread."""
        self.worker.put(self._close_all)
        self.worker.stop()

    def open(self, channel: DeltaChannel) -> None:
        """Open a channel: have its first frame sent.

        Raises:
            InvalidRequestError: a channel with this id is open already.
            QueueFullError: `OPEN_LIMIT` channels are open.
        """
        if len(self._channels) >= OPEN_LIMIT:
            raise QueueFullError(f"{len(self._channels)} delta channels are open already")
        if self._channels.setdefault(channel.key, channel) is not channel:
            raise InvalidRequestError("a channel of this id is open already")
        self.worker.put(partial(self._flush, channel))

    def find(self, channel_id: str) -> DeltaChannel:
        """Return an open channel.

        Raises:
            ChannelLostError: none with this id is open.
        """
        channel = self._channels.get(channel_id)
        if channel is None:
            raise _not_open(channel_id)
        return channel

    def close(self, channel: DeltaChannel) -> None:
        """Have `channel` closed, whose client has left."""
        self.worker.put(partial(self._lose, channel, RefusalCode.CANCELLED, "the channel was closed"))

    def _handle(self, posted: _Posted) -> None:
        gained: dict[Choice, OpenRequest] = {}
        # Steps that piled up during a slow send are joined.
        for each in (posted, *self.worker.take_rest()):
            if callable(each):
                self._send(gained)
                gained = {}
                self._do(each)
            else:
                for output in each:
                    self._take(output, gained)
        self._send(gained)
        self._keep_alive()

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if now - self._kept_alive_at >= _KEEP_ALIVE_S:
            self._kept_alive_at = now
            for channel in list(self._channels.values()):
                if now - channel.last_sent >= self._silence_s:
                    self._flush(channel)

    def _take(self, output: TokenOutput, gained: dict[Choice, OpenRequest]) -> None:
        found = self._find(output.request_id)
        if found is None:
            return  # its answer ended at a stop string while this step ran
        request, choice = found
        try:
            first = output.time_to_first_token
            if first is not None:
                choice.first_token = output.queue_seconds or 0.0, first
                self._on_first_token(*choice.first_token)
            if choice.report is not None and (output.prompt_logprobs or first is not None):
                self._sender.post(request, partial(request.tell_prompt, choice, output.prompt_logprobs))
            if output.prompt_logits is not None:
                for part in logits_parts(output.prompt_logits):
                    self._sender.post(request, partial(request.tell_logits, part))
            if choice.take(output):
                gained[choice] = request
        except Exception:
            # Confined to one request: its failure must not fail the others on this thread.
            log.exception("request %s: a token could not be delivered", request.key)
            choice.fail()
            gained[choice] = request

    def _send(self, gained: dict[Choice, OpenRequest]) -> None:
        """Send one frame to each channel, then have sent what goes on the requests' own calls."""
        now = time.monotonic()
        for channel in {self._fill(request, choice, now) for choice, request in gained.items()}:
            if channel is not None:
                self._flush(channel)
        for choice, request in gained.items():
            if choice.ended:
                lost = request.channel is not None and request.channel.lost
                self._sender.post(request, partial(request.end, choice, lost=lost))
            elif request.channel is None and choice.counted_at + _COUNT_PERIOD_S <= now:
                choice.counted_at = now
                self._sender.post(request, partial(request.tell_tokens, choice, choice.next_count()))

    def _fill(self, request: OpenRequest, choice: Choice, now: float) -> DeltaChannel | None:
        """Put what a choice has gained into the next frame of its channel, and return that, if both exist."""
        channel = request.channel
        # A complete answer's remaining text goes with its last response.
        if channel is None or channel.lost or request.closed or choice.complete or not choice.sendable:
            return None
        try:
            text, tokens, ids, meta = choice.next_delta()
            document = None if meta is None else encode_meta(meta)
        except Exception:
            log.exception("request %s: a delta could not be delivered", request.key)  # as in `_take`
            choice.fail()
            return None
        channel.add(request.streams.start + choice.index, text, tokens, document, ids)
        choice.deltas += 1
        request.last_sent = now
        return channel

    def _do(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            log.exception("a channel could not be opened or closed")  # confined to that channel

    def _flush(self, channel: DeltaChannel) -> None:
        self.worker.renew()
        try:
            channel.flush()
        except Exception:
            # Confined to one channel: the others' frames must still be sent.
            log.exception("a frame of channel %s could not be sent", channel.key)
            self._lose(channel, RefusalCode.INTERNAL, "a frame could not be sent")

    def _lose(self, channel: DeltaChannel, code: RefusalCode, message: str) -> None:
        """Send no more frames on a channel, cancel its requests, and have its own call ended."""
        if channel.lost:
            return
        channel.lost = True
        self._channels.pop(channel.key, None)
        self._sender.refuse(channel, code, message)
        self._on_lost(channel)

    def _close_all(self) -> None:
        for channel in list(self._channels.values()):
            self._lose(channel, *UNLOADED)


def _not_open(channel_id: str) -> ChannelLostError:
    return ChannelLostError(f"the delta channel {channel_id!r} is not open")
