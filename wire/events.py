"""The events that the embedded Triton's process sends to its parent, one JSON document per line on stdout."""

from typing import IO

import msgspec


class Notice(msgspec.Struct, frozen=True, tag="notice", tag_field="event"):
    """Something that the person at the terminal should know."""

    message: str


class Starting(msgspec.Struct, frozen=True, tag="starting", tag_field="event"):
    """The server process is being started; `log` is the file to which its output goes."""

    log: str


class Live(msgspec.Struct, frozen=True, tag="live", tag_field="event", kw_only=True):
    """The server runs, without models yet. Sent once: its addresses stay the same."""

    grpc: str
    """Address of Triton's gRPC endpoint as host:port, like the next one."""
    metrics: str


class Loading(msgspec.Struct, frozen=True, tag="loading", tag_field="event"):
    """A model is being loaded; repeated about every second."""

    model: str
    elapsed_s: float
    progress: float | None = None
    """Share of the checkpoint that has been read, 0 to 1, if the model reports it; 1: it is warming up."""
    size: str | None = None
    """The checkpoint's bytes, as people write them, if the model reports them."""


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="event", kw_only=True):
    """Every model was loaded and answered a request. Sent once."""

    grpc: str
    """Address of Triton's gRPC endpoint as host:port, like the next one."""
    metrics: str
    repository_key: str
    """What Triton requires for everything but inference and health: KEY=VALUE, sent as gRPC metadata."""
    models: list[str]


class ModelDown(msgspec.Struct, frozen=True, tag="model_down", tag_field="event"):
    """A model does not answer, or its process was given up while starting; it is being loaded again."""

    model: str
    reason: str


class ModelUp(msgspec.Struct, frozen=True, tag="model_up", tag_field="event"):
    """A model that was down answers again."""

    model: str


class ServerDown(msgspec.Struct, frozen=True, tag="server_down", tag_field="event"):
    """The server is gone with all its models; it is started again after a while."""

    reason: str
    retry_in_s: float


class ServerUp(msgspec.Struct, frozen=True, tag="server_up", tag_field="event"):
    """The server runs again, on the same ports; its models are loaded next."""


class Failed(msgspec.Struct, frozen=True, tag="failed", tag_field="event"):
    """The process ends with a non-zero status because of this."""

    message: str


Event = Notice | Starting | Live | Loading | Ready | ModelDown | ModelUp | ServerDown | ServerUp | Failed

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def decode_event(line: bytes) -> Event:
    """Read one line.

    Raises:
        msgspec.ValidationError: an unknown event or a wrong type.
        msgspec.DecodeError: not JSON.
    """
    return _decoder.decode(line)


def write_event(out: IO[bytes], event: Event) -> None:
    """Write one line and flush it."""
    out.write(msgspec.json.encode(event) + b"\n")
    out.flush()
