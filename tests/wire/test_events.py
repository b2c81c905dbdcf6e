import io

import msgspec
import pytest

from wire import events

EVERY = [
    events.Notice("n"),
    events.Starting("/var/log/server.log"),
    events.Loading("m", 1.5, 0.25),
    events.Loading("m", 1.5),
    events.Ready(grpc="127.0.0.1:1", metrics="127.0.0.1:3", repository_key="key=value", models=["m"]),
    events.ModelDown("m", "why"),
    events.ModelUp("m"),
    events.ServerDown("why", 0.5),
    events.ServerUp(),
    events.Failed("why\nnot"),
]


def test_each_event_is_one_line_and_comes_back() -> None:
    out = io.BytesIO()
    for event in EVERY:
        events.write_event(out, event)
    assert [events.decode_event(line) for line in out.getvalue().splitlines()] == EVERY


@pytest.mark.parametrize("line", [b'{"event":"unheard_of"}', b'{"event":"loading"}', b"{}"])
def test_an_unknown_event_is_refused(line: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        events.decode_event(line)


def test_other_output_is_no_event() -> None:
    with pytest.raises(msgspec.DecodeError):
        events.decode_event(b"I0101 server started\n")
