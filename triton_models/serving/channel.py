"""Delta channels: the deltas of many generations in one response per engine step.

A Triton response costs the same whether it holds one delta or hundreds, here and in the gateway. The frames
are defined in `wire.channel`.
"""

import threading
import time

import msgspec

from triton_models.errors import ChannelLostError, InvalidRequestError, QueueFullError
from triton_models.serving.responder import Responder
from wire.channel import Frame
from wire.refusal import RefusalCode

OPEN_LIMIT = 256
"""Most channels open at once. A gateway process has one; `Monitor` checks each for a hang-up periodically."""


class DeltaChannel:
    """One client's open channel. One thread calls `add` and `flush`; any thread may call the rest.

    Attributes:
        lost: true once nothing more is sent; its generations end with an error, each on its own stream.
    """

    def __init__(self, channel_id: str, responder: Responder) -> None:
        self.key = channel_id
        self.lock = threading.Lock()
        self.lost = False
        self._responder = responder
        self._streams: dict[int, str] = {}
        self._sent = 0
        """Number of frames sent, which is the next frame's number."""
        self._last_sent = 0.0
        self._sending_since: float | None = None
        self._begin_frame()

    @property
    def last_frame(self) -> int:
        """The number of the newest frame sent."""
        return self._sent - 1

    @property
    def requests(self) -> set[str]:
        """The keys of the requests whose deltas are sent here."""
        return set(self._streams.values())

    def open(self) -> None:
        """Send frame 0."""
        with self.lock:
            self._send(Frame(frame=0))

    def attach(self, streams: range, key: str) -> None:
        """Reserve the numbers `streams` for the choices of the open request `key`.

        Raises:
            ChannelLostError: the channel is not open any more.
            InvalidRequestError: another open request has one of those numbers.
        """
        with self.lock:
            if self.lost:
                raise _not_open(self.key)
            for stream in streams:
                if stream in self._streams:
                    raise InvalidRequestError(f"stream {stream} of the channel is another open request's")
            self._streams |= dict.fromkeys(streams, key)

    def detach(self, streams: range, key: str) -> None:
        """Free the numbers that request `key` has reserved."""
        with self.lock:
            for stream in streams:
                if self._streams.get(stream) == key:
                    del self._streams[stream]

    def add(self, stream: int, text: str, tokens: int, meta: bytes | None) -> None:
        """Put a delta into the next frame, which holds at most one delta of each stream."""
        if meta is not None:
            self._metas[len(self._numbers)] = msgspec.Raw(meta)
        self._numbers.append(stream)
        self._tokens.append(tokens)
        self._texts.append(text)

    def flush(self) -> None:
        """Send everything added as one frame; if the channel was lost meanwhile, drop the frame."""
        with self.lock:
            frame = Frame(
                frame=self._sent,
                streams=self._numbers,
                tokens=self._tokens,
                texts=self._texts,
                metas=self._metas,
            )
            self._begin_frame()
            if not self.lost:
                self._send(frame)

    def keep_alive(self, interval_s: float) -> None:
        """Send a heartbeat if nothing was sent for `interval_s` seconds. The caller holds `lock`."""
        if not self.lost and time.monotonic() - self._last_sent >= interval_s:
            self._send(Frame(frame=self._sent))

    def client_gone(self) -> bool:
        """Return True if the client cancelled or hung up. The caller holds `lock`."""
        return not self.lost and self._responder.cancelled()

    def end(self, code: RefusalCode, message: str) -> None:
        """Close the channel with a refusal, if it is open."""
        with self.lock:
            if not self.lost:
                self.lost = True
                self._responder.refuse(code, message)

    def sending_s(self, now: float) -> float:
        """Return for how many seconds a frame has been on its way to Triton; 0 if none is."""
        since = self._sending_since
        return 0.0 if since is None else now - since

    def _begin_frame(self) -> None:
        self._numbers: list[int] = []
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._metas: dict[int, msgspec.Raw] = {}

    def _send(self, frame: Frame) -> None:
        self._last_sent = self._sending_since = time.monotonic()
        try:
            self._responder.send_frame(frame)
            self._sent += 1
        finally:
            self._sending_since = None


class Channels:
    """The open channels, by id. Thread-safe."""

    def __init__(self) -> None:
        self._open: dict[str, DeltaChannel] = {}

    def open(self, channel_id: str, responder: Responder) -> DeltaChannel:
        """Open a channel.

        Raises:
            InvalidRequestError: a channel with this id is open already.
            QueueFullError: `OPEN_LIMIT` channels are open.
        """
        if len(self._open) >= OPEN_LIMIT:
            raise QueueFullError(f"{len(self._open)} delta channels are open already")
        channel = DeltaChannel(channel_id, responder)
        if self._open.setdefault(channel_id, channel) is not channel:
            raise InvalidRequestError("a channel of this id is open already")
        try:
            channel.open()
        except Exception:
            self.remove(channel)
            raise
        return channel

    def find(self, channel_id: str) -> DeltaChannel:
        """Return an open channel.

        Raises:
            ChannelLostError: none with this id is open.
        """
        channel = self._open.get(channel_id)
        if channel is None:
            raise _not_open(channel_id)
        return channel

    def all(self) -> list[DeltaChannel]:
        """Return all open channels."""
        return list(self._open.values())

    def remove(self, channel: DeltaChannel) -> None:
        """Forget a channel that was lost."""
        if self._open.get(channel.key) is channel:
            del self._open[channel.key]


def _not_open(channel_id: str) -> ChannelLostError:
    return ChannelLostError(f"the delta channel {channel_id!r} is not open")
