import msgspec
import pytest
from msgspec import Struct

from gateway.errors import DeadlineError, UpstreamProtocolError
from gateway.generation import Accepted, Delta, Heartbeat, Usage
from gateway.openai.answer import ChunkWriter, Head
from gateway.openai.answer import Usage as UsageDocument
from gateway.openai.chunk_stream import ChunkStream
from gateway.openai.generation_request import StreamOptions

LAST = Delta(pieces=("b",), tokens=1, finish_reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=2))


class Chunk(Struct, frozen=True, kw_only=True):
    """A word, or the total."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Struct]
    usage: UsageDocument | None


class Words(ChunkWriter):
    """One chunk for each delta with text, and the total."""

    def _delta(self, delta: Delta, usage: object) -> list[bytes]:
        return [b'"%b"' % delta.text.encode()] if delta.text else []


def stream() -> ChunkStream:
    head = Head("id", 1, "m", "fp")
    return ChunkStream(Words(head, Chunk, Accepted(prompt_tokens=1), StreamOptions(include_usage=True), 1))


def test_chunks_are_framed_and_the_stream_ends_with_its_mark() -> None:
    events = stream()
    assert events.begin() == b""
    assert events.write(Heartbeat()) == b""
    assert events.write(Delta(tokens=1)) == b""
    assert events.write(LAST) == b'data: "b"\n\n'
    total, end, rest = events.close().split(b"\n\n")
    assert msgspec.json.decode(total.removeprefix(b"data: "), type=Chunk).usage.total_tokens == 3
    assert (end, rest) == (b"data: [DONE]", b"")


def test_an_error_is_a_chunk_before_the_mark() -> None:
    events = stream()
    with pytest.raises(UpstreamProtocolError):
        events.close()
    error, end, rest = events.fail(DeadlineError("too late")).split(b"\n\n")
    assert error.startswith(b'data: {"error":{"message":"too late"')
    assert (end, rest) == (b"data: [DONE]", b"")
