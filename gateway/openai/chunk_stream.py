"""The stream of chunks that both completion routes send.

An error after the first byte is sent as a chunk with the error object. Every stream ends with `[DONE]`.
"""

from abc import ABC, abstractmethod

from gateway.errors import GatewayError, render
from gateway.generation import Accepted, Event
from gateway.openai.answer import ChunkWriter, encode
from gateway.openai.sse import frame

_DONE = b"data: [DONE]\n\n"


class ChunkStream:
    """A `StreamWriter` (see `gateway.openai.answer`) that frames the chunks of a `ChunkWriter`."""

    def __init__(self, chunks: ChunkWriter) -> None:
        self._chunks = chunks

    def begin(self) -> bytes:
        """Return nothing: the first chunks come with the first token."""
        return b""

    def write(self, event: Event) -> bytes:
        """Return the chunks for `event`."""
        return frame(self._chunks.write(event))

    def close(self) -> bytes:
        """Return the chunks after the last event, and the end mark."""
        return frame(self._chunks.close()) + _DONE

    def fail(self, error: GatewayError) -> bytes:
        """Return the error, and the end mark."""
        return frame([encode(render(error))]) + _DONE


class ChunkedAnswer(ABC):
    """An `Answer` (see `gateway.openai.answer`) that is streamed in chunks."""

    @abstractmethod
    def chunks(self, accepted: Accepted) -> ChunkWriter:
        """Return a writer of chunks for the events after `accepted`."""

    def stream(self, accepted: Accepted) -> ChunkStream:
        """Return a writer that streams the events after `accepted`."""
        return ChunkStream(self.chunks(accepted))
