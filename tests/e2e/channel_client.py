"""A plain gRPC client of delta channels, as anybody could write from wire/README.md."""

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any

import grpc

from tests.e2e.stream_client import StreamClient
from wire.channel import Frame, decode_frame
from wire.strings import unpack_strings


@dataclass
class OpenedChannel:
    """Reads an open channel on a thread of its own, until it is closed."""

    call: Any
    frames: list[Frame] = field(default_factory=list)
    opened: threading.Event = field(default_factory=threading.Event)
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def text(self, stream: int) -> str:
        return "".join(
            text
            for frame in self.frames
            for number, text in zip(frame.streams, frame.texts, strict=True)
            if number == stream
        )

    def deltas(self, stream: int) -> int:
        return sum(frame.streams.count(stream) for frame in self.frames)

    def close(self) -> None:
        self.call.cancel()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for message in self.call:
                if message.error_message:
                    self.errors.append(message.error_message)
                elif message.infer_response.outputs:
                    raw = message.infer_response.raw_output_contents[1]
                    self.frames.append(decode_frame(unpack_strings(raw)[0]))
                    self.opened.set()


def open_channel(client: StreamClient, model: str, channel_id: str) -> OpenedChannel:
    """Open a channel and wait for its first frame."""
    channel = OpenedChannel(client.call(model, open_channel=channel_id).responses)
    assert channel.opened.wait(60)
    return channel
