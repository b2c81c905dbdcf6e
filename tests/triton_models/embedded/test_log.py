import os
from pathlib import Path

import pytest

from triton_models.embedded import log
from triton_models.embedded.log import ServerLog, load_failure

ERROR = b'E1121 09:55:12.868396 4723 main.cc:535] "failed to start GRPC service"\n'
LOAD_FAILURE = (
    "load failed for model 'm-stream': version 1 is at UNAVAILABLE state: Internal: "
    "CheckpointError: /c/a.bin: tensor 'x'\n has no shape\n\n"
    "At:\n  /site/build.py(3): build\n  /m/1/model.py(9): initialize\n;"
)


def follow(server_log: ServerLog, output: bytes) -> None:
    reader, writer = os.pipe()
    server_log.follow(reader)
    os.write(writer, output)
    os.close(writer)
    server_log.drain(10)


@pytest.fixture
def server_log(tmp_path: Path) -> ServerLog:
    return ServerLog(tmp_path / "triton.log")


def test_the_last_error_is_the_complaint(server_log: ServerLog) -> None:
    follow(server_log, b"libx.so: cannot open\n" + ERROR + b'I1121 09:55:12.8 47 a.cc:5] "bye"\n')
    assert server_log.errors() == ["failed to start GRPC service"]
    assert server_log.complaint() == "failed to start GRPC service"
    server_log.close()
    assert len(server_log.path.read_text().splitlines()) == 3


def test_without_an_error_the_last_unusual_line_is(server_log: ServerLog) -> None:
    assert server_log.complaint() == "it said nothing"
    follow(server_log, b'I1121 09:55:12.8 47 a.cc:5] "hello"\ntritonserver: libx.so: cannot open')
    assert server_log.complaint() == "tritonserver: libx.so: cannot open"
    follow(server_log, b"")
    assert server_log.complaint() == "it said nothing"
    server_log.close()


def test_what_aborted_the_server_is_its_uncaught_exception(server_log: ServerLog) -> None:
    follow(server_log, b"terminate called after throwing an instance of 'std::bad_alloc'\nwhat(): ...\n")
    assert server_log.uncaught == "std::bad_alloc"
    follow(server_log, b"that was another server\n")
    assert server_log.uncaught is None
    server_log.close()


def test_progress_bars_are_read_and_their_redrawing_is_not_kept(server_log: ServerLog) -> None:
    follow(server_log, b"loading m:  43%|####      | 3/7\rloading m: 100%|##########| 7/7\n")
    assert server_log.progress == 1.0
    server_log.reset_progress()
    assert server_log.progress is None
    follow(server_log, b"loading m:  43%|####      | 3/7\r")
    assert server_log.progress == 0.43
    server_log.close()
    assert server_log.path.read_text() == "loading m: 100%|##########| 7/7\n"


def test_a_process_is_unasked_from_its_own_word_to_its_first_request(server_log: ServerLog) -> None:
    said = b"2026-11-22 10:00:00,000 INFO triton_models.serving.stub: m-stream: process 7 "
    follow(server_log, said + b"is initialized\n")
    assert server_log.unasked("m-stream", 7)
    assert not server_log.unasked("m-stream", 8)
    assert not server_log.unasked("m", 7)
    server_log._take(said + b"has its first request\n")
    assert not server_log.unasked("m-stream", 7)
    server_log._take(said + b"is initialized\n")
    server_log.forget("m-stream")
    assert not server_log.unasked("m-stream", 7)
    server_log._take(said + b"is initialized\n")
    follow(server_log, b"that was another server\n")
    assert not server_log.unasked("m-stream", 7)
    server_log.close()


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_MAX_BYTES", 1000)
    server_log = ServerLog(tmp_path / "triton.log")
    follow(server_log, b"x" * 99 + b"\n" + (b"y" * 99 + b"\n") * 50)
    server_log.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000


def test_a_load_failure_is_one_line_without_traceback(server_log: ServerLog) -> None:
    expected = "CheckpointError: /c/a.bin: tensor 'x' has no shape"
    assert load_failure(LOAD_FAILURE, server_log) == expected
    assert load_failure("no such model", server_log) == "no such model"
    dead = "is at UNAVAILABLE state: Internal: Stub process 'm_0_0' is not healthy.;"
    assert load_failure(dead, server_log).startswith("its process died while loading")
    follow(server_log, ERROR)
    assert load_failure("poll failed", server_log) == "poll failed: failed to start GRPC service"
    server_log.close()
