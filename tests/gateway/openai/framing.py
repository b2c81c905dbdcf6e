"""The chunks in a stream of server-sent events."""


def chunks_of(events: bytes) -> list[bytes]:
    """Return the data of framed `events`, in order."""
    return [event.removeprefix(b"data: ") for event in events.split(b"\n\n") if event]
